"""What the rows of wall_clock.py say, and whether they say it fairly: plot and paragraph.

Of each trainer and loss the learning rate counts that had the best final recall in any of its runs, and at that rate
the best run with the clock. The target is the final recall of open_clip's; the time of each is that of its first
epoch at or above the target, so that a baseline which was good early is not charged for the rest. There is no
comparison without such a run of open_clip's, or where it ended a point or more below another of its own; a line that
has not tried the same learning rates as open_clip is not in it.
"""

import itertools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import chart
import table
from table import not_complete

BASE = "open_clip infonce"
NEAR = 0.01  # of recall, that runs of the same command may differ by
SAME = ("batch", "epochs", "samples", "model")


@dataclass(frozen=True)
class Curve:
    """One run as its rows tell it."""

    rows: list[dict[str, str]]

    @property
    def name(self) -> str:
        return f"{self.rows[0]['trainer']} {self.rows[0]['loss']}"

    @property
    def lr(self) -> float:
        return float(self.rows[0]["lr"])

    @property
    def alone(self) -> bool:
        return self.rows[0]["alone"] == "True"

    @property
    def recalls(self) -> list[float]:
        return [float(row["text_to_image_recall_at_10"]) for row in self.rows]

    @property
    def final(self) -> float:
        return self.recalls[-1]

    def sound(self, others: "Sequence[Curve]") -> bool:
        """Whether it ended about as well as others of the same command."""
        return self.final > max(other.final for other in others) - NEAR

    @property
    def seconds(self) -> list[float]:
        return [float(row["seconds"]) for row in self.rows]

    @property
    def startup(self) -> float:
        return float(self.rows[0]["startup_seconds"])

    @property
    def epoch_seconds(self) -> float:
        times = self.seconds
        rest = [after - before for before, after in itertools.pairwise(times)]
        return statistics.median(rest) if rest else times[0] - self.startup

    @property
    def compile(self) -> float:
        return max(0.0, self.seconds[0] - self.startup - self.epoch_seconds)

    def steady(self, at: int) -> float:
        """Seconds until the end of an epoch, without startup and compilation."""
        return self.seconds[at] - self.startup - self.compile

    def reaches(self, target: float) -> int | None:
        """The first epoch, counted from 0, at or above the target."""
        return next((at for at, recall in enumerate(self.recalls) if recall >= target), None)


def curves(rows: Sequence[dict[str, str]]) -> list[Curve]:
    """The runs on the newest data, of the newest length."""
    found: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        if all(row[name] == rows[-1][name] for name in SAME):
            key = tuple(row[name] for name in ("trainer", "loss", "seed", "trainer_command", "run", "alone"))
            found.setdefault(key, []).append(row)
    return [Curve(several) for several in found.values()]


class Line(NamedTuple):
    """A trainer with a loss."""

    best: Curve  # by final recall; of equals one with the clock
    timed: Curve | None  # the best with the clock, at that learning rate
    rates: tuple[float, ...]  # that were tried

    @property
    def sound(self) -> bool:
        return self.timed is not None and self.timed.sound([self.best])


def lines(runs: Sequence[Curve]) -> dict[str, Line]:
    """By trainer and loss."""
    found = {}
    for name in dict.fromkeys(run.name for run in runs):
        own = [run for run in runs if run.name == name]
        best = max(own, key=lambda run: (run.final, run.alone))
        timed = [run for run in own if run.alone and run.lr == best.lr]
        timed = max(timed, key=lambda run: run.final) if timed else None
        found[name] = Line(best, timed, tuple(sorted({run.lr for run in own})))
    return found


def compared(rows: Sequence[dict[str, str]]) -> tuple[dict[str, Curve], list[str]]:
    """The runs that are compared, open_clip's first, and what is missing. None, where there is nothing to compare."""
    found = lines(curves(rows)) if rows else {}
    base = found.get(BASE)
    if base is None or base.timed is None:
        return {}, [f"{BASE}, with the clock at its best learning rate"]
    if not base.sound:
        ended = f"{base.timed.final:.1%} with the clock, {base.best.final:.1%} without"
        return {}, [f"{BASE}, which ended at {ended} and must be run again"]
    whole = {name: line.timed for name, line in found.items() if line.rates == base.rates and line.sound}
    order = sorted(whole, key=lambda name: name != BASE)
    return {name: curve for name in order if (curve := whole[name])}, [name for name in found if name not in whole]


def write(output: Path) -> None:
    """The plot and the paragraph beside the rows."""
    rows = table.rows(output)
    best, missing = compared(rows)
    if not best:
        sys.exit(f"{output} is not complete: {'; '.join(missing)}")
    base, first = best[BASE], rows[-1]
    target, rates = base.final, lines(curves(rows))[BASE].rates
    end = max(curve.seconds[-1] for curve in best.values())
    series = {name: list(zip(curve.seconds, curve.recalls, strict=True)) for name, curve in best.items()}
    chart.draw(
        output.with_suffix(".svg"),
        series | {"open_clip's final recall": [(0.0, target), (end, target)]},
        title=f"Held-out text-to-image recall@10 over seconds from the start ({first['device']})",
        x_label="seconds, evaluations left out, compilation counted in",
        y_label="recall@10",
        dashed=["open_clip's final recall"],
    )
    text = [
        f"{int(first['samples']):,} samples an epoch, {first['epochs']} epochs, batch {first['batch']}, model"
        f" {first['model']}, {first['workers']} workers, one {first['device']}, one seed. Target: open_clip's final"
        f" text-to-image recall@10, {target:.1%}. Seconds from the start of the command; evaluations are left out on"
        f" both sides. Each line had the learning rates {', '.join(f'{rate:g}' for rate in rates)} to choose from."
        " Averaged: the running average of the weights counts (`--ema`), which open_clip's trainer does not have.",
        "",
        "| | rate | final recall | reached after | seconds | of open_clip's | startup | compilation | an epoch"
        " | seconds without startup and compilation | of open_clip's |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    reached_base = base.reaches(target)
    assert reached_base is not None
    total_base = base.seconds[reached_base]
    verdicts = [f"open_clip's whole run took {base.seconds[-1]:.1f} s."]
    for name, curve in best.items():
        at = curve.reaches(target)
        reached = ["not reached", "", "", "", ""]
        if at is not None:
            total, steady = curve.seconds[at], curve.steady(at)
            share, steady_share = total / total_base, steady / base.steady(reached_base)
            reached = [f"epoch {at + 1}", f"{total:.1f}", f"{share:.2f}", f"{steady:.1f}", f"{steady_share:.2f}"]
            if curve is not base:
                held = "holds" if share <= 0.5 else "does not hold"
                verdicts.append(
                    f"{name}: at most half of open_clip's seconds {held} ({share:.2f};"
                    f" {total / base.seconds[-1]:.2f} of its whole run)."
                )
        elif curve is not base:
            verdicts.append(f"{name} does not reach open_clip's final recall.")
        text.append(
            f"| {name} | {curve.lr:g} | {curve.final:.1%} | {' | '.join(reached[:3])} | {curve.startup:.1f}"
            f" | {curve.compile:.1f} | {curve.epoch_seconds:.2f} | {' | '.join(reached[3:])} |"
        )
    text += ["", *verdicts, not_complete(missing), f"![recall over seconds]({output.with_suffix('.svg').name})", ""]
    output.with_suffix(".md").write_text("\n".join(text))
    print("\n".join(text))
