"""What a run leaves on disk, and where.

config.toml     the resolved configuration: `leanclip train --config` repeats the run
README.md       the model card, which lies beside every checkpoint, too
run.json        what is being trained, on what, and whether it is finished
metrics.jsonl   one object per logged step and per evaluation
manifest.json   the shards and the ids of their samples, which a resumed run keeps
panel.json      held-out images with the captions the model finds
zero_shot.json  how often which class was taken for which, at the last evaluation
diagnosis.json  what was wrong with the numbers, where a run stopped because of them
checkpoints/    step_00000100/ ..., best/, last -> the newest
.lock           held by the process that writes all this
"""

import contextlib
import errno
import fcntl
import itertools
import json
import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from leanclip.errors import UserError
from leanclip.filesystem import write_atomically

CARD_FILE = "README.md"
LOCK_FILE = ".lock"
PATIENCE = 10.0  # seconds for the process that had the directory before to end
_HELD: set[Path] = set()  # by this process
LIBRARIES = ("open_clip_torch", "timm", "torchvision", "numpy", "pillow")


@dataclass(frozen=True)
class RunDirectory:
    path: Path

    @classmethod
    def containing(cls, path: Path) -> "RunDirectory | None":
        """The run at a path: a run directory, or the one that a checkpoint belongs to."""
        candidates = (cls(directory) for directory in (path.resolve(), *path.resolve().parents[:2]))
        return next((run for run in candidates if run.is_run), None)

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def card(self) -> Path:
        return self.path / CARD_FILE

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def manifest(self) -> Path:
        return self.path / "manifest.json"

    @property
    def panel(self) -> Path:
        return self.path / "panel.json"

    @property
    def zero_shot(self) -> Path:
        return self.path / "zero_shot.json"

    @property
    def diagnosis(self) -> Path:
        return self.path / "diagnosis.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def is_run(self) -> bool:
        return (self.path / "run.json").is_file()

    @property
    def is_held(self) -> bool:
        """By this process."""
        return self.path.resolve() in _HELD

    @contextlib.contextmanager
    def held(self) -> Iterator[bool]:
        """Against a second run of the same name: a lock that is gone with the process, however it ends.

        Yields whether another one had to be waited for. Children of the process have no part in it. Where the file
        system knows no locks there is none. The process loses it by opening and closing the file, as when it copies
        the directory.
        """
        if self._holds_something() and not self.is_run:  # `prepare` will leave it alone, too
            yield False
            return
        if self.is_held:
            raise UserError(f"this process is writing {self.path} already; give another --name")
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            waited = _lock(descriptor, self.path)
            _HELD.add(self.path.resolve())
            yield waited
        finally:
            _HELD.discard(self.path.resolve())
            os.close(descriptor)

    def prepare(self, *, overwrite: bool = False, beginning: bool = False, resume_from: Path | None = None) -> None:
        """Make the directory. What is there is gone on with, replaced by choice, or left alone with a complaint.

        `beginning` is a run that is started again and again and has no checkpoint yet.
        """
        own = resume_from is not None and self.path.resolve() in resume_from.resolve().parents
        if not own and self._holds_something():
            if resume_from is not None:
                raise UserError(f"{self.path} is another run than the one to go on from; give another --name")
            if not overwrite and not beginning:
                raise UserError(
                    f"{self.path} exists; give another --name, --resume auto to go on with it, or --overwrite"
                )
            if not self.is_run:
                raise UserError(
                    f"{self.path} is no run of leanclip, so --overwrite leaves it alone; give another --name"
                )
            self._clear(keep=not overwrite)
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make {self.checkpoints} ({error.strerror}); give another --logs") from error

    def _clear(self, *, keep: bool) -> None:
        """Remove what is inside. With `keep`, weights that were saved are put aside, and stay there, however few."""
        if keep and self.checkpoints.is_dir() and any(self.checkpoints.iterdir()):
            number = next(n for n in itertools.count(1) if not (self.path / f"before-{n}").exists())
            aside = self.path / f"before-{number}"
            aside.mkdir()
            for path in list(self.path.iterdir()):
                if not path.name.startswith(("before-", LOCK_FILE)):
                    path.rename(aside / path.name)
            return
        for path in list(self.path.iterdir()):
            if path.name == LOCK_FILE or (keep and path.name.startswith("before-")):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _holds_something(self) -> bool:
        """More than what a run makes first, which may have been killed right then."""
        if not self.path.is_dir():
            return False
        begun = {path.name for path in self.path.iterdir()} <= {"checkpoints", "run.json.tmp", LOCK_FILE}
        return not begun or (self.checkpoints.is_dir() and any(self.checkpoints.iterdir()))

    def facts(self) -> dict[str, Any]:
        """What run.json says."""
        try:
            found = json.loads((self.path / "run.json").read_text())
        except (OSError, ValueError):  # not there, or not whole
            return {}
        return found if isinstance(found, dict) else {}

    def describe(self, **facts: Any) -> None:
        """Add facts to run.json."""
        write_atomically(self.path / "run.json", json.dumps(self.facts() | facts, indent=1))


def _lock(descriptor: int, path: Path) -> bool:
    """Whether another process had it at first."""
    until, waited = time.monotonic() + PATIENCE, False
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                return waited
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            if time.monotonic() > until:
                raise UserError(
                    f"another run is writing {path} ({holder}); wait until it has ended, or give another --name"
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
    """What a run was computed with."""
    name = f"cpu ({os.cpu_count()} cores)"
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        name = f"{torch.cuda.get_device_name(device)} ({total / 2**30:.0f} GiB)"
    found = {"python": platform.python_version(), "torch": torch.__version__, "device": name}
    if device.type == "cuda" and torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found | {library: version(library) for library in LIBRARIES} | {"system": platform.platform()}
