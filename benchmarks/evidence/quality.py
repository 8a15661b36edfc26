"""Quality at equal budget: every loss, the same model, photographs, samples seen and number of trials.

    python benchmarks/evidence/quality.py --photos FOLDER     # FOLDER is made by photos.py; continues where it ended
    python benchmarks/evidence/quality.py --write             # table, plot and paragraph from the rows there are
    python benchmarks/evidence/quality.py --quick             # tries the code, on a CPU too; nothing is kept

A small ViT on 32,023 photographs (COCO and Flickr8k, 64 px) from scratch. Each loss gets six trials for each batch
size (three learning rates by two values of the setting that matters most to it) with a seed of their own; the one
with the best text-to-image recall@10 on Flickr8k's val set is trained with five other seeds, which are the same for
all losses. What counts is the test recall at the point of the run that is best on val.
"""

from itertools import product

import chart
import stats
from runs import Experiment, Rows, Run, experiment

RATES = (5e-4, 1e-3, 2e-3)
KNOBS: dict[str, tuple[str, tuple[float, float]]] = {
    "infonce": ("tau", (0.07, 0.03)),
    "siglip": ("bias", (-10.0, -5.0)),
    "sogclr": ("tau", (0.05, 0.1)),
    "isogclr": ("rho", (4.0, 7.0)),
    "fastclip-v0": ("gamma_min", (0.2, 0.6)),
    "fastclip-v1": ("tau", (0.05, 0.1)),
    "fastclip-v2": ("rho", (4.0, 7.0)),
    "fastclip-v3": ("rho", (4.0, 6.5)),
}
BATCHES = (128, 512)
SEARCH_SEED = 100
METRICS = {"test_t2i10": "text-to-image", "test_i2t10": "image-to-text", "cifar10": "CIFAR-10"}


def trials(loss: str, batch: int, quick: bool = False) -> list[Run]:
    name, values = KNOBS[loss]
    found = [Run(loss, batch, lr, SEARCH_SEED, ((name, value),)) for lr, value in product(RATES, values)]
    return found[:1] if quick else found


def spaces(quick: bool = False) -> dict[tuple[str, int], list[Run]]:
    pairs = [*product(KNOBS, BATCHES), ("infonce", 2048)]
    if quick:
        pairs = [(loss, 16) for loss in ("infonce", "siglip", "fastclip-v2", "fastclip-v3")]
    return {(loss, batch): trials(loss, batch, quick) for loss, batch in pairs}


def values(runs: list[Run], found: Rows, metric: str) -> list[float]:
    return [float(found[run][metric]) for run in runs]


def paragraph(chosen: dict[tuple[str, int], list[Run]], found: Rows) -> str:
    lines = [
        "| batch | loss | chosen | text-to-image | image-to-text | CIFAR-10 | against infonce | p |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (loss, batch), runs in sorted(chosen.items(), key=lambda entry: entry[0][1]):
        settings = ", ".join(f"{name} {value:g}" for name, value in (("lr", runs[0].lr), *runs[0].hyper))
        figures = " | ".join(stats.shown(values(runs, found, metric)) for metric in METRICS)
        compared = " | "
        base = chosen.get(("infonce", batch))
        if base is not None and loss != "infonce":
            gap = stats.paired(values(runs, found, "test_t2i10"), values(base, found, "test_t2i10"))
            compared = f"{100 * gap.mean:+.2f} ± {100 * gap.deviation:.2f} | {gap.p:.4f}"
        lines.append(f"| {batch:,} | {loss} | {settings} | {figures} | {compared} |")
    return "\n".join(lines) + "\n"


def mean_curve(asked: Experiment, runs: list[Run]) -> list[tuple[float, float]]:
    """Text-to-image recall on the test set, in percent, over samples seen: the mean of the seeds."""
    points = zip(*map(asked.curve, runs), strict=True)
    return [(at[0]["samples"], 100 * sum(point["test_t2i10"] for point in at) / len(at)) for at in points]


def draw(asked: Experiment, chosen: dict[tuple[str, int], list[Run]]) -> None:
    for batch in {batch for _, batch in chosen}:
        series = {loss: mean_curve(asked, runs) for (loss, size), runs in chosen.items() if size == batch}
        title = f"Flickr8k test, batch {batch:,}, mean of the seeds"
        chart.draw(
            asked.results / f"quality_{batch}.svg", series, title=title,
            x_label="samples seen", y_label="text-to-image recall@10, %",
        )  # fmt: skip


def main() -> None:
    asked = experiment(__doc__)
    chosen, found = asked.search(spaces(asked.quick))
    if not chosen:
        raise SystemExit("no loss has all its runs yet: run the command again to go on")
    text = paragraph(chosen, found)
    print(text)
    (asked.results / "quality.md").write_text(text)
    draw(asked, chosen)


if __name__ == "__main__":
    main()
