"""Tables and figures of the study of wrong captions (wrong_captions.py)."""

import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from line_chart import figure
from measurements import Table
from stats import paired, percent
from wrong_captions import (
    BATCH_ARMS,
    SEEDS,
    SHARES,
    STAIRS,
    Trial,
    best_of,
    chosen,
    compare,
    rate_trials,
    search_trials,
    stored,
)

BOOTSTRAP_DRAWS = 10_000
LABELS = {
    "infonce": "InfoNCE, learned temperature", "infonce-constant": "InfoNCE, constant temperature",
    "dcl-constant": "dcl, constant temperature", "v1": "fastclip-v1", "v1-auto": "fastclip-v1, learned pair weights",
    "v1-without-wrong": "fastclip-v1, wrong pairs left out",
}  # fmt: skip


Cells = dict[tuple[float, int, str], dict[int, dict[str, str]]]


def compared(done: Mapping[Trial, dict[str, str]], *, tuned: bool = False) -> Cells:
    """The rows of the comparison by share, batch and arm, then by seed. Batch 128 at 0% has the values of the search
    at 20%, or those that were tuned there."""
    result: Cells = {}
    for trial, row in sorted(done.items()):
        values = trial
        if (trial.exchanged, trial.batch) == (0, 128) and trial.arm in BATCH_ARMS:
            search = rate_trials(trial.arm, 128, 0.0, done) if tuned else []
            values = best_of(search, done) if search and all(t in done for t in search) else chosen(trial.arm, done)
        if trial.phase == "compare" and trial[2:5] == values[2:5]:
            result.setdefault((trial.exchanged, trial.batch, trial.arm), {})[trial.seed] = row
    return result


def means(seeds: Mapping[int, Mapping[str, str]]) -> dict[int, float]:
    return {seed: float(row["mean"]) for seed, row in seeds.items()}


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """95%, by bootstrap."""
    draw = random.Random(0)
    means = sorted(statistics.fmean(draw.choices(differences, k=len(differences))) for _ in range(BOOTSTRAP_DRAWS))
    return means[BOOTSTRAP_DRAWS // 40], means[-BOOTSTRAP_DRAWS // 40]


def tables(path: Path) -> dict[str, Table]:
    """`wrong_captions`: every arm at batch 128, against v1-auto; `wrong_captions_batches`: means by batch."""
    done = stored(path)
    cells, lines = compared(done), []
    for (share, batch, arm), seeds in sorted(cells.items()):
        default = cells.get((share, batch, "v1-auto"), {})
        if batch != 128:
            continue
        difference = ["", "", ""]
        common = sorted(seeds.keys() & default.keys())
        if arm != "v1-auto" and len(common) > 1:
            ours, theirs = ([means(side)[seed] for seed in common] for side in (default, seeds))
            low, high = interval([a - b for a, b in zip(ours, theirs, strict=True)])
            result = paired(ours, theirs)
            difference = [str(result), f"{100 * low:+.2f} to {100 * high:+.2f}", f"{result.p:.2g}"]
        first = next(iter(seeds.values()))
        measured = [
            [float(row[name]) for row in seeds.values() if row[name]]
            for name in ("share", "auroc", "precision", "by_heart")
        ]
        lines.append([
            f"{share:.0%}", arm, first["head"], f"{float(first['lr']):g}", f"{float(first['tau']):g}",
            str(len(seeds)), percent(list(means(seeds).values())), *difference,
            *(f"{100 * statistics.fmean(values):.1f}" if values else "" for values in measured),
        ])  # fmt: skip
    columns = [
        "exchanged", "arm", "head", "lr", "tau", "seeds", "mean recall@10", "v1-auto minus it", "95%", "p",
        "estimated share", "AUROC", "precision", "wrong pairs by heart",
    ]  # fmt: skip
    cells = compared(done, tuned=True)
    sizes = sorted({batch for _, batch, _ in cells})
    by_batch = [
        [
            f"{share:.0%}",
            arm,
            *(percent(list(means(cells[share, b, arm]).values())) if (share, b, arm) in cells else "" for b in sizes),
        ]
        for share in (0.0, 0.2)
        for arm in BATCH_ARMS
    ]
    batches = Table(["exchanged", "arm", *(f"batch {size}" for size in sizes)], by_batch)
    named = {"wrong_captions": Table(columns, lines), "wrong_captions_batches": batches}
    return named | {"clean_heads": clean_heads(done)}


def clean_heads(done: Mapping[Trial, dict[str, str]]) -> Table:
    """v1-auto on clean data: the best of each of open_clip's heads in the search, and the better one over seeds."""
    search = [trial for trial in search_trials("v1-auto", done, clean=True) if trial in done]
    lines = []
    for head in dict.fromkeys(trial.head for trial in search):
        best = best_of([trial for trial in search if trial.head == head], done)
        seeds = [done[trial] for trial in compare(best, SEEDS[:5]) if trial in done]
        values = percent([float(row["mean"]) for row in seeds]) if best == best_of(search, done) and seeds else ""
        lines.append([head, f"{best.lr:g}", f"{best.tau:g}", f"{100 * float(done[best]['mean']):.1f}", values])
    return Table(["head", "lr", "tau", "in the search", "mean recall@10"], lines)


def draw(path: Path) -> None:
    """The stairs over the share of wrong captions and, where they were run, the arms over the batch."""
    done = stored(path)
    cells, tuned = compared(done), compared(done, tuned=True)
    batches = len({batch for _, batch, _ in cells}) > 1
    columns, size = (3, (12, 3.8)) if batches else (1, (6, 3.8))
    target = path.with_suffix(".svg")
    with figure(target, 1, columns, figsize=size, sharey=True, squeeze=False) as (_, all_axes):
        stairs, *over_batches = all_axes[0]
        for arm in STAIRS:
            _line(
                stairs, [(100 * share, cells[share, 128, arm]) for share in SHARES if (share, 128, arm) in cells], arm
            )
        for axes, share in zip(over_batches, (0.0, 0.2), strict=bool(over_batches)):
            for arm in BATCH_ARMS:
                sizes = sorted(batch for s, batch, a in tuned if (s, a) == (share, arm))
                _line(axes, [(batch, tuned[share, batch, arm]) for batch in sizes], arm)
            axes.set_xscale("log", base=2)
            axes.set(xlabel="batch", title=f"{share:.0%} of the captions wrong")
        stairs.set(
            xlabel="% of the captions wrong",
            ylabel="mean of four recall@10 in %",
            title="leanclip train, frozen towers, batch 128",
        )
        stairs.legend(fontsize="small")


def _line(axes: Any, points: Sequence[tuple[float, Mapping[int, Mapping[str, str]]]], label: str) -> None:
    values = [[100 * value for value in means(seeds).values()] for _, seeds in points]
    spreads = [statistics.stdev(v) if len(v) > 1 else 0.0 for v in values]
    label = LABELS[label]
    axes.errorbar([x for x, _ in points], [statistics.fmean(v) for v in values], spreads, label=label, capsize=2)
