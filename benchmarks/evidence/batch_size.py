"""Small batch against large: infonce and fastclip-v3 at equal samples seen. Where do they meet?

    python benchmarks/evidence/batch_size.py --photos FOLDER  # after quality.py, whose settings it starts from
    python benchmarks/evidence/batch_size.py --write          # table and plot from the rows there are
    python benchmarks/evidence/batch_size.py --quick          # tries the code, on a CPU too; nothing is kept

The settings that quality.py chose at batch 128, but for the learning rate: three for each batch size, which grow with
its square root. The best on val is trained with three of the seeds of quality.py.
"""

import math
import statistics

import chart
import quality
import stats
from experiment import FEWER, Experiment, experiment
from runs import Rows, Run
from table import not_complete

BATCHES = (64, 128, 256, 512, 1024, 2048, 4096)
LOSSES = ("infonce", "fastclip-v3")


def edge(run: Run) -> str:
    return " (edge)" if quality.at_the_edge(run) else ""


def paragraph(chosen: dict[tuple[str, int], list[Run]], found: Rows) -> str:
    lines = [
        "| batch | infonce | lr | fastclip-v3 | lr | difference | p |",
        "|---|---|---|---|---|---|---|",
    ]
    for batch in sorted({batch for _, batch in chosen}):
        cells, recalls = [f"{batch:,}"], []
        for loss in LOSSES:
            runs = chosen.get((loss, batch))
            recalls.append(None if runs is None else quality.values(runs, found, "test_t2i10"))
            cells += ["", ""] if runs is None else [stats.shown(recalls[-1] or []), f"{runs[0].lr:g}{edge(runs[0])}"]
        theirs, ours = recalls
        if ours and theirs:
            gap = stats.paired(ours, theirs)
            cells += [f"{100 * gap.mean:+.2f} ± {100 * gap.deviation:.2f}", f"{gap.p:.4f}"]
        else:
            cells += ["", ""]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Three seeds; p is of Student's paired test, one by one, not corrected for their number. (edge): the best"
        " of the three learning rates was the lowest or the highest.",
        *trend(chosen, found),
    ]
    return "\n".join(lines) + "\n"


def trend(chosen: dict[tuple[str, int], list[Run]], found: Rows) -> list[str]:
    """How the difference changes with the batch: of each seed the slope of a straight line over doublings."""
    both = sorted({batch for _, batch in chosen if all((loss, batch) in chosen for loss in LOSSES)})
    lines = []
    for batches in (both, both[:-1], both[1:-1]):
        if len(batches) < 3:
            continue
        theirs, ours = (
            [quality.values(chosen[loss, batch], found, "test_t2i10") for batch in batches] for loss in LOSSES
        )
        doublings = [math.log2(batch) for batch in batches]
        slopes = [
            statistics.linear_regression(doublings, [a - b for a, b in zip(mine, other, strict=True)]).slope
            for mine, other in zip(zip(*ours, strict=True), zip(*theirs, strict=True), strict=True)
        ]
        slope = stats.paired(slopes, [0.0] * len(slopes))
        lines.append(
            f"| {batches[0]:,} to {batches[-1]:,} | {100 * slope.mean:+.2f} ± {100 * slope.deviation:.2f}"
            f" | {slope.p:.4f} |"
        )
    said = "How the difference changes with the batch, by straight lines; looked at after the runs had been seen:"
    return ["", said, "", "| batches | points a doubling | p |", "|---|---|---|", *lines] if lines else []


def report(asked: Experiment) -> None:
    quick = asked.quick
    best = asked.best({loss: quality.trials(loss, quick) for loss in LOSSES})
    if len(best) < len(LOSSES):
        raise SystemExit("the trials of quality.py are not complete: run it first")
    spaces = {
        (loss, batch): quality.larger(best[loss], batch)[: 1 if quick else None]
        for batch in ((8, 16) if quick else BATCHES)
        for loss in LOSSES
    }
    chosen, found = asked.search(spaces, FEWER)
    text = paragraph(chosen, found)
    text += not_complete(f"{loss} at {batch:,}" for loss, batch in spaces if (loss, batch) not in chosen)
    print(text)
    (asked.results / "batch_size.md").write_text(f"{text}\n![recall by batch size](batch_size.svg)\n")
    series = {
        loss: [
            (batch, 100 * sum(recalls) / len(recalls))
            for (name, batch), runs in sorted(chosen.items())
            if name == loss and (recalls := quality.values(runs, found, "test_t2i10"))
        ]
        for loss in LOSSES
    }
    chart.draw(
        asked.results / "batch_size.svg", series, title="Flickr8k test by batch size, equal samples seen",
        x_label="batch", y_label="text-to-image recall@10, %", log=(True, False), x_ticks=[b for _, b in spaces],
    )  # fmt: skip


def main() -> None:
    report(experiment(__doc__))


if __name__ == "__main__":
    main()
