"""What a classification confuses: the whole table of few classes, the worst of many."""

from dataclasses import dataclass

from leanclip.reporting.report_sections import Cell, percent
from leanclip.reporting.run_reader import ZeroShot

WHOLE = 24  # classes of which the whole table is shown
SHOWN = 12  # confusions and classes listed
LEVELS = 6


@dataclass(frozen=True, kw_only=True)
class Count:
    """One field of the table: how many images of its row were taken for its column, and how dark that is."""

    count: int
    shade: int
    right: bool
    says: str


@dataclass(frozen=True, kw_only=True)
class ClassRow:
    name: str
    counts: tuple[Count, ...]
    recall: str


@dataclass(frozen=True, kw_only=True)
class Confused:
    """Images of one class taken for another."""

    true: str
    taken_for: str
    count: int
    share: str


@dataclass(frozen=True, kw_only=True)
class Confusion:
    """A set's classification: `rows` only where the classes are few enough to read them all."""

    set: str
    figures: tuple[tuple[str, Cell], ...]
    classnames: tuple[str, ...]
    rows: tuple[ClassRow, ...]
    confused: tuple[Confused, ...]
    worst: tuple[ClassRow, ...]
    note: str


def confusion(found: ZeroShot) -> Confusion:
    names = found.classnames
    totals = [sum(row) for row in found.confusion]
    pairs = [
        (row[taken], true, taken)
        for true, row in enumerate(found.confusion)
        for taken in range(len(row))
        if taken != true and row[taken] > 0
    ]
    pairs.sort(key=lambda pair: (-pair[0], pair[1], pair[2]))
    classes = [
        ClassRow(name=name, counts=(), recall=percent(row[i] / total) if total else "no image")
        for i, (name, row, total) in enumerate(zip(names, found.confusion, totals, strict=True))
    ]
    order = sorted((i for i in range(len(names)) if totals[i]), key=lambda i: found.confusion[i][i] / totals[i])
    titles = {"top1": "top-1", "top5": "top-5", "mean_per_class_recall": "mean per-class recall", "chance": "chance"}
    return Confusion(
        set=found.set,
        figures=tuple((t, Cell(text=percent(found.figures[k]))) for k, t in titles.items() if k in found.figures),
        classnames=names,
        rows=tuple(class_row(found, i, totals[i]) for i in range(len(names))) if len(names) <= WHOLE else (),
        confused=tuple(
            Confused(true=names[true], taken_for=names[taken], count=count, share=percent(count / totals[true]))
            for count, true, taken in pairs[:SHOWN]
        ),
        worst=tuple(classes[i] for i in order[:SHOWN]) if len(names) > WHOLE else (),
        note=found.note,
    )


def class_row(found: ZeroShot, number: int, total: int) -> ClassRow:
    row, names = found.confusion[number], found.classnames
    counts = tuple(
        Count(
            count=count,
            shade=-(-LEVELS * count // total) if total else 0,
            right=taken == number,
            says=f"{count} of {total} images of {names[number]} taken for {names[taken]}",
        )
        for taken, count in enumerate(row)
    )
    return ClassRow(name=names[number], counts=counts, recall=percent(row[number] / total) if total else "no image")
