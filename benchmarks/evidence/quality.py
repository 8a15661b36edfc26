"""Quality at equal budget: every loss, the same model, photographs, samples seen and number of trials.

    python benchmarks/evidence/quality.py --photos FOLDER     # FOLDER is made by photos.py; continues where it ended
    python benchmarks/evidence/quality.py --write             # table, plot and paragraph from the rows there are
    python benchmarks/evidence/quality.py --quick             # tries the code, on a CPU too; nothing is kept

A small ViT on 32,023 photographs (COCO and Flickr8k, 64 px) from scratch. At batch 128 each loss gets six trials
(three learning rates by two values of the setting that matters most to it) with a seed of their own, at larger
batches three: learning rates with the setting that was best at 128. The one with the best text-to-image recall@10 on
Flickr8k's val set is trained with five other seeds, which are the same for all losses. What counts is the test recall
at the point of the run that is best on val.
"""

import json
import statistics
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import chart
import stats
import table
from experiment import Experiment, experiment
from runs import Rows, Run
from table import not_complete
from workers import side_by_side

RATES = (2.5e-4, 5e-4, 1e-3)  # at batch 128; they grow with the square root of the batch
Settings = dict[str, float]
# A sample meets its own temperature once an epoch, and the published bias correction makes the steps small: 16 of
# them, all in one direction, take it from 0.07 to 0.021.
PER_SAMPLE: Settings = {"tau": 0.07, "lr_tau": 1.4e-2, "tau_min": 0.02}
# With 127 negatives no softmax is sharper than 4.8 nats, and a model that has learned little is far below that: the
# published rho of 6.5 and 7 only make tau fall, and lr_tau says how far. So the second choice has a rho within reach.
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
BATCH, LARGER = 128, {512: tuple(CHOICES), 2048: ("infonce",)}  # and who trains with them
SEARCH_SEED = 100
METRICS = {"test_t2i10": "text-to-image", "test_i2t10": "image-to-text", "cifar10": "CIFAR-10", "seen_t2i10": "seen"}
SUMMARY = (
    "batch", "loss", "lr", "hyper", "edge", "seeds", "runs",
    *(f"{metric}_{what}" for metric in METRICS for what in ("mean", "deviation")),
    "tau", "gap_mean", "gap_deviation", "p", "p_holm", "other_gap_mean", "other_gap_deviation", "other_p", "device",
)  # fmt: skip


def rates(batch: int) -> list[float]:
    """The three learning rates of a batch size."""
    return [float(f"{rate * (batch / BATCH) ** 0.5:.2g}") for rate in RATES]


def trials(loss: str, quick: bool = False) -> list[Run]:
    """At the small batch."""
    batch = 16 if quick else BATCH
    pairs = product(rates(batch), CHOICES[loss])
    found = [Run(loss, batch, lr, SEARCH_SEED, tuple(sorted(choice.items()))) for lr, choice in pairs]
    return found[:1] if quick else found


def larger(best: Run, batch: int) -> list[Run]:
    """At another batch than the one where `best` was found. fastclip-v3's temperature moves by as much in every step,
    so with fewer steps it moves by more, to get as far; the other temperatures follow the learning rate, or move once
    an epoch."""
    hyper = dict(best.hyper)
    if best.loss == "fastclip-v3":
        hyper["lr_tau"] = hyper["lr_tau"] * batch / best.batch
    return [replace(best, batch=batch, lr=rate, hyper=tuple(sorted(hyper.items()))) for rate in rates(batch)]


def at_the_edge(run: Run) -> bool:
    """Whether the best learning rate may lie outside of those that were tried."""
    return run.lr in (min(rates(run.batch)), max(rates(run.batch)))


Spaces = dict[tuple[str, int], list[Run]]  # runs by loss and batch


def small_spaces(asked: Experiment) -> Spaces:
    losses = ("infonce", "siglip", "fastclip-v2", "fastclip-v3") if asked.quick else tuple(CHOICES)
    found = {loss: trials(loss, asked.quick) for loss in losses}
    return {(loss, runs[0].batch): runs for loss, runs in found.items()}


def larger_spaces(asked: Experiment, best: dict[tuple[str, int], Run]) -> Spaces:
    """Of those losses whose best setting at the small batch is known."""
    wanted = {32: ("infonce",)} if asked.quick else LARGER
    chosen = {loss: run for (loss, _), run in best.items()}
    pairs = [(loss, batch) for batch, losses in wanted.items() for loss in losses if loss in chosen]
    return {(loss, batch): larger(chosen[loss], batch) for loss, batch in pairs}


def values(runs: list[Run], found: Rows, metric: str) -> list[float]:
    return [float(found[run][metric]) for run in runs]


PRIMARY = ("fastclip-v3", BATCH)  # the comparison that was named before any run; the others share their chances
COMPARISONS = 2 * (len(CHOICES) - 1) - 1  # the others: of each loss with infonce, at 128 and 512


def against_infonce(chosen: Spaces, found: Rows, metric: str) -> dict[tuple[str, int], stats.Paired]:
    return {
        (loss, batch): stats.paired(values(runs, found, metric), values(chosen["infonce", batch], found, metric))
        for (loss, batch), runs in chosen.items()
        if loss != "infonce" and ("infonce", batch) in chosen
    }


def summary(chosen: Spaces, found: Rows, recipe: str) -> list[dict[str, Any]]:
    """One row for each loss and batch: what was chosen, which runs it is the mean of, and how infonce did there."""
    gaps, others = (against_infonce(chosen, found, metric) for metric in ("test_t2i10", "test_i2t10"))
    corrected = stats.holm({name: gap.p for name, gap in gaps.items() if name != PRIMARY}, COMPARISONS)
    rows = []
    for (loss, batch), runs in sorted(chosen.items(), key=lambda entry: entry[0][1]):
        gap, tau = gaps.get((loss, batch)), statistics.fmean(values(runs, found, "tau"))
        row: dict[str, Any] = dict.fromkeys(SUMMARY, "") | {
            "batch": batch, "loss": loss, "lr": runs[0].lr, "hyper": json.dumps(dict(runs[0].hyper)),
            "edge": at_the_edge(runs[0]), "seeds": len(runs), "runs": " ".join(run.key(recipe) for run in runs),
            "tau": round(tau, 5), "device": found[runs[0]]["device"],
        }  # fmt: skip
        for metric in METRICS:
            recalls = values(runs, found, metric)
            row[f"{metric}_mean"] = round(statistics.fmean(recalls), 6)
            row[f"{metric}_deviation"] = round(statistics.stdev(recalls), 6)
        if gap is not None:
            row |= {"gap_mean": round(gap.mean, 6), "gap_deviation": round(gap.deviation, 6), "p": round(gap.p, 6)}
            row["p_holm"] = round(
                corrected.get((loss, batch), gap.p), 6
            )  # the one that was named before stays as it is
            for name, value in others[loss, batch]._asdict().items():
                row["other_p" if name == "p" else f"other_gap_{name}"] = round(value, 6)
        rows.append(row)
    return rows


def verdict(rows: list[dict[str, Any]]) -> str:
    """Of the comparison that was named before: the headline, whatever it says. Nothing where it is not there yet."""
    named = [row for row in rows if (row["loss"], int(row["batch"])) == PRIMARY and row["p"] != ""]
    if not named:
        return ""
    loss, batch = PRIMARY
    mean, deviation, chance = (float(named[0][name]) for name in ("gap_mean", "gap_deviation", "p"))
    figures = f"{100 * mean:+.2f} ± {100 * deviation:.2f} points, p = {chance:.4f}"
    if chance >= 0.05:
        return f"**At batch {batch} {loss} does not beat infonce: the difference may be chance ({figures}).**"
    return f"**At batch {batch} {loss} {'beats' if mean > 0 else 'is worse than'} infonce ({figures}).**"


def paragraph(rows: list[dict[str, Any]]) -> str:
    lines = [
        verdict(rows), "",
        f"| batch | loss | chosen | {' | '.join(METRICS.values())} | tau | against infonce | p |"
        " image-to-text against infonce | its p |",
        "|---|---|---|" + "---|" * len(METRICS) + "---|---|---|---|---|",
    ]  # fmt: skip
    for row in rows:
        settings = {"lr": row["lr"]} | json.loads(row["hyper"])
        named = ", ".join(f"{name} {value:g}" for name, value in settings.items()) + (
            " (edge)" if row["edge"] else ""
        )
        figures = " | ".join(
            f"{100 * row[f'{metric}_mean']:.2f} ± {100 * row[f'{metric}_deviation']:.2f}" for metric in METRICS
        )
        gap = " |  |  | "
        if row["p"] != "":
            gap = f"{100 * row['gap_mean']:+.2f} ± {100 * row['gap_deviation']:.2f} | {row['p_holm']:.4f} | "
            gap += (
                f"{100 * row['other_gap_mean']:+.2f} ± {100 * row['other_gap_deviation']:.2f} | {row['other_p']:.4f}"
            )
        lines.append(f"| {row['batch']:,} | {row['loss']} | {named} | {figures} | {row['tau']:.3f} | {gap} |")
    loss, batch = PRIMARY
    note = (
        f"Recall@10 on Flickr8k's test set and zero-shot accuracy, in percent: mean and standard deviation over"
        f" {rows[0]['seeds']} seeds. Seen: text-to-image on as many photographs that were trained on. Differences"
        f" are paired by seed and p is of Student's two-sided test: that of {loss} at batch {batch} was named before"
        f" the runs, the others' are Holm's, of {COMPARISONS} comparisons; those of image-to-text were looked at"
        " afterwards and are not corrected. What counts of a run is the one of its eight points that is best on val,"
        " tau included. Seeds do not cover the chance that lies in the choice of the test photographs, nor do they"
        " cover the search, of one seed: why.py trained one of its runs again, which ended elsewhere by some tenths"
        " of a point (why.csv), and some settings were chosen by less. (edge): the best of the three learning rates"
        " was the lowest or the highest."
    )
    return "\n".join([*lines, "", note, ""])


def at_the_end(chosen: Spaces, found: Rows) -> str:
    """Who differs from infonce beyond chance if the last point of a run counts, not the one that is best on val."""
    gaps = against_infonce(chosen, found, "last_test_t2i10")
    corrected = stats.holm({name: gap.p for name, gap in gaps.items() if name != PRIMARY}, COMPARISONS)
    clear = [
        f"{loss} at {batch} ({100 * gaps[loss, batch].mean:+.2f}, p = {chance:.4f})"
        for (loss, batch), chance in corrected.items()
        if chance < 0.05
    ]
    if PRIMARY not in gaps:
        return ""
    gap = gaps[PRIMARY]
    figures = f"{100 * gap.mean:+.2f} ± {100 * gap.deviation:.2f}, p = {gap.p:.4f}"
    beyond = "; beyond chance, by Holm's p: " + ", ".join(clear) if clear else ""
    return f"By the last point of every run instead: {PRIMARY[0]} at {PRIMARY[1]} {figures}{beyond}.\n"


def unfinished(chosen: Spaces) -> list[str]:
    """Which losses do not have all their seeds."""
    wanted = [(loss, batch) for batch, losses in {BATCH: tuple(CHOICES), **LARGER}.items() for loss in losses]
    return [f"{loss} at {batch:,}" for loss, batch in wanted if (loss, batch) not in chosen]


def mean_curve(asked: Experiment, runs: list[Run]) -> list[tuple[float, float]]:
    """Text-to-image recall on the test set, in percent, over samples seen: the mean of the seeds."""
    points = zip(*map(asked.curve, runs), strict=True)
    return [(at[0]["samples"], 100 * sum(point["test_t2i10"] for point in at) / len(at)) for at in points]


def draw(asked: Experiment, chosen: Spaces) -> list[Path]:
    """Curves over samples seen and, where step_time.py has been run, over GPU seconds; a pair for each batch size.

    A step takes what its fastest stretch says: a small model's wait for the host, and a busy host only adds."""
    times = {
        (row["loss"], int(row["batch"])): float(row["low_ms"]) / 1e3
        for row in table.rows(asked.results / "step_time.csv")
    }
    drawn = []
    for batch in sorted({batch for _, batch in chosen}):
        series = {loss: mean_curve(asked, runs) for (loss, size), runs in chosen.items() if size == batch}
        shown = {"samples": ("samples seen", series)}
        if all((loss, batch) in times for loss in series):
            by_time = {
                loss: [(samples / batch * times[loss, batch], recall) for samples, recall in curve]
                for loss, curve in series.items()
            }
            shown["seconds"] = (
                "seconds of training steps, alone on the GPU, by the fastest of five stretches",
                by_time,
            )
        for name, (label, curves) in shown.items():
            drawn.append(asked.results / f"quality_{batch}_{name}.svg")
            title = f"Flickr8k test, batch {batch:,}, mean of the seeds"
            chart.draw(drawn[-1], curves, title=title, x_label=label, y_label="text-to-image recall@10, %")
    return drawn


def search(asked: Experiment, small: Spaces) -> tuple[Spaces, Rows]:
    """Of one loss: its seeds at the small batch before its larger ones begin."""
    chosen, found = asked.search(small)
    more, found_more = asked.search(larger_spaces(asked, asked.best(small)))
    return chosen | more, found | found_more


def report(asked: Experiment) -> None:
    chosen: Spaces = {}
    found: Rows = {}
    spaces = [{name: trials} for name, trials in small_spaces(asked).items()]
    for more, rows in side_by_side(partial(search, asked), spaces):
        chosen |= more
        found |= rows
    if not chosen:
        raise SystemExit("no loss has all its runs yet: run the command again to go on")
    rows = summary(chosen, found, asked.recipe)
    (asked.results / "quality.csv").unlink(missing_ok=True)  # it follows from the runs' rows
    for row in rows:
        table.append(asked.results / "quality.csv", SUMMARY, row)
    text = paragraph(rows)
    text += "" if asked.quick else f"\n{at_the_end(chosen, found)}" + not_complete(unfinished(chosen))
    print(text)
    plots = "\n".join(f"![{path.stem.replace('_', ' ')}]({path.name})" for path in draw(asked, chosen))
    (asked.results / "quality.md").write_text(f"{text}\n{plots}\n")


def main() -> None:
    report(experiment(__doc__))


if __name__ == "__main__":
    main()
