"""FastCLIP's three components, one at a time: the schedule of gamma, the temperature rule, the optimizer.

    python benchmarks/evidence/components.py --photos FOLDER  # after quality.py, whose settings it starts from
    python benchmarks/evidence/components.py --write          # table and plot from the rows there are
    python benchmarks/evidence/components.py --quick          # tries the code, on a CPU too; nothing is kept

Batch 128. Each variant starts from the settings that quality.py chose for its loss and gets two trials for what it
changes, the smallest gamma for a schedule and the two settings of quality.py for a gradient of the temperature, and
three learning rates for an optimizer. The best on val is trained with three of the seeds of quality.py. What
quality.py has trained itself is compared with all five: the temperature rules, and sogclr and isogclr, which are v1
and v2 with a constant gamma and a search of their own.
"""

from dataclasses import replace

import chart
import quality
import stats
from experiment import FEWER, Experiment, experiment
from runs import Rows, Run
from table import not_complete

GAMMAS = (0.2, 0.6)
# Learning rates and weight decay. Lion's authors advise a third to a tenth of AdamW's rate and as much more decay.
# SGD adds the decay to the gradient, where AdamW's would be all there is. LAMB's went from 2e-3 to 1e-2 at first: the
# lowest was best, so the highest made way for one below.
OPTIMIZERS = {
    "adamw": (quality.RATES, 0.1),
    "lamb": ((1e-3, 2e-3, 5e-3), 0.1),
    "lion": ((3e-5, 1e-4, 2e-4), 0.5),
    "sgdm": ((0.03, 0.3, 3.0), 1e-5),
}
TITLES = {
    "gamma": "Schedule of gamma, with the learning rate and the temperature that were best with the cosine",
    "own": "The same, with learning rates and temperatures searched for both",
    "rule": "Temperature rule",
    "third": "The same rules against fastclip-v3's",
    "gradient": "Gradient of the temperature",
    "optimizer": "Optimizer, fastclip-v3",
}
BASE = {
    "gamma": ", constant",
    "rule": "fastclip-v0",
    "third": "fastclip-v3",
    "gradient": ", published",
    "optimizer": "adamw",
}
CONSTANT = {"fastclip-v1": "sogclr", "fastclip-v2": "isogclr"}
KNOWN = ("own", "rule", "third")  # quality.py has trained them, with all seeds
LOSSES = ("sogclr", "isogclr", "fastclip-v0", "fastclip-v1", "fastclip-v2", "fastclip-v3")

QUICK = ("fastclip-v3, constant", "fastclip-v3, cosine", "fastclip-v3, published", "fastclip-v3, exact", "lion")


def changed(run: Run, **hyper: object) -> Run:
    return replace(run, hyper=tuple(sorted((dict(run.hyper) | hyper).items())))


def spaces(best: dict[str, Run]) -> dict[tuple[str, str], list[Run]]:
    """The trials of each variant, by component and name."""
    found: dict[tuple[str, str], list[Run]] = {}
    for loss in ("fastclip-v1", "fastclip-v2", "fastclip-v3"):
        for schedule in ("constant", "cosine"):
            trials = [changed(best[loss], gamma_schedule=schedule, gamma_min=gamma) for gamma in GAMMAS]
            found["gamma", f"{loss}, {schedule}"] = trials
    for loss in (name for pair in CONSTANT.items() for name in reversed(pair)):
        found["own", loss] = [best[loss]]
    for component in ("rule", "third"):
        for loss in ("fastclip-v0", "fastclip-v1", "fastclip-v2", "fastclip-v3"):
            found[component, loss] = [best[loss]]
    for loss, setting, other in (
        ("fastclip-v3", "tau_gradient", "exact"),
        ("fastclip-v2", "tau_adam", "visits"),
    ):
        for form in ("published", other):  # with every rho: theirs need not be the same
            trials = [replace(best[loss], hyper=tuple(choice.items())) for choice in quality.CHOICES[loss]]
            if form == "visits":  # 16 of its steps go as far with this rate
                trials = [changed(trial, lr_tau=3.1e-3) for trial in trials]
            found["gradient", f"{loss}, {form}"] = [changed(trial, **{setting: form}) for trial in trials]
    for name, (rates, decay) in OPTIMIZERS.items():
        found["optimizer", name] = [replace(best["fastclip-v3"], opt=name, lr=rate, wd=decay) for rate in rates]
    return found


def base_of(component: str, name: str) -> str:
    """What a variant is compared with."""
    if component == "own":
        return CONSTANT.get(name, name)
    base = BASE[component]
    return name.split(",")[0] + base if base.startswith(",") else base


def gaps(chosen: dict[tuple[str, str], list[Run]], found: Rows, component: str) -> dict[str, stats.Paired]:
    """By name the difference to what a variant is compared with."""
    names = [name for kind, name in chosen if kind == component]
    pairs = {name: (component, base_of(component, name)) for name in names}
    return {
        name: stats.paired(*(quality.values(chosen[key], found, "test_t2i10") for key in ((component, name), base)))
        for name, base in pairs.items()
        if base in chosen and base != (component, name)
    }


def paragraph(chosen: dict[tuple[str, str], list[Run]], found: Rows) -> str:
    lines = []
    for component, title in TITLES.items():
        told = gaps(chosen, found, component)
        corrected = stats.holm({name: gap.p for name, gap in told.items()})
        lines += [
            f"\n{title}:\n",
            "| | chosen | seeds | text-to-image | CIFAR-10 | against | difference | p | Holm's p |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for (kind, name), runs in chosen.items():
            if kind != component:
                continue
            own = [("lr", runs[0].lr), *([("wd", runs[0].wd)] if kind == "optimizer" else []), *runs[0].hyper]
            settings = ", ".join(f"{key} {value}" for key, value in own)
            ours, cifar = (quality.values(runs, found, metric) for metric in ("test_t2i10", "cifar10"))
            compared = " |  |  | "
            if gap := told.get(name):
                difference = f"{100 * gap.mean:+.2f} ± {100 * gap.deviation:.2f}"
                compared = f"{base_of(component, name)} | {difference} | {gap.p:.4f} | {corrected[name]:.4f}"
            recalls = f"{stats.shown(ours)} | {stats.shown(cifar)}"
            lines.append(f"| {name} | {settings} | {len(runs)} | {recalls} | {compared} |")
    lines += [
        "",
        "p is of Student's test of the differences, paired by seed; Holm's is raised for the number of comparisons in"
        " the same table. sogclr and isogclr are v1 and v2 with a constant gamma of 0.6. LAMB had four learning rates"
        " in all, the other optimizers three: its lowest had been the best, so a lower one took the place of the"
        " highest.",
    ]
    return "\n".join(lines) + "\n"


def draw(asked: Experiment, chosen: dict[tuple[str, str], list[Run]]) -> bool:
    series = {name: quality.mean_curve(asked, runs) for (kind, name), runs in chosen.items() if kind == "optimizer"}
    if series:
        chart.draw(
            asked.results / "components.svg", series, title="fastclip-v3 by optimizer, Flickr8k test, batch 128",
            x_label="samples seen", y_label="text-to-image recall@10, %",
        )  # fmt: skip
    return bool(series)


def report(asked: Experiment) -> None:
    best = asked.best({loss: quality.trials(loss, asked.quick) for loss in LOSSES})
    if len(best) < len(LOSSES):
        raise SystemExit("the trials of quality.py are not complete: run it first")
    wanted = spaces(best)
    if asked.quick:
        wanted = {name: runs[:1] for name, runs in wanted.items() if name[1] in QUICK}
    chosen, found = asked.search({name: runs for name, runs in wanted.items() if name[0] not in KNOWN}, FEWER)
    known, known_rows = asked.search({name: runs for name, runs in wanted.items() if name[0] in KNOWN})
    chosen, found = chosen | known, found | known_rows
    text = paragraph(chosen, found)
    text += not_complete(name for kind, name in wanted if (kind, name) not in chosen)
    print(text)
    plot = "\n![recall by optimizer](components.svg)\n" if draw(asked, chosen) else ""
    (asked.results / "components.md").write_text(text + plot)


def main() -> None:
    report(experiment(__doc__))


if __name__ == "__main__":
    main()
