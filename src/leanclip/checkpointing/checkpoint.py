"""Saving: written beside the training, complete under its name or not there at all.

step_00001000/
  state/*.safetensors          every tensor of the run, a file for each process that wrote
  state.json                   where the run stands, and what it trains
  open_clip_model.safetensors  the weights alone, in one file that other tools load
  open_clip_config.json        their architecture
  trained.safetensors          with --ema, whose averages are the weights above: those that train
  hashes.json                  of the files above
  README.md, config.toml       the model card and the configuration
"""

import json
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from leanclip.checkpointing.state import EMA, EXPORT, MODEL, RunState
from leanclip.checkpointing.storage import (
    CheckpointException,
    Staging,
    StoredTensors,
    first_reason,
    write_hashes,
    write_safetensors,
    write_tensors,
)
from leanclip.distributed import Ranks
from leanclip.errors import UserError
from leanclip.filesystem import put_back, remove, replace_directory, sync
from leanclip.models import CONFIG_FILE, WEIGHTS_FILE, step_directories, with_temperature
from leanclip.models.saved import LAST
from leanclip.progress import ACTIVITY

FORMAT = 1
STATE_FILE = "state.json"
TRAINED_FILE = "trained.safetensors"  # with an EMA, whose weights are the model's: those that train
TENSORS = "state"
BEST = "best"
LONG_WAIT = 1.0  # seconds that training may wait for a save without a word
PATIENCE = 1800.0  # seconds that a save may take beyond the processes' time-out


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a run stands: the next step is `step`, the `epoch_step`-th of `epoch`; and what it has counted."""

    step: int
    epoch: int
    epoch_step: int
    samples: int
    seconds: float
    best: float | None
    skipped: int = 0
    seen: int = 0  # samples, and how many of them were broken, by kind
    broken: Mapping[str, int] = field(default_factory=dict)


class SaveError(Exception):
    """Why a checkpoint could not be written, on one line."""


@dataclass(frozen=True)
class _Request:
    name: str
    tensors: dict[str, Tensor]
    content: dict[str, Any] | None  # of state.json; none where only the weights are wanted
    beside: Mapping[str, str]  # texts by file name
    best: bool


class Checkpoints:
    """The checkpoints of a run. All processes call every method together; the first one decides about names."""

    def __init__(
        self,
        directory: Path,
        state: RunState,
        *,
        facts: Mapping[str, Any],
        group: dist.ProcessGroup | None = None,
        keep_last: int = 0,
        keep_every: int | None = None,
        stop_on_error: bool = False,
        tell: Callable[[str], None] = print,
    ) -> None:
        """`facts` go into every checkpoint. `group` is used by a thread of its own, so nothing else may use it.

        The newest `keep_last` stay (0: all), and those of every `keep_every`-th step.
        """
        self.directory, self.state, self.facts, self.group, self.tell = directory, state, facts, group, tell
        self.keep_last, self.keep_every, self.stop_on_error = keep_last, keep_every, stop_on_error
        self.first = Ranks.current().first
        self._config = state.model.open_clip_config()
        self._staging = Staging(group)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="leanclip-save")
        self._writing: Future[None] | None = None
        self._newest, self._of_best, self._told_of_waiting = directory, False, False
        self.best_lost = False  # whether the best weights so far could not be written

    def prepare(self) -> None:
        """Get the memory for the copies beside the training, once every tensor is there."""
        self._writing = self._thread.submit(self._staging.prepare, self.state.tensors())

    def save(self, position: Position, beside: Mapping[str, str], *, full: bool = True, best: bool = False) -> Path:
        """Begin to write everything, or with `full` off the weights alone; `best` makes them checkpoints/best, too.

        Returns where it will be. Returns at once, but for an earlier save that is still being written.
        """
        began = time.monotonic()
        self.finish()
        self._tell_of_waiting(time.monotonic() - began)
        if self.best_lost and not best:
            position = replace(position, best=None)  # a resumed run has no such weights either
        wanted = self.state.tensors() if full else self.state.model_tensors()
        content = {"format": FORMAT, "position": asdict(position)} | dict(self.facts)
        name = step_name(position.step) if full else BEST
        request = _Request(
            name,
            self._staging.copy(wanted),
            content | {"values": self.state.values()} if full else None,
            beside,
            best=best,
        )
        self._writing = self._thread.submit(self._write, request)
        self._newest, self._of_best = self.directory / name, best
        return self._newest

    def _tell_of_waiting(self, seconds: float) -> None:
        """Once: saves that come faster than they can be written make training wait."""
        if seconds > LONG_WAIT and not self._told_of_waiting:
            self._told_of_waiting = True
            self.tell(
                f"warning: training waited {seconds:.0f} s for the last checkpoint to be written; raise --save-every"
            )

    def finish(self) -> None:
        """Wait until the last save is on the disk, or known not to be.

        A slow disk gets half an hour; after that the wait counts as standing still, and the watch ends it.
        """
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        patience = time.monotonic() + PATIENCE
        while not writing.done() and time.monotonic() < patience:
            wait([writing], 1.0)
            ACTIVITY.still_working()
        error = writing.exception()
        if self._of_best:
            self.best_lost = error is not None
        if error is None or (isinstance(error, SaveError) and not self.stop_on_error):
            return
        if not isinstance(error, SaveError):
            raise error
        stop = UserError(f"checkpoint {self._newest.name} was not saved ({error})")
        stop.shown = not self.first
        raise stop

    def finish_last(self) -> Path:
        """The same for a run's last save, without which there is no result. Returns where it is."""
        self.stop_on_error = True
        self.finish()
        return self._newest

    def settle(self, seconds: float = 60.0) -> None:
        """Wait a while for a save that is still being written, whatever becomes of it."""
        if self._writing is not None:
            wait([self._writing], seconds)

    def _write(self, request: _Request) -> None:
        """In the other thread, on all processes."""
        temporary = self.directory / f".{request.name}.tmp"
        try:
            self._staging.wait()
            self._together(lambda: _make_anew(temporary) if self.first else None)
            self._together(lambda: write_tensors(temporary / TENSORS, request.tensors, self.group))
            self._together(lambda: self._complete(temporary, request) if self.first else None)
        except SaveError as error:
            if self.first:
                shutil.rmtree(temporary, ignore_errors=True)
                kept = max(step_directories(self.directory), default=None)
                stays = f"{kept[1].name} stays the newest" if kept else "there is none yet"
                self.tell(f"warning: checkpoint {request.name} was not saved ({error}); {stays}")
            raise

    def _complete(self, temporary: Path, request: _Request) -> None:
        """The files that one process writes, the list of all, and the final name."""
        stored, tower = StoredTensors.open(temporary / TENSORS), MODEL + "clip."
        wanted = [name for name in stored.shapes if name.startswith((tower, EMA, EXPORT))]
        here = {name: value for name in wanted if not isinstance(value := request.tensors[name], DTensor)}
        found = here | stored.read([name for name in wanted if name not in here])  # where others have a part
        weights, averages = _under(tower, found), _under(EMA, found)
        weights = with_temperature(weights, found[f"{EXPORT}temperature"], found.get(f"{EXPORT}bias"))
        write_safetensors(temporary / WEIGHTS_FILE, weights | averages)
        if averages:
            write_safetensors(temporary / TRAINED_FILE, weights)
        (temporary / CONFIG_FILE).write_text(json.dumps(self._config, indent=1))
        for name, text in request.beside.items():
            (temporary / name).write_text(text, encoding="utf-8")
        if request.best and request.content is not None:
            _copy_model(temporary, self.directory / f".{BEST}.tmp", request.beside)
        if request.content is None:
            shutil.rmtree(temporary / TENSORS)
        else:
            (temporary / STATE_FILE).write_text(json.dumps(request.content))
        write_hashes(temporary, unlisted=tuple(request.beside))
        replace_directory(temporary, self.directory / request.name)
        if request.best and request.content is not None:
            replace_directory(self.directory / f".{BEST}.tmp", self.directory / BEST)
        if request.content is not None:
            link = self.directory / f".{LAST}.tmp"
            link.unlink(missing_ok=True)
            link.symlink_to(request.name)
            link.replace(self.directory / LAST)
            sync(self.directory)
            try:
                self._prune()
            except OSError as error:
                self.tell(f"warning: older checkpoints were not removed ({first_reason(error)})")

    def _prune(self) -> None:
        if not self.keep_last:
            return
        for step, path in sorted(step_directories(self.directory), reverse=True)[self.keep_last :]:
            if self.keep_every is None or step % self.keep_every:
                going = path.with_name(f".{path.name}.tmp")
                path.rename(going)  # at once no checkpoint any more, whatever happens in the middle
                remove(going)

    def _together(self, call: Callable[[], None]) -> None:
        """Each process does its part; where one fails, all fail alike."""
        reason: str | None = None
        try:
            call()
        except (Exception, CheckpointException) as error:  # disks, file systems: whatever it is, training goes on
            reason = first_reason(error)
        reasons: list[str | None] = [reason]
        if self.group is not None:
            reasons = [None] * dist.get_world_size(self.group)
            dist.all_gather_object(reasons, reason, group=self.group)
        found = next((each for each in reasons if each is not None), None)
        if found is not None:
            raise SaveError(found)


def step_name(step: int) -> str:
    return f"step_{step:08d}"


def tidy(checkpoints: Path) -> None:
    """Remove what a killed run left half written, and put back what it was about to replace."""
    for path in checkpoints.glob(".*.old"):
        put_back(path.with_name(path.name[1:].removesuffix(".old")))
    for path in checkpoints.glob(".*.tmp"):
        remove(path)


def set_aside(checkpoints: Path, after: int) -> list[str]:
    """Rename the checkpoints after a step, for a run that goes on from there: they belong to another future.

    Else they would count as the newest. Returns their new names.
    """
    found = []
    for step, path in sorted(step_directories(checkpoints)):
        if step > after:
            found.append(path.rename(_unused(path)).name)
    return found


def copy_best(checkpoints: Path) -> str | None:
    """Keep the best weights of a future that was set aside: those of the new one come there. Returns their name."""
    best = checkpoints / BEST
    if not best.is_dir():
        return None
    return Path(shutil.copytree(best, _unused(best))).name


def _unused(path: Path) -> Path:
    """A name for what is set aside that nothing has yet."""
    names = (f"aside_{path.name}", *(f"aside_{path.name}_{number}" for number in range(2, 1000)))
    return next(aside for name in names if not (aside := path.with_name(name)).exists())


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _make_anew(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)


def _copy_model(source: Path, target: Path, beside: Mapping[str, str]) -> None:
    """The weights with what lies beside them, without the state of the run."""
    _make_anew(target)
    for name in (WEIGHTS_FILE, TRAINED_FILE, CONFIG_FILE, *beside):
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    write_hashes(target, unlisted=tuple(beside))


def load_tensors_of(directory: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, whole, for a look at them."""
    stored = StoredTensors.open(directory / TENSORS)
    with torch.no_grad():
        return stored.read(list(stored.shapes))
