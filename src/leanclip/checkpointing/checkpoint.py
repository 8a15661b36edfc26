"""Writes checkpoints in a thread beside the training. A checkpoint directory gets its name when it is complete.

step_00001000/
  state/*.safetensors          every tensor of the run, one file for each process
  state.json                   position, settings and other values of the run
  open_clip_model.safetensors  the weights alone, in one file that other tools load
  open_clip_config.json        their architecture
  lora.safetensors             with --lora-image or --lora-text: all but the frozen weights, adapters not merged
  trained.safetensors          with --ema, whose averages are the weights above: the weights that train
  hashes.json                  of the files above
  README.md, config.toml       the model card and the configuration
best/, start/                  the weights alone: the best so far, and those that the run started from, if any
"""

import json
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

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
from leanclip.models import WEIGHTS_FILE, step_directories, with_temperature
from leanclip.models.saved import LAST, START
from leanclip.models.towers.lora import ADAPTER_FILE, adapter_file, merged
from leanclip.progress import ACTIVITY

FORMAT = 1
STATE_FILE = "state.json"
TRAINED_FILE = "trained.safetensors"
TENSORS = "state"
BEST = "best"
WARN_WAIT_SECONDS = 1.0  # training waited this long for the previous save
SAVE_TIMEOUT = 1800.0  # seconds of a slow disk during which the processes' timeout does not apply


@dataclass(kw_only=True)
class Position:
    """The next step of a run is `step`, the `epoch_step`-th of `epoch`; with the run's counters."""

    step: int = 0
    epoch: int = 0
    epoch_step: int = 0
    samples: int = 0
    seconds: float = 0.0
    best: float | None = None
    skipped: int = 0
    seen: int = 0  # samples, of which `broken` were broken, by kind
    broken: Mapping[str, int] = field(default_factory=dict)

    def advance(self, batch: int, steps_per_epoch: int) -> None:
        """By one step."""
        self.step += 1
        self.samples += batch
        full, self.epoch_step = divmod(self.epoch_step + 1, steps_per_epoch)
        self.epoch += full


class SaveError(Exception):
    """The reason why a checkpoint could not be written, on one line."""


@dataclass(frozen=True)
class _Request:
    name: str
    tensors: dict[str, Tensor]
    content: dict[str, Any] | None  # of state.json; None to save the weights alone
    texts: Mapping[str, str]  # by file name
    best: bool


class Checkpoints:
    """The checkpoints of a run. Every method is a collective call; rank 0 names and completes the directories."""

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
        notify: Callable[[str], None] = print,
    ) -> None:
        """`facts` are stored in every checkpoint. `group` is for the writing thread only.

        The newest `keep_last` checkpoints are kept (0: all), and those of every `keep_every`-th step.
        """
        self.directory, self.state, self.facts, self.group, self.notify = directory, state, facts, group, notify
        self.keep_last, self.keep_every, self.stop_on_error = keep_last, keep_every, stop_on_error
        self.first = Ranks.current().first
        self.best_lost = False  # the best weights so far could not be written
        self._staging = Staging(group)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="leanclip-save")
        self._writing: Future[None] | None = None
        self._newest, self._newest_is_best, self._warned = directory, False, False

    def prepare(self) -> None:
        """Allocate the staging memory in the background, once every tensor exists."""
        self.finish()
        self._writing = self._thread.submit(self._staging.prepare, self.state.tensors())

    def save(self, position: Position, texts: Mapping[str, str], *, full: bool = True, best: bool = False) -> Path:
        """Start writing the run, or the weights alone without `full`; `best` also copies them to checkpoints/best.

        Returns the checkpoint's future path at once, unless an earlier save is still being written.
        """
        began = time.monotonic()
        self.finish()
        waited = time.monotonic() - began
        if waited > WARN_WAIT_SECONDS and not self._warned:
            self._warned = True
            self.notify(f"warning: training waited {waited:.0f} s for the previous checkpoint; raise --save-every")
        if self.best_lost and not best:
            position = replace(position, best=None)  # a resumed run does not have those weights either
        content = {"format": FORMAT, "position": asdict(position)} | dict(self.facts)
        name = f"step_{position.step:08d}" if full else BEST
        request = _Request(
            name,
            self._staging.copy(self.state.tensors() if full else self.state.model_tensors()),
            content | {"values": self.state.values()} if full else None,
            texts,
            best=best,
        )
        return self._submit(request)

    def save_start(self, texts: Mapping[str, str]) -> None:
        """Start writing the weights before the first step."""
        self._submit(_Request(START, self._staging.copy(self.state.model_tensors()), None, texts, best=False))

    def _submit(self, request: _Request) -> Path:
        self._writing = self._thread.submit(self._write, request)
        self._newest, self._newest_is_best = self.directory / request.name, request.best
        return self._newest

    def finish(self) -> None:
        """Wait until the last save succeeded or failed. After `SAVE_TIMEOUT` the heartbeat ends a wait that hangs."""
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        deadline = time.monotonic() + SAVE_TIMEOUT
        while not writing.done() and time.monotonic() < deadline:
            wait([writing], 1.0)
            ACTIVITY.still_working()
        error = writing.exception()
        if self._newest_is_best:
            self.best_lost = error is not None
        if isinstance(error, SaveError):
            if not self.stop_on_error:
                return
            message = f"checkpoint {self._newest.name} was not saved ({error})"
            raise Ranks.current().shown_once(UserError(message, code="checkpoint.not_saved"))
        if error is not None:
            raise error

    def finish_last(self) -> Path:
        """Wait for the final save of a run, whose failure is an error. Returns its path."""
        self.stop_on_error = True
        self.finish()
        return self._newest

    def settle(self, seconds: float = 60.0) -> None:
        """Wait a limited time for a save that is still being written, and ignore its outcome."""
        if self._writing is not None:
            wait([self._writing], seconds)

    def _write(self, request: _Request) -> None:
        temporary = self.directory / f".{request.name}.tmp"
        try:
            self._staging.wait()
            self._collective(lambda: remove(temporary).mkdir(parents=True) if self.first else None)
            self._collective(lambda: write_tensors(temporary / TENSORS, request.tensors, self.group))
            self._collective(lambda: self._complete(temporary, request) if self.first else None)
        except SaveError as error:
            if self.first:
                shutil.rmtree(temporary, ignore_errors=True)
                newest = max(step_directories(self.directory), default=None)
                kept = f"the newest is {newest[1].name}" if newest else "the run has none yet"
                self.notify(f"warning: checkpoint {request.name} was not saved ({error}); {kept}")
            raise

    def _complete(self, temporary: Path, request: _Request) -> None:
        """Write the files of rank 0, then give the directory its name."""
        self._write_model(temporary, request)
        best = self.directory / f".{BEST}.tmp"
        if request.content is None:
            shutil.rmtree(temporary / TENSORS)
        else:
            if request.best:
                shutil.copytree(temporary, remove(best), ignore=shutil.ignore_patterns(TENSORS))
                write_hashes(best, unlisted=tuple(request.texts))
            (temporary / STATE_FILE).write_text(json.dumps(request.content))
        write_hashes(temporary, unlisted=tuple(request.texts))
        replace_directory(temporary, self.directory / request.name)
        if request.content is None:
            return
        if request.best:
            replace_directory(best, self.directory / BEST)
        link = remove(self.directory / f".{LAST}.tmp")
        link.symlink_to(request.name)
        link.replace(self.directory / LAST)
        sync(self.directory)
        try:
            self._prune()
        except OSError as error:
            self.notify(f"warning: older checkpoints were not removed ({first_reason(error)})")

    def _write_model(self, directory: Path, request: _Request) -> None:
        """The weights with the loss's temperature, their architecture and the texts."""
        stored, tower = StoredTensors.open(directory / TENSORS), MODEL + "clip."
        names = [name for name in stored.shapes if name.startswith((tower, EMA, EXPORT))]
        local = {name: value for name in names if not isinstance(value := request.tensors[name], DTensor)}
        tensors = local | stored.read([name for name in names if name not in local])  # split over ranks
        weights, averages = _without(tower, tensors), _without(EMA, tensors)
        weights = with_temperature(weights, tensors[f"{EXPORT}temperature"], tensors.get(f"{EXPORT}bias"))
        write_safetensors(directory / WEIGHTS_FILE, merged(weights | averages))
        if averages and request.name != START:  # where they are the same
            write_safetensors(directory / TRAINED_FILE, merged(weights))
        if self.state.model.ranks and request.name != START:  # where nothing was trained yet
            write_safetensors(directory / ADAPTER_FILE, *adapter_file(self.state.model.clip, weights | averages))
        texts = {name: text.encode() for name, text in request.texts.items()}
        for name, content in (self.state.model.config_files(self.directory / LAST) | texts).items():
            (directory / name).write_bytes(content)

    def _prune(self) -> None:
        if not self.keep_last:
            return
        for step, path in sorted(step_directories(self.directory), reverse=True)[self.keep_last :]:
            if self.keep_every is None or step % self.keep_every:
                remove(path.rename(path.with_name(f".{path.name}.tmp")))  # a kill leaves no half checkpoint

    def _collective(self, call: Callable[[], object]) -> None:
        """Every process runs its part; if one fails, all raise its reason."""
        reason: str | None = None
        try:
            call()
        except (Exception, CheckpointException) as error:  # a failed save does not end the training
            reason = first_reason(error)
        reasons: list[str | None] = [reason]
        if self.group is not None:
            reasons = [None] * dist.get_world_size(self.group)
            dist.all_gather_object(reasons, reason, group=self.group)
        if failures := [text for text in reasons if text is not None]:
            raise SaveError(failures[0])


def clean_up(checkpoints: Path) -> None:
    """Remove what a killed run left incomplete, and restore what it was about to replace."""
    for path in checkpoints.glob(".*.old"):
        put_back(path.with_name(path.name[1:].removesuffix(".old")))
    for path in checkpoints.glob(".*.tmp"):
        remove(path)


def move_aside(checkpoints: Path, after: int) -> list[str]:
    """Rename the checkpoints after a step from which a run resumes, so that they are not its newest ones.

    Returns their new names.
    """
    later = [path for step, path in sorted(step_directories(checkpoints)) if step > after]
    return [path.rename(_unused_name(path)).name for path in later]


def copy_best(checkpoints: Path) -> str | None:
    """Keep a copy of the best weights before a resumed run replaces them. Returns its name."""
    best = checkpoints / BEST
    return Path(shutil.copytree(best, _unused_name(best))).name if best.is_dir() else None


def _unused_name(path: Path) -> Path:
    names = (f"aside_{path.name}", *(f"aside_{path.name}_{number}" for number in range(2, 1000)))
    return next(aside for name in names if not (aside := path.with_name(name)).exists())


def _without(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
