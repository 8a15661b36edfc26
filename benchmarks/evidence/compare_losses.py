"""Trained models compared: every loss, FastCLIP's components, batch sizes, and changes of the recipe.

    python benchmarks/evidence/compare_losses.py --photos FOLDER   # continues where it was interrupted
    python benchmarks/evidence/compare_losses.py --quick           # a test of the code on any machine; keeps nothing

A small ViT on 32,023 images (COCO and Flickr8k, 64 px) from scratch; results_page.py makes the tables.

Losses: at batch 128 each loss gets six trials (three learning rates by two values of its most important setting), at
larger batches three: learning rates with the setting that was best at 128. The trial with the best text-to-image
recall@10 on Flickr8k's val set is trained with five other seeds, the same for all losses. The test recall at the
point of the run that is best on val counts.

Components, at batch 128 with three of these seeds: each variant starts from its loss's settings and gets two trials
for what it changes, an optimizer three learning rates. Batch sizes: the settings of batch 128 with three learning
rates for each size. Changes, chosen after the main comparison and without a search: more epochs, with the same lr_tau
and half of it, more weight decay, and a gamma that forgets faster.
"""

import functools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, TypeVar

import line_chart
import measurements
import stats
from measurements import Table
from training_runs import EPOCHS, Rows, Run, RunStore, store_from_command_line

SEEDS, FEWER_SEEDS, SEARCH_SEED = 5, 3, 100
RATES = (2.5e-4, 5e-4, 1e-3)  # at batch 128; they grow with the square root of the batch
Settings = dict[str, Any]
# A sample's own temperature is updated once an epoch, and the published bias correction makes the steps small: 16 of
# them in one direction take it from 0.07 to 0.021.
PER_SAMPLE: Settings = {"tau": 0.07, "lr_tau": 1.4e-2, "tau_min": 0.02}
# With 127 negatives no softmax is sharper than 4.8 nats, and a model that has learned little is far below that: the
# published rho of 6.5 and 7 only make tau fall, as far as lr_tau allows. The second choice has a rho within reach.
CHOICES: dict[str, tuple[Settings, Settings]] = {
    "infonce": ({"tau": 0.07}, {"tau": 0.03}),
    "fastclip-v3": ({"rho": 6.5, "lr_tau": 2e-4}, {"rho": 1.0, "lr_tau": 1e-3, "tau_min": 0.03}),
    "siglip": ({"bias": -10.0}, {"bias": -5.0}),
    "sogclr": ({"tau": 0.05}, {"tau": 0.1}),
    "isogclr": ({"rho": 1.0, **PER_SAMPLE}, {"rho": 3.0, **PER_SAMPLE}),
    "fastclip-v0": ({"gamma_min": 0.2}, {"gamma_min": 0.6}),
    "fastclip-v1": ({"tau": 0.05}, {"tau": 0.1}),
    "fastclip-v2": ({"rho": 1.0, **PER_SAMPLE}, {"rho": 3.0, **PER_SAMPLE}),
}
BATCH = 128
LARGER = {512: tuple(CHOICES), 2048: ("infonce",)}  # the losses trained with larger batches
BATCHES = (64, 128, 256, 512, 1024, 2048, 4096)
PAIR = ("infonce", "fastclip-v3")
PRIMARY = ("fastclip-v3", BATCH)  # the comparison that was chosen before the runs; the others share Holm's correction
COMPARISONS = 2 * (len(CHOICES) - 1) - 1  # the others: each loss with infonce, at 128 and 512
METRICS = {"test_t2i10": "text-to-image", "test_i2t10": "image-to-text", "cifar10": "CIFAR-10", "seen_t2i10": "seen"}
# Learning rates and weight decay. Lion's authors advise a third to a tenth of AdamW's rate and as much more decay.
# SGD adds the decay to the gradient. LAMB also had 1e-2: its lowest rate was the best, so a lower one was added.
OPTIMIZERS = {
    "adamw": (RATES, 0.1),
    "lamb": ((1e-3, 2e-3, 5e-3), 0.1),
    "lion": ((3e-5, 1e-4, 2e-4), 0.5),
    "sgdm": ((0.03, 0.3, 3.0), 1e-5),
}
CONSTANT_GAMMA = {"fastclip-v1": "sogclr", "fastclip-v2": "isogclr"}
FASTCLIP = tuple(f"fastclip-v{number}" for number in range(4))
FASTER, SLOWER = "gamma 0.6 or more", "twice the epochs, half lr_tau"
Name = TypeVar("Name")
Chosen = dict[tuple[str, Any], list[Run]]  # the runs of each variant, one for each seed


@dataclass
class Comparison:
    """Searches and their results. The quick form has no trials, two seeds, batch 16 and few variants."""

    store: RunStore
    quick: bool = False
    stored: Rows = field(default_factory=dict)

    def train(self, runs: Sequence[Run]) -> None:
        self.stored |= self.store.rows(runs)

    def best(self, spaces: Mapping[Name, list[Run]]) -> dict[Name, Run]:
        """By name the trial with the best recall on val, if all its trials are stored."""
        if self.quick:
            return {name: replace(trials[0], batch=16) for name, trials in spaces.items()}
        self.train([trial for trials in spaces.values() for trial in trials])
        return {
            name: max(trials, key=lambda trial: float(self.stored[trial]["val_t2i10"]))
            for name, trials in spaces.items()
            if all(trial in self.stored for trial in trials)
        }

    def seeded(self, best: Mapping[Name, Run], seeds: int) -> dict[Name, list[Run]]:
        """By name the runs with all seeds, if they are all stored."""
        if self.quick:
            best, seeds = dict(list(best.items())[:4]), 2
        numbers = range(1, seeds + 1)
        chosen = {name: [replace(run, seed=seed) for seed in numbers] for name, run in best.items()}
        self.train([run for runs in chosen.values() for run in runs])
        return {name: runs for name, runs in chosen.items() if all(run in self.stored for run in runs)}

    def search(self, spaces: Mapping[Name, list[Run]], seeds: int = FEWER_SEEDS) -> dict[Name, list[Run]]:
        return self.seeded(self.best(spaces), seeds)

    def values(self, runs: Sequence[Run], metric: str = "test_t2i10") -> list[float]:
        return [float(self.stored[run][metric]) for run in runs]

    def paired(self, runs: Sequence[Run], baseline: Sequence[Run], metric: str = "test_t2i10") -> stats.Paired:
        return stats.paired(self.values(runs, metric), self.values(baseline, metric))

    @functools.cached_property
    def small(self) -> dict[str, Run]:
        """The best trial of each loss at batch 128."""
        return self.best({loss: trials(loss) for loss in CHOICES})

    @functools.cached_property
    def losses(self) -> Chosen:
        """By loss and batch."""
        larger = {(loss, batch): at_batch(self.small[loss], batch) for batch in LARGER for loss in LARGER[batch]}
        chosen = self.seeded({(loss, BATCH): run for loss, run in self.small.items()}, SEEDS)
        return chosen | self.search(larger, SEEDS)

    @functools.cached_property
    def components(self) -> Chosen:
        """By component and variant."""
        searched = {("searched gamma", name): [self.small[name]] for pair in CONSTANT_GAMMA.items() for name in pair}
        rules = {("rule", loss): [self.small[loss]] for loss in FASTCLIP}
        return self.search(component_trials(self.small)) | self.search(searched | rules, SEEDS)

    @functools.cached_property
    def batch_sizes(self) -> Chosen:
        batches = BATCHES[:2] if self.quick else BATCHES
        return self.search({(loss, batch): at_batch(self.small[loss], batch) for batch in batches for loss in PAIR})

    @functools.cached_property
    def changes(self) -> Chosen:
        """By change and loss. The last change exists for fastclip-v3 only."""
        pair = {loss: self.small[loss] for loss in PAIR}
        variants = {("unchanged", loss): run for loss, run in pair.items()}
        longer = {loss: replace(run, epochs=2 * EPOCHS) for loss, run in pair.items()}
        variants |= {("twice the epochs", loss): run for loss, run in longer.items()}
        slower = with_hyper(longer["fastclip-v3"], lr_tau=dict(longer["fastclip-v3"].hyper)["lr_tau"] / 2)
        variants |= {(SLOWER, "infonce"): longer["infonce"], (SLOWER, "fastclip-v3"): slower}
        variants |= {("weight decay 0.5", loss): replace(run, wd=0.5) for loss, run in pair.items()}
        variants[FASTER, "fastclip-v3"] = with_hyper(pair["fastclip-v3"], gamma_min=0.6)
        return self.seeded(variants, FEWER_SEEDS)


def rates(batch: int) -> list[float]:
    return [float(f"{rate * (batch / BATCH) ** 0.5:.2g}") for rate in RATES]


def trials(loss: str) -> list[Run]:
    """At batch 128."""
    pairs = product(rates(BATCH), CHOICES[loss])
    return [Run(loss, BATCH, lr, SEARCH_SEED, tuple(sorted(choice.items()))) for lr, choice in pairs]


def with_hyper(run: Run, **hyper: Any) -> Run:
    return replace(run, hyper=tuple(sorted((dict(run.hyper) | hyper).items())))


def at_batch(best: Run, batch: int) -> list[Run]:
    """The trials at another batch size. fastclip-v3's temperature makes steps of one size, which are larger here if
    there are fewer; the other temperatures follow the learning rate or are updated once an epoch."""
    if best.loss == "fastclip-v3":
        best = with_hyper(best, lr_tau=dict(best.hyper)["lr_tau"] * batch / best.batch)
    return [replace(best, batch=batch, lr=rate) for rate in rates(batch)]


def edge(run: Run) -> str:
    """Marks a learning rate that is the lowest or the highest of those tried."""
    return " (edge)" if run.lr in (min(rates(run.batch)), max(rates(run.batch))) else ""


def component_trials(best: Mapping[str, Run]) -> Chosen:
    """The trials of each variant, by component and name."""
    spaces: Chosen = {}
    for name, (optimizer_rates, decay) in OPTIMIZERS.items():
        spaces["optimizer", name] = [
            replace(best["fastclip-v3"], opt=name, lr=rate, wd=decay) for rate in optimizer_rates
        ]
    for loss, schedule in product(FASTCLIP[1:], ("constant", "cosine")):
        spaces["gamma", f"{loss}, {schedule}"] = [
            with_hyper(best[loss], gamma_schedule=schedule, gamma_min=gamma) for gamma in (0.2, 0.6)
        ]
    for loss, setting, variant in (("fastclip-v3", "tau_gradient", "exact"), ("fastclip-v2", "tau_adam", "visits")):
        for form in ("published", variant):  # with every rho: the best one may differ
            searched = [replace(best[loss], hyper=tuple(choice.items())) for choice in CHOICES[loss]]
            if form == "visits":  # 16 of its steps reach as far with this rate
                searched = [with_hyper(trial, lr_tau=3.1e-3) for trial in searched]
            spaces["gradient", f"{loss}, {form}"] = [with_hyper(trial, **{setting: form}) for trial in searched]
    return spaces


def differences(
    comparison: Comparison, metric: str = "test_t2i10"
) -> tuple[dict[tuple[str, Any], stats.Paired], dict[tuple[str, Any], float]]:
    """Of each loss and batch to infonce, and p: Holm's, but for the comparison that was chosen before the runs."""
    chosen = comparison.losses
    gaps = {
        (loss, batch): comparison.paired(runs, chosen["infonce", batch], metric)
        for (loss, batch), runs in chosen.items()
        if loss != "infonce" and ("infonce", batch) in chosen
    }
    corrected = stats.holm({name: gap.p for name, gap in gaps.items() if name != PRIMARY}, COMPARISONS)
    return gaps, {name: corrected.get(name, gap.p) for name, gap in gaps.items()}


def loss_summary(comparison: Comparison) -> list[dict[str, Any]]:
    """The rows of quality.csv: what was chosen, which runs it is the mean of, and the difference to infonce."""
    gaps, p_values = differences(comparison)
    image_to_text, _ = differences(comparison, "test_i2t10")
    summary = []
    for (loss, batch), runs in sorted(comparison.losses.items(), key=lambda item: item[0][1]):
        row = {
            "batch": batch, "loss": loss, "lr": runs[0].lr, "hyper": json.dumps(dict(runs[0].hyper)),
            "edge": bool(edge(runs[0])), "seeds": len(runs),
            "runs": " ".join(run.key(comparison.store.recipe) for run in runs),
        }  # fmt: skip
        for metric in METRICS:
            values = comparison.values(runs, metric)
            row |= {f"{metric}_mean": statistics.fmean(values), f"{metric}_deviation": statistics.stdev(values)}
        row["tau"] = round(statistics.fmean(comparison.values(runs, "tau")), 5)
        gap, other = gaps.get((loss, batch)), image_to_text.get((loss, batch))
        columns = ("gap_mean", "gap_deviation", "p", "p_holm", "other_gap_mean", "other_gap_deviation", "other_p")
        figures = (*gap, p_values[loss, batch], *other) if gap and other else ("",) * len(columns)
        row |= dict(zip(columns, figures, strict=True)) | {"device": comparison.stored[runs[0]]["device"]}
        summary.append({key: round(value, 6) if isinstance(value, float) else value for key, value in row.items()})
    return summary


def settings(run: Run, *, decay: bool = False) -> str:
    named = [("lr", run.lr), *([("wd", run.wd)] if decay else []), *run.hyper]
    return ", ".join(f"{name} {value}" for name, value in named)


def loss_table(comparison: Comparison) -> Table:
    gaps, p_values = differences(comparison)
    image_to_text, _ = differences(comparison, "test_i2t10")
    rows = []
    for (loss, batch), runs in sorted(comparison.losses.items(), key=lambda item: item[0][1]):
        metrics = [stats.percent(comparison.values(runs, metric)) for metric in METRICS]
        tau = f"{statistics.fmean(comparison.values(runs, 'tau')):.3f}"
        cells = [f"{batch:,}", loss, settings(runs[0]) + edge(runs[0]), *metrics, tau]
        if gap := gaps.get((loss, batch)):
            other = image_to_text[loss, batch]
            rows.append([*cells, str(gap), f"{p_values[loss, batch]:.4f}", str(other), f"{other.p:.4f}"])
        else:
            rows.append([*cells, "", "", "", ""])
    columns = ["batch", "loss", "settings", *METRICS.values(), "tau", "difference to infonce", "p"]
    return Table([*columns, "image-to-text difference", "its p"], rows)


def last_point_table(comparison: Comparison) -> Table:
    """The same differences by the last point of every run instead of the best on val."""
    gaps, p_values = differences(comparison, "last_test_t2i10")
    rows = [[f"{batch:,}", loss, str(gap), f"{p_values[loss, batch]:.4f}"] for (loss, batch), gap in gaps.items()]
    return Table(["batch", "loss", "difference to infonce", "p"], rows)


def component_table(comparison: Comparison, component: str, baseline: str) -> Table:
    """`baseline` names the variant to compare with; if it starts with a comma, it is the form of the same loss."""
    chosen = {name: runs for (kind, name), runs in comparison.components.items() if kind == component}
    pairs = {name: name.split(",")[0] + baseline if baseline.startswith(",") else baseline for name in chosen}
    pairs |= CONSTANT_GAMMA if component == "searched gamma" else {}
    gaps = {
        name: comparison.paired(chosen[name], chosen[other])
        for name, other in pairs.items()
        if other in chosen and other != name
    }
    corrected = stats.holm({name: gap.p for name, gap in gaps.items()})
    rows = []
    for name, runs in chosen.items():
        metrics = [stats.percent(comparison.values(runs, metric)) for metric in ("test_t2i10", "cifar10")]
        gap = gaps.get(name)
        compared = [pairs[name], str(gap), f"{gap.p:.4f}", f"{corrected[name]:.4f}"] if gap else [""] * 4
        rows.append([name, settings(runs[0], decay=component == "optimizer"), str(len(runs)), *metrics, *compared])
    columns = ["variant", "settings", "seeds", "text-to-image", "CIFAR-10"]
    return Table([*columns, "baseline", "difference", "p", "Holm's p"], rows)


def batch_size_table(comparison: Comparison) -> Table:
    rows = []
    for batch in complete_batches(comparison):
        baseline, ours = (comparison.batch_sizes[loss, batch] for loss in PAIR)
        gap = comparison.paired(ours, baseline)
        cells = [
            cell
            for runs in (baseline, ours)
            for cell in (stats.percent(comparison.values(runs)), f"{runs[0].lr:g}{edge(runs[0])}")
        ]
        rows.append([f"{batch:,}", *cells, str(gap), f"{gap.p:.4f}"])
    return Table(["batch", "infonce", "infonce lr", "fastclip-v3", "fastclip-v3 lr", "difference", "p"], rows)


def complete_batches(comparison: Comparison) -> list[int]:
    return [batch for batch in BATCHES if all((loss, batch) in comparison.batch_sizes for loss in PAIR)]


def batch_trend_table(comparison: Comparison) -> Table:
    """How the difference changes with the batch: the slope of a straight line over doublings, for each seed."""
    batches = complete_batches(comparison)
    rows = []
    for part in (batches, batches[:-1], batches[1:-1]):
        if len(part) < 3:
            continue
        baseline, ours = ([comparison.values(comparison.batch_sizes[loss, batch]) for batch in part] for loss in PAIR)
        gaps = [[a - b for a, b in zip(*pair, strict=True)] for pair in zip(ours, baseline, strict=True)]
        doublings = [math.log2(batch) for batch in part]
        slopes = [statistics.linear_regression(doublings, seed).slope for seed in zip(*gaps, strict=True)]
        slope = stats.paired(slopes, [0.0] * len(slopes))
        rows.append([f"{part[0]:,} to {part[-1]:,}", str(slope), f"{slope.p:.4f}"])
    return Table(["batches", "points per doubling", "p"], rows)


def change_table(comparison: Comparison) -> Table:
    chosen = comparison.changes
    rows = []
    for change in [change for change, loss in chosen if loss == "fastclip-v3"]:
        ours, baseline = chosen[change, "fastclip-v3"], chosen.get((change, "infonce"))
        cells = [
            stats.percent(comparison.values(runs, metric)) if runs else ""
            for runs in (baseline, ours)
            for metric in ("test_t2i10", "seen_t2i10")
        ]
        gaps = [
            comparison.paired(ours, baseline or chosen["unchanged", "infonce"], metric)
            for metric in ("test_t2i10", "test_i2t10", "cifar10")
        ]
        tau = [f"{statistics.fmean(comparison.values(runs, 'tau')):.3f}" if runs else "" for runs in (baseline, ours)]
        rows.append([change, *cells, str(gaps[0]), f"{gaps[0].p:.4f}", *map(str, gaps[1:]), *tau])
    columns = ["change", "infonce", "infonce, seen", "fastclip-v3", "fastclip-v3, seen", "difference", "p"]
    columns += ["image-to-text difference", "CIFAR-10 difference", "infonce, tau", "fastclip-v3, tau"]
    return Table(columns, rows)


def mean_curve(comparison: Comparison, runs: Sequence[Run]) -> list[tuple[float, float]]:
    """Text-to-image recall on the test set, in percent, over samples seen: the mean of the seeds."""
    points = zip(*map(comparison.store.curve, runs), strict=True)
    return [(seeds[0]["samples"], 100 * statistics.fmean(p["test_t2i10"] for p in seeds)) for seeds in points]


def draw(comparison: Comparison) -> None:
    """Recall over samples seen and over the seconds of steps, by loss; by optimizer; by batch size."""
    results, recall = comparison.store.results, "text-to-image recall@10, %"
    # The fastest of five groups of steps: a small model's step waits for the host, and a busy host only adds time.
    step_seconds = {
        (row["loss"], int(row["batch"])): float(row["low_ms"]) / 1e3
        for row in measurements.rows(results / "step_time.csv")
    }
    for batch in (BATCH, 512):
        chosen = {loss: runs for (loss, size), runs in comparison.losses.items() if size == batch}
        curves = {loss: mean_curve(comparison, runs) for loss, runs in chosen.items()}
        panels = {"samples seen": curves}
        if all((loss, batch) in step_seconds for loss in curves):
            panels["seconds of training steps on an otherwise idle GPU"] = {
                loss: [(samples / batch * step_seconds[loss, batch], value) for samples, value in curve]
                for loss, curve in curves.items()
            }
        title = f"Flickr8k test, batch {batch:,}, mean of the seeds"
        line_chart.draw(results / f"quality_{batch}.svg", panels, title=title, ylabel=recall)
    optimizers = {
        name: mean_curve(comparison, runs)
        for (kind, name), runs in comparison.components.items()
        if kind == "optimizer"
    }
    title = "fastclip-v3 by optimizer, Flickr8k test, batch 128"
    line_chart.draw(results / "optimizers.svg", {"samples seen": optimizers}, title=title, ylabel=recall)
    sizes = {
        loss: [
            (batch, 100 * statistics.fmean(comparison.values(comparison.batch_sizes[loss, batch])))
            for batch in complete_batches(comparison)
        ]
        for loss in PAIR
    }
    title = "Flickr8k test by batch size, equal samples seen"
    line_chart.draw(results / "batch_size.svg", {"batch": sizes}, title=title, ylabel=recall, xscale="log")


COMPONENT_BASELINES = {
    "gamma": ("gamma", ", constant"),
    "searched_gamma": ("searched gamma", ""),
    "rule": ("rule", "fastclip-v0"),
    "rule_v3": ("rule", "fastclip-v3"),
    "gradient": ("gradient", ", published"),
    "optimizer": ("optimizer", "adamw"),
}


def tables(comparison: Comparison) -> dict[str, Table]:
    component_tables = {
        name: component_table(comparison, *baseline) for name, baseline in COMPONENT_BASELINES.items()
    }
    return component_tables | {
        "quality": loss_table(comparison),
        "last_point": last_point_table(comparison),
        "batch_size": batch_size_table(comparison),
        "batch_trend": batch_trend_table(comparison),
        "changes": change_table(comparison),
    }


def main() -> None:
    store = store_from_command_line(__doc__)
    comparison = Comparison(store, quick=store.steps is not None)
    for name, table in tables(comparison).items():
        print(f"{name}\n{table}\n")
    (store.results / "quality.csv").unlink(missing_ok=True)  # it follows from runs.csv
    for row in loss_summary(comparison):
        measurements.append(store.results / "quality.csv", row)
    draw(comparison)


if __name__ == "__main__":
    main()
