"""What one command was asked for, and the search that all of them do: trials, the best on val, its seeds."""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import runs
import table
from photos import MODEL
from runs import CURVE, TINY, Place, Rows, Run, recipe_of, with_seeds
from workers import Workers, side_by_side

from leanclip.data.datasets import BUNDLED

SEEDS = 5
FEWER = 3  # seeds, of the same, where variants of one loss are compared
Name = TypeVar("Name")


@dataclass
class Experiment:
    """Where its runs come from and where its findings go."""

    finish: Callable[[list[Run]], Rows]
    place: Callable[[], Place]
    results: Path
    recipe: str
    seeds: int
    quick: bool
    write: bool = False

    def best(self, spaces: Mapping[Name, list[Run]]) -> dict[Name, Run]:
        """By name the trial that did best on val. A name whose trials are not complete is left out."""
        found = self.finish([trial for trials in spaces.values() for trial in trials])
        return {
            name: max(trials, key=lambda trial: float(found[trial]["val_t2i10"]))
            for name, trials in spaces.items()
            if all(trial in found for trial in trials)
        }

    def search(self, spaces: Mapping[Name, list[Run]], most: int = SEEDS) -> tuple[dict[Name, list[Run]], Rows]:
        """By name the runs of the best trial, one for each seed, where they are complete; and the rows of them.

        No name waits for the trials of another."""

        def seeds_of(name: Name) -> tuple[list[Run], Rows]:
            best = self.best({name: spaces[name]})
            chosen = [run for trial in best.values() for run in with_seeds(trial, min(self.seeds, most))]
            return chosen, self.finish(chosen)

        chosen, rows = {}, {}
        for name, (several, found) in zip(spaces, side_by_side(seeds_of, spaces), strict=True):
            if several and len(found) == len(several):
                chosen[name] = several
                rows |= found
        return chosen, rows

    def curve(self, run: Run) -> list[dict[str, float]]:
        """The measured points of a run, each once: one that was broken off has left some of its own."""
        rows = [row for row in table.rows(self.results / "curves.csv") if row["run"] == run.key(self.recipe)]
        points = {row["samples"]: {name: float(row[name]) for name in CURVE[1:]} for row in rows}
        return list(points.values())


def experiment(description: str | None) -> Experiment:
    """From the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=Path, help="the folder that photos.py made")
    parser.add_argument("--processes", type=int, default=8, help="runs side by side")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no run that would be over later")
    parser.add_argument("--results", type=Path, default=table.RESULTS, help="where rows are, and new ones go")
    parser.add_argument("--write", action="store_true", help="train nothing: table, plot and text of what there is")
    parser.add_argument("--quick", action="store_true", help="emoji, a tiny model, two steps; nothing is kept")
    given = parser.parse_args()
    if given.quick:
        folder = Path(tempfile.mkdtemp())
        config = folder / "tiny.json"
        config.write_text(json.dumps(TINY))
        workers = Workers(BUNDLED, results=folder, processes=1, steps=2, config=config)
        return Experiment(workers.rows, partial(runs.place, BUNDLED, config), folder, recipe_of(config, 2), 2, True)
    if given.photos is None and not given.write:
        parser.error("--photos FOLDER is missing; photos.py makes it")
    until = 0.0 if given.write else time.time() + given.seconds
    photos = given.photos or Path()
    workers = Workers(photos, results=given.results, processes=given.processes, until=until)
    place = partial(runs.place, photos, MODEL)
    return Experiment(workers.rows, place, given.results, recipe_of(MODEL, None), SEEDS, False, given.write)
