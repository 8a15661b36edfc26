"""Tables and plot of the rows of time_to_recall.py.

A line is a trainer with a loss and a number of epochs. Its learning rate is the one with the best final recall, and
its runs at that rate count. The target is the mean of open_clip's final recalls. The seconds of a run are those until
its first epoch at or above the target, for open_clip's runs at or above their own final recall, so that a baseline
which was good early is not charged for the rest.
"""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import line_chart
import measurements
from measurements import Table
from stats import mean_and_deviation

BASELINE = "open_clip infonce"
EARLIER = ("second_race.csv", "third_race.csv", "fourth_race.csv")  # not the first, which had another model


@dataclass(frozen=True)
class Curve:
    """One run."""

    rows: Sequence[dict[str, str]]
    file: str

    @property
    def name(self) -> str:
        first = self.rows[0]
        length = f", {first['epochs']} epochs" if first["trainer"] == "leanclip" else ""
        return f"{first['trainer']} {first['loss']}{length}"

    @property
    def lr(self) -> float:
        return float(self.rows[0]["lr"])

    @property
    def timed(self) -> bool:
        return self.rows[0]["seconds"] != ""

    @property
    def recalls(self) -> list[float]:
        return [float(row["text_to_image_recall_at_10"]) for row in self.rows]

    @property
    def final(self) -> float:
        return self.recalls[-1]

    @property
    def seconds(self) -> list[float]:
        """At the end of each epoch."""
        return [float(row["seconds"]) for row in self.rows]

    @property
    def startup(self) -> float:
        return float(self.rows[0]["startup_seconds"])

    @property
    def epoch_seconds(self) -> float:
        rest = [after - before for before, after in itertools.pairwise(self.seconds)]
        return statistics.median(rest) if rest else self.seconds[0] - self.startup

    @property
    def compilation(self) -> float:
        """What the first epoch takes longer than the others."""
        return max(0.0, self.seconds[0] - self.startup - self.epoch_seconds)

    def epoch_at(self, target: float) -> int | None:
        """The first epoch, counted from 0, at or above the target."""
        return next((epoch for epoch, recall in enumerate(self.recalls) if recall > target - 1e-9), None)


def curves(path: Path) -> list[Curve]:
    """The complete runs of a file."""
    runs: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in measurements.rows(path):
        key = tuple(row.get(name, "") for name in ("trainer", "loss", "seed", "trainer_command", "run", "alone"))
        runs.setdefault(key, []).append(row)
    return [Curve(rows, path.name) for rows in runs.values() if rows[-1]["epoch"] == rows[-1]["epochs"]]


def lines(path: Path) -> dict[str, list[Curve]]:
    """By name the timed runs at the learning rate of the best one, the baseline first."""
    runs = [run for run in curves(path) if run.timed]
    best = {run.name: run.lr for run in sorted(runs, key=lambda run: run.final)}
    names = sorted(best, key=lambda name: name != BASELINE)
    return {name: [run for run in runs if run.name == name and run.lr == best[name]] for name in names}


@dataclass(frozen=True)
class Reached:
    """The runs of a line that reach a target, and the epochs at which they do."""

    runs: list[tuple[Curve, int]]

    @property
    def seconds(self) -> list[float]:
        return [run.seconds[epoch] for run, epoch in self.runs]

    @property
    def steady(self) -> list[float]:
        """Seconds without start-up and compilation."""
        return [run.seconds[epoch] - run.startup - run.compilation for run, epoch in self.runs]


def reached(runs: Sequence[Curve], target: float | None) -> Reached:
    """With no target: each run its own final recall."""
    epochs = [(run, run.epoch_at(run.final if target is None else target)) for run in runs]
    return Reached([(run, epoch) for run, epoch in epochs if epoch is not None])


def target_of(runs: Sequence[Curve]) -> float:
    return statistics.fmean(run.final for run in runs)


def ratio(values: Sequence[float], baseline: Sequence[float]) -> str:
    return f"{statistics.fmean(values) / statistics.fmean(baseline):.2f}" if values else ""


def seconds(values: Sequence[float]) -> str:
    return mean_and_deviation(values, 1) if values else "not reached"


def line_table(path: Path) -> Table:
    by_name = lines(path)
    target, baseline = target_of(by_name[BASELINE]), reached(by_name[BASELINE], None)
    rows = []
    for name, runs in by_name.items():
        line = baseline if name == BASELINE else reached(runs, target)
        count = "own final recall" if name == BASELINE else f"{len(line.runs)} of {len(runs)}"
        epochs = ", ".join(map(str, sorted({epoch + 1 for _, epoch in line.runs})))
        recall = mean_and_deviation([100 * run.final for run in runs], 1) + "%"
        parts = [f"{statistics.fmean(getattr(run, part) for run in runs):.1f}" for part in ("startup", "compilation")]
        parts.append(f"{statistics.fmean(run.epoch_seconds for run in runs):.2f}")
        cells = [seconds(line.seconds), ratio(line.seconds, baseline.seconds), *parts]
        cells += [seconds(line.steady), ratio(line.steady, baseline.steady)]
        rows.append([name, f"{runs[0].lr:g}", recall, count, epochs, *cells])
    columns = ["line", "lr", "final recall", "reached by", "at epoch", "seconds", "ratio", "start-up", "compilation"]
    return Table([*columns, "epoch", "seconds without start-up and compilation", "its ratio"], rows)


def check_table(path: Path) -> Table:
    """The ratio of the seconds if open_clip is taken by other figures."""
    by_name = lines(path)
    base = by_name.pop(BASELINE)
    target, baseline = target_of(base), reached(base, None)
    best = max(base, key=lambda run: run.final)
    earlier = [run for name in EARLIER for run in curves(path.with_name(name)) if run.name == BASELINE and run.timed]
    fastest = min(run.seconds[-1] for run in [*base, *earlier])
    rows = []
    for name, runs in by_name.items():
        line, higher = reached(runs, target), reached(runs, best.final)
        for title, line_seconds, base_seconds in (
            (f"{name}: whole runs", [run.seconds[-1] for run in runs], baseline.seconds),
            ("open_clip's runs that reach the mean", line.seconds, reached(base, target).seconds),
            (f"open_clip's best run, {best.final:.1%}", higher.seconds, reached([best], None).seconds),
            ("the fastest whole run of open_clip in any file", line.seconds, [fastest]),
        ):
            rows.append(
                [
                    title,
                    f"{len(line_seconds)} of {len(runs)}",
                    seconds(line_seconds),
                    seconds(base_seconds),
                    ratio(line_seconds, base_seconds),
                ]
            )
    return Table(["comparison", "leanclip's runs", "leanclip, s", "open_clip, s", "ratio"], rows)


def run_table(path: Path) -> Table:
    """All runs, also those of earlier files and those without a clock."""
    runs = [run for name in (*EARLIER, path.name) for run in curves(path.with_name(name))]
    rows = []
    for run in sorted(runs, key=lambda run: (run.name != BASELINE, run.name, run.lr)):
        times = ["", "", ""]
        if run.timed:
            times = [f"{run.seconds[-1]:.1f}", f"{run.startup:.1f}", f"{run.epoch_seconds:.2f}"]
        recalls = [f"{recall:.1%}" for recall in (run.recalls[0], run.final, max(run.recalls))]
        rows.append([run.name, f"{run.lr:g}", *recalls, *times, run.file])
    columns = ["line", "lr", "first epoch", "final recall", "best", "whole run, s", "start-up", "epoch", "file"]
    return Table(columns, rows)


def tables(path: Path) -> dict[str, Table]:
    return {"time": line_table(path), "time_checks": check_table(path), "time_runs": run_table(path)}


def draw(path: Path) -> None:
    by_name = lines(path)
    target, mean = target_of(by_name[BASELINE]), "mean of open_clip's final recalls"
    curves_by_name = {
        f"{name}, seed {run.rows[0]['seed']}": list(zip(run.seconds, run.recalls, strict=True))
        for name, runs in by_name.items()
        for run in runs
    }
    end = max(points[-1][0] for points in curves_by_name.values())
    panels = {"seconds from the start, without evaluations": curves_by_name | {mean: [(0.0, target), (end, target)]}}
    title = f"Held-out text-to-image recall@10 ({by_name[BASELINE][0].rows[0]['device']})"
    line_chart.draw(path.with_suffix(".svg"), panels, title=title, ylabel="recall@10", dashed=mean)
