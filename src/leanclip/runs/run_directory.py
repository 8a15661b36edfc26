"""The files of a run directory, and the lock of the process that writes them.

config.toml     the resolved configuration: `leanclip train --config` repeats the run
README.md       the model card, also in every checkpoint
run.json        model, data and environment of the run, and its status
metrics.jsonl   one object per logged step and per evaluation
manifest.json   the shards and the ids of their samples, for resumed runs
panel.json      held-out images with their nearest captions
suspects.json   the worst pairs that `leanclip data suspects` found
zero_shot.json  confusion counts of the last zero-shot evaluation
diagnosis.json  written when a run stops because of non-finite steps
checkpoints/    step_00000100/ ..., best/, start/, last -> the newest
.lock           locked by the process that writes the run
.replaced/      the run that --overwrite replaces, until the new one has a log line, a checkpoint or a diagnosis
"""

import contextlib
import errno
import fcntl
import itertools
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from leanclip.errors import UserError
from leanclip.filesystem import read_json, remove, write_atomically
from leanclip.models.saved import START

CARD_FILE, RUN_FILE, LOCK_FILE = "README.md", "run.json", ".lock"
KEPT = "before-"  # the content of a run that restarted without a checkpoint to resume from
REPLACED = ".replaced"
MOVING = ".moving"  # while content moves to .replaced or back: what is inside and what is beside it are one run
LOCK_TIMEOUT = 10.0  # seconds for the previous process to end
_HELD: set[Path] = set()  # by this process
FACT_TYPES = {"name": str, "model": str, "notes": list, "environment": dict, "architecture": dict, "ema": float}
LIBRARIES = ("open_clip_torch", "timm", "torchvision", "numpy", "pillow")


class RunDirectory:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.card = path / "config.toml", path / CARD_FILE
        self.metrics, self.manifest = path / "metrics.jsonl", path / "manifest.json"
        self.panel, self.zero_shot = path / "panel.json", path / "zero_shot.json"
        self.suspects, self.held_out = path / "suspects.json", path / "held_out.csv"
        self.diagnosis, self.checkpoints = path / "diagnosis.json", path / "checkpoints"

    @classmethod
    def containing(cls, path: Path) -> "RunDirectory | None":
        """The run at a path: a run directory, or the one that a checkpoint belongs to."""
        candidates = (cls(directory) for directory in (path.resolve(), *path.resolve().parents[:2]))
        return next((run for run in candidates if run.is_run), None)

    @property
    def is_run(self) -> bool:
        return any((self.path / folder / RUN_FILE).is_file() for folder in ("", REPLACED, MOVING))

    @property
    def is_held(self) -> bool:
        return self.path.resolve() in _HELD

    @contextlib.contextmanager
    def held(self) -> Iterator[bool]:
        """Lock the directory against a second run of the same name. Yields whether it had to wait for another run.

        Before and after, `settle` decides which run the directory holds. The lock ends with the process, and child
        processes do not inherit it. A file system without locks is used without one. Opening and closing the lock
        file releases it, as when the process copies the directory.
        """
        if self.has_content() and not self.is_run:  # `prepare` refuses it
            yield False
            return
        if self.is_held:
            raise UserError(f"this process already writes {self.path}; give another --name", code="run.in_use")
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            waited = _lock(descriptor, self.path)
            _HELD.add(self.path.resolve())
            self.settle()
            try:
                yield waited
            finally:
                with contextlib.suppress(OSError):  # the next start tries again
                    self.settle()
        finally:
            _HELD.discard(self.path.resolve())
            os.close(descriptor)

    def prepare(self, *, overwrite: bool = False, beginning: bool = False, resume_from: Path | None = None) -> None:
        """Make the directory. An existing run is resumed, replaced with `overwrite`, or refused.

        With `beginning` (--resume auto without a checkpoint) it restarts, and weights that it saved are kept.
        """
        if refusal := self.refusal(overwrite=overwrite, beginning=beginning, resume_from=resume_from):
            raise refusal
        if not self._resumed_from(resume_from) and self.has_content():
            self._replace() if overwrite else self._clear()
        self.checkpoints.mkdir(parents=True, exist_ok=True)

    def refusal(self, *, overwrite: bool, beginning: bool, resume_from: Path | None) -> UserError | None:
        """Why `prepare` refuses, if it does."""
        if self._resumed_from(resume_from) or not self.has_content():
            return None
        if resume_from is not None:
            return UserError(f"{self.path} is not the run to resume; give another --name", code="run.other")
        if not overwrite and not beginning:
            return UserError(
                f"{self.path} exists; give another --name, --resume auto to resume it, or --overwrite",
                code="run.exists",
            )
        if not self.is_run:
            return UserError(
                f"{self.path} is not a leanclip run and is not overwritten; give another --name", code="run.not_a_run"
            )
        return None

    def _resumed_from(self, checkpoint: Path | None) -> bool:
        return checkpoint is not None and self.path.resolve() in checkpoint.resolve().parents

    def _clear(self) -> None:
        """Remove the content, or move it to before-N if it includes saved weights."""
        kept = None
        if self._has_trained_weights():
            kept = next(path for n in itertools.count(1) if not (path := self.path / f"{KEPT}{n}").exists())
            kept.mkdir()
        for path in list(self.path.iterdir()):
            if path.name == LOCK_FILE or path.name.startswith(KEPT):
                continue
            if kept is None:
                remove(path)
            else:
                path.rename(kept / path.name)

    def _replace(self) -> None:
        """Move the content aside, to be removed when the new run has results, or put back if it ends without."""
        moving = self.path / MOVING
        moving.mkdir()
        for path in list(self.path.iterdir()):
            if path.name not in (LOCK_FILE, MOVING):
                path.rename(moving / path.name)
        moving.rename(self.path / REPLACED)

    def settle(self) -> None:
        """End what --overwrite began: remove the old run if the new one has results, or else put it back.

        A kill at any point leaves what the next call continues.
        """
        moving, replaced = self.path / MOVING, self.path / REPLACED
        self.remove_replaced()
        if replaced.is_dir():
            for path in list(self.path.iterdir()):
                if path.name not in (LOCK_FILE, REPLACED):
                    remove(path)
            replaced.rename(moving)
        if moving.is_dir():
            for path in list(moving.iterdir()):
                path.rename(self.path / path.name)
            moving.rmdir()
            print(f"leanclip: the new run had no results yet: {self.path} holds the run before it", file=sys.stderr)

    def remove_replaced(self) -> None:
        """Remove the run that --overwrite replaces, once the new one has results."""
        if (self.path / REPLACED).is_dir() and self._has_results():
            remove(self.path / REPLACED)

    @property
    def can_put_back(self) -> bool:
        """Whether --overwrite began a run that has no results yet."""
        return (self.path / REPLACED).is_dir() and not self._has_results()

    def has_content(self) -> bool:
        """Whether it holds more than a run that was killed while it started."""
        names = {path.name for path in self.path.iterdir()} if self.path.is_dir() else set()
        started = {"checkpoints", LOCK_FILE}
        unfinished = {name for name in names if name.startswith(f".{RUN_FILE}.")}
        return not names <= started | unfinished or (self.checkpoints.is_dir() and any(self.checkpoints.iterdir()))

    def _has_trained_weights(self) -> bool:
        """Whether a checkpoint was saved; the weights that the run started from are none."""
        names = (path.name for path in self.checkpoints.iterdir()) if self.checkpoints.is_dir() else ()
        return any(name != START and not name.endswith(".tmp") for name in names)

    def _has_results(self) -> bool:
        """A checkpoint, log line or diagnosis."""
        logged = self.metrics.is_file() and '"kind": "train"' in self.metrics.read_text(errors="replace")
        return logged or self._has_trained_weights() or self.diagnosis.exists()

    def discard(self) -> None:
        """Remove a run that failed before its first checkpoint, log line or diagnosis, so that its name is free."""
        if self._has_results() or not self.path.is_dir():
            return
        for path in list(self.path.iterdir()):
            remove(path)
        self.path.rmdir()

    def facts(self) -> dict[str, Any]:
        """The content of run.json without damaged parts; nothing if it is missing or damaged itself."""
        content: Any = None
        with contextlib.suppress(UserError):
            content = read_json(self.path / RUN_FILE)
        facts = content if isinstance(content, dict) else {}
        return {k: v for k, v in facts.items() if v is None or isinstance(v, FACT_TYPES.get(k, object))}

    def describe(self, **facts: Any) -> None:
        write_atomically(self.path / RUN_FILE, json.dumps(self.facts() | facts, indent=1))


def _lock(descriptor: int, path: Path) -> bool:
    """Whether it had to wait for another process."""
    deadline, waited = time.monotonic() + LOCK_TIMEOUT, False
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                return waited
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            if time.monotonic() > deadline:
                raise UserError(
                    f"another run is writing {path} ({holder}); wait until it has ended, or give another --name",
                    code="run.in_use",
                ) from error
            if not waited:
                print(f"leanclip: waiting for another run that writes {path} ({holder})", file=sys.stderr)
            waited = True
            time.sleep(0.1)
        else:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
            return waited


def environment(device: torch.device) -> dict[str, str]:
    name = f"cpu ({os.cpu_count()} cores)"
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        name = f"{torch.cuda.get_device_name(device)} ({total / 2**30:.0f} GiB)"
    facts = {"python": platform.python_version(), "torch": torch.__version__, "device": name}
    if device.type == "cuda" and torch.version.cuda:
        facts["cuda"] = torch.version.cuda
    return facts | {library: version(library) for library in LIBRARIES} | {"system": platform.platform()}
