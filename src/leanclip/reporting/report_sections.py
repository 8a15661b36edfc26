"""The report of one run: key figures and evaluation tables."""

import math
import re
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, NamedTuple

from leanclip.reporting.curves import DIRECTIONS, TAU, ZERO_SHOT, chance_of, ranks
from leanclip.reporting.run_reader import Evaluation, RunData, number

HEADLINE = "text_to_image_recall@10"
NOT_METRICS = re.compile(r"images|captions|chance@\d+")
SILENT_SECONDS = 3600  # without a line; a run that was killed has not changed its status
DASH = "\N{EN DASH}"
MEMORY = {"gpu_memory_gib": "peak of the GPU", "resident_gib": "resident, maximum"}


class KeyFigure(NamedTuple):
    name: str
    value: str
    detail: str


class Cell(NamedTuple):
    text: str
    best: bool = False


@dataclass(frozen=True, kw_only=True)
class Column:
    """A metric in a table; `better` is 1 if more is better, -1 if less is, 0 if neither."""

    key: str
    title: str
    share: bool = True  # shown in percent
    better: int = 1
    chance: float = math.nan

    def cells(self, values: Sequence[float]) -> list[Cell]:
        """The values as texts; the best is marked, with those that look the same, unless all do."""
        texts = [(percent if self.share else plain)(value) for value in values]
        finite = [
            (self.better * value, text) for value, text in zip(values, texts, strict=True) if math.isfinite(value)
        ]
        best = max(finite)[1] if self.better and len({text for _, text in finite}) > 1 else None
        return [Cell(text, text == best) for text in texts]


@dataclass(frozen=True, kw_only=True)
class Table:
    """The evaluations on one set; `chance` has one text per column, or is empty if no chance is known."""

    set: str
    size: str
    groups: Mapping[str, Sequence[Column]]
    rows: Mapping[str, Sequence[Cell]]  # by the step; the first cell is the epoch
    chance: tuple[str, ...]
    gained: tuple[str, ...] = ()  # the last evaluation against that before training, if that started from weights


def percent(share: float) -> str:
    return f"{100 * share:.1f} %" if math.isfinite(share) else DASH


def plain(value: float) -> str:
    return f"{value:,.4g}" if math.isfinite(value) else DASH


def count(value: object) -> str:
    """A count in full below a million, above it to three digits: 12,800 and 151 M."""
    amount = number(value)
    if not math.isfinite(amount):
        return DASH
    for limit, suffix in ((1e9, "G"), (1e6, "M")):
        if amount >= limit:
            return f"{amount / limit:.3g} {suffix}"
    return f"{amount:,.0f}"


def duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return DASH
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{seconds:.0f} s" if seconds < 60 else f"{hours}:{minutes:02d} h" if hours else f"{minutes} min"


def moment(text: object) -> str:
    """An ISO time, to the minute; any other text unchanged."""
    try:
        time = datetime.fromisoformat(re.sub("Z$", "+00:00", str(text)))  # Python 3.10 does not read the Z
    except ValueError:
        return str(text)
    return f"{time:%Y-%m-%d %H:%M} {time.tzname() or ''}".rstrip()


def last_finite(values: Sequence[float]) -> float:
    return next((v for v in reversed(values) if math.isfinite(v)), math.nan)


def key_figures(run: RunData) -> list[KeyFigure]:
    figures = evaluation_figures(run)
    loss, tau, speeds, waits = (run.finite(key) for key in ("loss", "tau", "samples_per_second", "data_wait"))
    first = f"from {plain(loss[0])}" if loss else "no step logged yet"
    finite = not run.train or math.isfinite(run.column("loss")[-1])
    figures.append(KeyFigure("Loss", plain(last_finite(loss)), first if finite else "last logged loss is not finite"))
    speed = statistics.median(speeds) if speeds else math.nan
    waiting = f", {percent(statistics.median(waits))} waiting for data" if waits else ""
    text = DASH if not speeds else f"{speed:,.0f}" if speed >= 100 else f"{speed:,.1f}"
    figures.append(KeyFigure("Samples per second", text, f"median{waiting}" if speeds else "no step logged yet"))
    if memory := next(((values, kind) for key, kind in MEMORY.items() if (values := run.finite(key))), None):
        figures.append(KeyFigure("Memory", f"{max(memory[0]):.3g} GiB", memory[1]))
    figures.append(KeyFigure(TAU, plain(last_finite(tau)), course_of(tau, run.settings)))
    planned = number(run.info.get("steps"))
    steps = f"step {run.train[-1]['step'] if run.train else 0:,}"
    steps += f" of {planned:,.0f}" if math.isfinite(planned) else ""
    return [*figures, KeyFigure("Time", duration(last_finite(run.column("seconds"))), steps)]


def course_of(tau: Sequence[float], settings: Mapping[str, Any]) -> str:
    """From the first logged temperature; one alone says nothing about whether the loss learns it."""
    if not tau:
        return "no step logged yet"
    if len(tau) > 1:
        return "constant" if len(set(tau)) == 1 else f"from {plain(tau[0])}"
    from leanclip.losses.registry import LOSSES, spec_of  # torch: seconds that other reports need not wait

    loss = settings.get("loss")
    constant = loss in LOSSES and spec_of(loss).temperature == "constant"
    return "constant" if constant or settings.get("learn_tau") is False else "one step logged"


def evaluation_figures(run: RunData) -> list[KeyFigure]:
    """The last recall on "val", or on the set that was evaluated first, and the last top-1 on each classified set."""
    retrieval = "val" if "val" in run.sets else next(iter(run.sets), "")
    figures = [evaluation_figure("Text-to-image recall@10", run.evaluations_on(retrieval), HEADLINE)]
    figures += [evaluation_figure(f"Zero-shot top-1, {name}", run.evaluations_on(name), "top1") for name in run.sets]
    missing = "not evaluated yet" if run.status == "running" else "not evaluated"
    return [f for f in figures if f] or [KeyFigure("Text-to-image recall@10", DASH, missing)]


def evaluation_figure(name: str, evaluations: Sequence[Evaluation], key: str) -> KeyFigure | None:
    """The last value with chance and step, and the best one if that was another."""
    measured = [e for e in evaluations if math.isfinite(e.value(key))]
    if not measured:
        return None
    final, best = measured[-1], max(measured, key=lambda e: e.value(key))
    value, chance = final.value(key), chance_of(final, key)
    details: list[str] = []
    if chance > 0:
        ratio = value / chance
        details.append(f"chance {percent(chance)} ({ratio:.{1 if ratio < 10 else 0}f}\N{MULTIPLICATION SIGN})")
    details.append("before training" if final.step == 0 else f"step {final.step:,}")
    if measured[0].before and final.step:
        details.append(f"{percent(measured[0].value(key))} before training")
    if best.value(key) > value:
        details.append(f"best {percent(best.value(key))} at step {best.step:,}")
    return KeyFigure(name, percent(value), ", ".join(details))


def feature_costs(run: RunData) -> dict[str, str]:
    """What the tables of locked towers cost, and what the passes that they replaced would have."""
    texts: dict[str, str] = {}
    for side, entry in run.table("features").items():
        table: Mapping[str, object] = entry if isinstance(entry, dict) else {}
        rows, seconds = number(table.get("rows")), number(table.get("seconds"))
        epochs = last_finite(run.column("epoch"))
        passes = epochs * number(run.info.get("train_samples"))
        text = f"{count(rows)} rows, {plain(number(table.get('mib')))} MiB, "
        text += f"computed in {duration(seconds)}" if seconds >= 0 else "read from the cache"
        if passes > 0 and rows > 0:
            text += f"; {epochs:,.3g} epochs read them in place of {count(passes)} passes of the tower"
            text += f", about {duration(seconds * passes / rows)}" if seconds >= 0 else ""
        texts[f"Features of {side}"] = text
    return texts


def progress(run: RunData) -> tuple[float, str] | None:
    """The share of the steps that a run without an end has logged, in words too; None for one that has finished."""
    planned, done = number(run.info.get("steps")), run.steps[-1] if run.train else 0.0
    if run.status == "finished" or not planned > 0:
        return None
    share = min(1.0, done / planned)
    text = f"{run.status.capitalize()} at step {done:,.0f} of {planned:,.0f}: {share:.0%} of the steps logged"
    text += f", last line written {moment(run.changed.isoformat())}."
    silent = (datetime.now(timezone.utc) - run.changed).total_seconds()
    if run.status == "running" and silent > SILENT_SECONDS:
        text += f" Nothing for {duration(silent)}: it may have been killed."
    if run.status in ("stopped", "failed") or silent > SILENT_SECONDS:
        command = ["leanclip", "train", "--config", str(run.path / "config.toml"), "--name", run.name]
        text += f" To continue: {shlex.join([*command, '--resume', 'auto'])}"
    return share, text


def column_groups(evaluations: Sequence[Evaluation]) -> dict[str, list[Column]]:
    """The columns of a table: recalls by direction, classification, and any other metric unchanged."""
    last = evaluations[-1]
    known = {key for e in evaluations for key in e.metrics if not NOT_METRICS.fullmatch(key)}
    groups: dict[str, list[Column]] = {}
    for direction, title in DIRECTIONS.items():
        keys = {f"{direction}_recall@{rank}": f"R@{rank}" for rank in ranks(evaluations, direction)}
        groups[title] = [Column(key=key, title=text, chance=chance_of(last, key)) for key, text in keys.items()]
        if (median := f"{direction}_median_rank") in known:
            groups[title].append(Column(key=median, title="median rank", share=False, better=-1))
    groups["Zero-shot"] = [
        Column(key=key, title=title, chance=chance_of(last, key)) for key, title in ZERO_SHOT.items() if key in known
    ]
    others = sorted(known - {column.key for columns in groups.values() for column in columns})
    groups["Other"] = [Column(key=key, title=key, share=False, better=0) for key in others]
    return {title: columns for title, columns in groups.items() if columns}


def tables(run: RunData) -> list[Table]:
    return [table(name, run.evaluations_on(name)) for name in run.sets]


def table(name: str, evaluations: Sequence[Evaluation]) -> Table:
    """One row per evaluation: shares in percent, any other metric unchanged."""
    groups = column_groups(evaluations)
    columns = [column for group in groups.values() for column in group]
    labels = ["before training" if e.step == 0 else f"{e.step:,}" for e in evaluations]
    epochs = [Cell(plain(e.epoch)) for e in evaluations]
    figures = [column.cells([e.value(column.key) for e in evaluations]) for column in columns]
    rows = dict(zip(labels, zip(epochs, *figures, strict=True), strict=True))
    last = evaluations[-1]
    sizes = [f"{count(last.value(key))} {key}" for key in ("images", "captions") if math.isfinite(last.value(key))]
    chance = tuple(percent(column.chance) if math.isfinite(column.chance) else "" for column in columns)
    first = evaluations[0]
    gained = tuple(difference(column, first, last) for column in columns) if first.before and last.step else ()
    return Table(
        set=name, size=", ".join(sizes), groups=groups, rows=rows, chance=chance if any(chance) else (), gained=gained
    )


def difference(column: Column, before: Evaluation, after: Evaluation) -> str:
    """In percentage points, or in the metric's own unit."""
    value = (100 if column.share else 1) * (after.value(column.key) - before.value(column.key))
    return f"{value:+.1f}" if math.isfinite(value) else DASH
