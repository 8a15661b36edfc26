"""What the rows of wall_clock.py say: plot and paragraph.

A line is a trainer with a loss and a length. Its learning rate is the one with the best final recall in any run of
that trainer and loss on the same data, with or without the clock, of any length, in this race or an earlier one: that
is its search. At that rate all runs count that had the clock in this race.

The target is the mean of open_clip's final recalls. The seconds of each run are those until its first epoch at or
above the target, for open_clip's at or above its own final recall, so that a baseline which was good early is not
charged for the rest. A line that has not tried the same learning rates as open_clip, or has no run with the clock at
its best one, is not compared, and nothing is where open_clip is such a line: then all that is written is what every
run came to.
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
NEAR = 0.03  # of recall: a run of open_clip's that ended so far below its others did not learn
SAME = ("batch", "samples", "model", "workers")
EARLIER = ("second_race.csv", "third_race.csv", "fourth_race.csv")  # not the first, whose model was another
RACES = ("first_race.csv", *EARLIER)
THIS = "wall_clock.csv"
OURS = "fastclip-v3"  # that ran in all of them


class Clock(NamedTuple):
    """When a run was at the end of each epoch."""

    seconds: list[float]
    startup: float

    @property
    def epoch_seconds(self) -> float:
        rest = [after - before for before, after in itertools.pairwise(self.seconds)]
        return statistics.median(rest) if rest else self.seconds[0] - self.startup

    @property
    def compile(self) -> float:
        return max(0.0, self.seconds[0] - self.startup - self.epoch_seconds)

    def steady(self, at: int) -> float:
        """Seconds until the end of an epoch, without startup and compilation."""
        return self.seconds[at] - self.startup - self.compile


@dataclass(frozen=True)
class Curve:
    """One run as its rows tell it."""

    rows: list[dict[str, str]]

    @property
    def trained_by(self) -> tuple[str, str]:
        """Trainer and loss."""
        return self.rows[0]["trainer"], self.rows[0]["loss"]

    @property
    def name(self) -> str:
        first = self.rows[0]
        length = f", {first['epochs']} epochs" if first["trainer"] == "leanclip" else ""
        return f"{first['trainer']} {first['loss']}{length}"

    @property
    def lr(self) -> float:
        return float(self.rows[0]["lr"])

    @property
    def alone(self) -> bool:
        """With the clock, in this race."""
        return self.rows[0]["alone"] == "True"

    @property
    def timed(self) -> bool:
        return self.rows[0]["seconds"] != ""

    @property
    def whole(self) -> bool:
        return self.rows[-1]["epoch"] == self.rows[-1]["epochs"]

    @property
    def origin(self) -> str:
        """The file it is in."""
        return self.rows[0].get("race", THIS)

    @property
    def recalls(self) -> list[float]:
        return [float(row["text_to_image_recall_at_10"]) for row in self.rows]

    @property
    def final(self) -> float:
        return self.recalls[-1]

    @property
    def clock(self) -> Clock:
        return Clock([float(row["seconds"]) for row in self.rows], float(self.rows[0]["startup_seconds"]))

    def reaches(self, target: float) -> int | None:
        """The first epoch, counted from 0, at or above the target."""
        return next((at for at, recall in enumerate(self.recalls) if recall > target - 1e-9), None)


def known(output: Path) -> list[dict[str, str]]:
    """The rows of this race, behind those of earlier ones."""
    earlier = [
        row | {"race": name, "alone": "False"} for name in EARLIER for row in table.rows(output.with_name(name))
    ]
    return [*earlier, *table.rows(output)]


def curves(rows: Sequence[dict[str, str]]) -> list[Curve]:
    """The runs on the newest data."""
    found: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        if all(row[name] == rows[-1][name] for name in SAME):
            named = ("trainer", "loss", "seed", "trainer_command", "race", "run", "alone")
            key = tuple(row.get(name, "") for name in named)
            found.setdefault(key, []).append(row)
    return [Curve(several) for several in found.values()]


def best_rates(runs: Sequence[Curve]) -> dict[tuple[str, str], float]:
    """The learning rate of the best run, by trainer and loss."""
    return {run.trained_by: run.lr for run in sorted(runs, key=lambda run: (run.final, run.alone)) if run.whole}


class Line(NamedTuple):
    """A trainer with a loss and a length."""

    runs: list[Curve]  # with the clock, at the best learning rate
    search: list[Curve]  # of that trainer and loss

    @property
    def final(self) -> float:
        return statistics.fmean(run.final for run in self.runs)

    @property
    def rates(self) -> tuple[float, ...]:
        return tuple(sorted({run.lr for run in self.search}))


def lines(runs: Sequence[Curve]) -> dict[str, Line]:
    """By name, those that have run in this race; of whole runs."""
    runs = [run for run in runs if run.whole]
    best, found = best_rates(runs), {}
    for first in (run for run in runs if run.origin == THIS):
        search = [run for run in runs if run.trained_by == first.trained_by]
        counted = [run for run in search if run.alone and run.name == first.name and run.lr == best[first.trained_by]]
        found[first.name] = Line(counted, search)
    return found


def compared(rows: Sequence[dict[str, str]]) -> tuple[dict[str, Line], list[str]]:
    """The lines that are compared, open_clip's first, and what is missing. No lines where nothing can be."""
    found = lines(curves(rows)) if rows else {}
    base = found.get(BASE)
    if base is None or not base.runs:
        return {}, [f"{BASE}, with the clock"]
    whole = [name for name, line in found.items() if line.rates == base.rates and line.runs]
    order = sorted(whole, key=lambda name: name != BASE)
    return {name: found[name] for name in order}, [name for name in found if name not in whole]


class Reached(NamedTuple):
    """How a line came to the target: by those of its runs that did."""

    runs: int
    seconds: list[float]
    steady: list[float]
    epochs: list[int]


def reached(line: Line, target: float | None) -> Reached:
    """None: by each run its own final recall."""
    pairs = [(run, run.reaches(run.final if target is None else target)) for run in line.runs]
    there = [(run.clock, at) for run, at in pairs if at is not None]
    return Reached(
        len(line.runs),
        [clock.seconds[at] for clock, at in there],
        [clock.steady(at) for clock, at in there],
        [at + 1 for _, at in there],
    )


def all_runs(runs: Sequence[Curve]) -> list[str]:
    """A table of what every run came to."""
    found = [
        "| | rate | recall after the first epoch | final recall | best | whole run, s | startup | an epoch | rows |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for run in sorted(runs, key=lambda run: (run.name != BASE, run.name, run.lr)):
        times = " |  | "
        if run.timed:
            times = f"{run.clock.seconds[-1]:.1f} | {run.clock.startup:.1f} | {run.clock.epoch_seconds:.2f}"
        recalls = " | ".join(f"{recall:.1%}" for recall in (run.recalls[0], run.final, max(run.recalls)))
        found.append(f"| {run.name} | {run.lr:g} | {recalls} | {times} | {run.origin} |")
    return found


class Earlier(NamedTuple):
    """What became of a race before this one: a run each, at one learning rate."""

    name: str
    theirs: Curve
    ours: Curve
    learned: bool  # open_clip's

    @property
    def share(self) -> float | None:
        """Of open_clip's seconds; None where there is no target or it was not reached."""
        at, mine = self.theirs.reaches(self.theirs.final), self.ours.reaches(self.theirs.final)
        if not self.learned or at is None or mine is None:
            return None
        return self.ours.clock.seconds[mine] / self.theirs.clock.seconds[at]


def earlier(folder: Path) -> list[Earlier]:
    found = []
    for name in RACES:
        runs = [run for run in curves(table.rows(folder / name)) if run.timed]
        theirs = [run for run in runs if run.rows[0]["trainer"] == "open_clip"]
        ours = [run for run in runs if run.rows[0]["trainer"] == "leanclip" and run.rows[0]["loss"] == OURS]
        if theirs and ours:
            same = [race.theirs.final for race in found if race.name in EARLIER and name in EARLIER]
            learned = theirs[0].final > max(same, default=0.0) - NEAR
            found.append(Earlier(name, theirs[0], ours[0], learned))
    return found


def told_of_earlier(races: Sequence[Earlier]) -> list[str]:
    if not races:
        return []
    lines = [
        f"| race | open_clip's final recall | at it after, s | leanclip {OURS}'s | at open_clip's after, s |"
        " of open_clip's seconds |",
        "|---|---|---|---|---|---|",
    ]
    for race in races:
        at, mine = race.theirs.reaches(race.theirs.final), race.ours.reaches(race.theirs.final)
        assert at is not None
        cells = ["", "", ""]
        if race.learned:
            reached_at = "not reached" if mine is None else f"{race.ours.clock.seconds[mine]:.1f}"
            theirs = race.theirs.clock.seconds[at]
            cells = [f"{theirs:.1f}", reached_at, "" if race.share is None else f"{race.share:.2f}"]
        final = f"{race.theirs.final:.1%}" + ("" if race.learned else ", did not learn")
        lines.append(f"| {race.name} | {final} | {cells[0]} | {race.ours.final:.1%} | {' | '.join(cells[1:])} |")
    note = (
        "Races before this one, of one run each at the learning rate of 0.0005: the first with a larger model (6 and"
        " 4 layers), the others with this one. leanclip has been changed between them, and open_clip's compiled"
        " kernels had no barriers, which is probably why some of its runs did not learn. The log tells of each."
    )
    return [note, "", *lines, ""]


def write(output: Path) -> None:
    """The paragraph beside the rows, and where there is something to compare, the plot."""
    rows = known(output)
    if not rows:
        sys.exit(f"{output} is empty")
    best, missing = compared(rows)
    plot = output.with_suffix(".svg")
    if best:
        draw(plot, best, rows[-1]["device"])
        text = [*told(rows, best), not_complete(missing), f"![recall over seconds]({plot.name})", ""]
    else:
        plot.unlink(missing_ok=True)
        text = [setting(rows), "", f"**No result yet.** Missing: {'; '.join(missing)}.", ""]
    text += [
        "The runs that were looked at for this, with times where they were alone on the machine:",
        "",
        *all_runs(curves(rows)),
        "",
        *told_of_earlier(earlier(output.parent)),
    ]
    output.with_suffix(".md").write_text("\n".join(text))
    print("\n".join(text))


def setting(rows: Sequence[dict[str, str]]) -> str:
    first = next(row for row in reversed(rows) if row["trainer"] == "open_clip" or row is rows[0])
    return (
        f"{int(first['samples']):,} samples an epoch, {first['epochs']} epochs of open_clip's, batch"
        f" {first['batch']}, model {first['model']}, {first['workers']} workers, one {first['device']}. Recall is"
        " text-to-image recall@10 among the pictures of the val set, a caption each. Seconds from the start"
        " of the command; evaluations are left out on both sides."
    )


def draw(path: Path, best: dict[str, Line], device: str) -> None:
    """All runs that count."""
    target = best[BASE].final
    series = {
        f"{name}, seed {run.rows[0]['seed']}": list(zip(run.clock.seconds, run.recalls, strict=True))
        for name, line in best.items()
        for run in line.runs
    }
    end = max(points[-1][0] for points in series.values())
    mean = "mean of open_clip's final recalls"
    chart.draw(
        path,
        series | {mean: [(0.0, target), (end, target)]},
        title=f"Held-out text-to-image recall@10 over seconds from the start ({device})",
        x_label="seconds, evaluations left out, compilation counted in",
        y_label="recall@10",
        dashed=[mean],
    )


def told(rows: Sequence[dict[str, str]], best: dict[str, Line]) -> list[str]:
    """What was run, the table of the compared, and what came of it."""
    base = best[BASE]
    target, theirs = base.final, reached(base, None)
    lengths = {run.rows[0]["epochs"] for line in best.values() for run in line.search if run.lr != line.runs[0].lr}
    tried = f", tried with {' or '.join(sorted(lengths))} epochs" if lengths else ""
    rates = ", ".join(f"{rate:g}" for rate in base.rates)
    text = [
        f"{setting(rows)} Target: the mean of open_clip's final text-to-image recalls@10, {target:.1%}. Each trainer"
        f" and loss had the learning rates {rates} to choose from{tried}, in this race or an earlier one (second"
        " table). Mean and deviation over seeds; `reached by` counts the runs at the target after some epoch, and the"
        " seconds are theirs. open_clip's are of each of its runs to its own final recall.",
        "",
        "| | rate | final recall | reached by | after epoch | seconds | of open_clip's | startup | compilation"
        " | an epoch | seconds without startup and compilation | of open_clip's, likewise |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    verdicts = []
    for name, line in best.items():
        found = theirs if line is base else reached(line, target)
        cells = ["each its own" if line is base else f"{len(found.seconds)} of {found.runs}", "", "", "", "", ""]
        if found.seconds:
            share, steady = shared(found.seconds, theirs.seconds), shared(found.steady, theirs.steady)
            epochs = ", ".join(map(str, sorted(set(found.epochs))))
            cells = [*cells[:1], epochs, spread(found.seconds), f"{share:.2f}", spread(found.steady), f"{steady:.2f}"]
        if line is not base:
            verdicts += verdict(name, line, base)
        clocks = [run.clock for run in line.runs]
        apart = [
            f"{statistics.fmean(values):.{digits}f}"
            for values, digits in (
                ([clock.startup for clock in clocks], 1),
                ([clock.compile for clock in clocks], 1),
                ([clock.epoch_seconds for clock in clocks], 2),
            )
        ]
        recall = spread([100 * run.final for run in line.runs]) + "%"
        text.append(
            f"| {name} | {line.runs[0].lr:g} | {recall} | {' | '.join(cells[:4])} | {' | '.join(apart)}"
            f" | {' | '.join(cells[4:])} |"
        )
    return [*text, "", *(f"- {verdict}" for verdict in verdicts)]


def verdict(name: str, line: Line, base: Line) -> list[str]:
    """Whether the claim holds, and how it is if open_clip is taken by other figures."""
    found, theirs = reached(line, base.final), reached(base, None)
    if len(found.seconds) < found.runs:
        return [
            f"{name}, at open_clip's final recall in at most half of its seconds: does not hold: not all reach it."
        ]
    share = shared(found.seconds, theirs.seconds)
    held = "holds" if share <= 0.5 else "does not hold"
    whole = [run.clock.seconds[-1] for run in line.runs]
    said = [
        f"{name}, at open_clip's final recall in at most half of its seconds: {held} ({share:.2f}). Its whole runs"
        f" took {spread(whole)} s, {shared(whole, theirs.seconds):.2f} of them."
    ]
    there = reached(base, base.final)
    if 0 < len(there.seconds) < there.runs:
        said.append(
            f"Only {len(there.seconds)} of {there.runs} of open_clip's runs were at that mean, after"
            f" {spread(there.seconds)} s: {shared(found.seconds, there.seconds):.2f} of these."
        )
    if len(base.runs) > 1:
        best = max(base.runs, key=lambda run: run.final)
        at, there = best.reaches(best.final), reached(line, best.final)
        assert at is not None
        after = f", after {spread(there.seconds)} s" if there.seconds else ""
        said.append(
            f"The best of open_clip's runs ended at {best.final:.1%} and was there after {best.clock.seconds[at]:.1f}"
            f" s: {len(there.seconds)} of {there.runs} of {name} reach that{after}."
        )
    ends = [(run.clock.seconds[-1], run.origin) for run in base.search if run.timed]
    seconds, origin = min(ends)
    said.append(
        f"The fastest whole run of open_clip's in any race, whatever it learned, took {seconds:.1f} s ({origin}):"
        f" {statistics.fmean(found.seconds) / seconds:.2f} of that."
    )
    return said


def shared(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.fmean(ours) / statistics.fmean(theirs)


def spread(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.1f}" + (f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else "")
