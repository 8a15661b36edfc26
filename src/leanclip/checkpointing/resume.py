"""Resumes a run: finds the checkpoint, and compares the command's settings with those of the run."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from leanclip.checkpointing.checkpoint import FORMAT, STATE_FILE, TENSORS, Position, clean_up
from leanclip.checkpointing.state import RunState
from leanclip.checkpointing.storage import DamagedError, StoredTensors, verify
from leanclip.data import Manifest, check_manifest
from leanclip.errors import UserError, first_line
from leanclip.filesystem import read_json
from leanclip.losses import LossConfig
from leanclip.models import step_directories
from leanclip.runs.config import TrainConfig
from leanclip.runs.run_directory import RunDirectory

AUTO, LATEST = "auto", "latest"

# By setting: may a resumed run change it? See `leanclip.settings.setting`.
RESUME_MARKS = {
    entry.name: entry.metadata.get("resume", "noted")
    for part in fields(TrainConfig)
    for entry in fields(cast("type", part.default_factory))
}


@dataclass(frozen=True)
class SavedRun:
    """The state.json of a checkpoint, and the directory with its tensors."""

    path: Path
    content: dict[str, Any]

    @classmethod
    def open(cls, path: Path) -> "SavedRun":
        """Does not compare the hashes; see `storage.verify`."""
        try:
            content = read_json(path / STATE_FILE)
        except UserError as error:
            raise DamagedError(f"{path} is damaged: {error}") from error
        file_format = content.get("format") if isinstance(content, dict) else None
        if isinstance(file_format, int) and file_format != FORMAT:
            raise UserError(
                f"{path} has format {file_format}, this version of leanclip reads {FORMAT}", code="checkpoint.format"
            )
        if not _fits(content, CONTENT):
            raise DamagedError(f"{path} is damaged: {STATE_FILE} holds values that no run writes")
        return cls(path, content)

    @property
    def position(self) -> Position:
        saved = self.content["position"]
        return Position(**{entry.name: saved[entry.name] for entry in fields(Position)})

    @property
    def manifest(self) -> Manifest | None:
        manifest = self.content["manifest"]
        return None if manifest is None else check_manifest(manifest, str(self.path / STATE_FILE))

    def load(self, state: RunState, group: dist.ProcessGroup | None, *, reset_loss: bool) -> None:
        """Load the saved state into a run. A collective call."""
        try:
            state.load(StoredTensors.open(self.path / TENSORS), self.content["values"], group, reset_loss=reset_loss)
        except DamagedError:
            raise
        except UserError as error:
            raise self._mismatch(str(error)) from error
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:  # written by other software
            raise DamagedError(f"{self.path} cannot be read ({first_line(error)})") from error

    def already_reset(self, config: TrainConfig, manifest: Manifest | None, samples: int) -> bool:
        """Whether --reset-loss-state was already applied for these data and this loss: the same command, repeated."""
        saved = self.content["settings"]
        return bool(
            saved.get("reset_loss_state")
            and saved["loss"] == config.run.loss
            and self.content["samples"] == samples
            and len(self.content["manifest"] or ()) == len(manifest or ())
            # An entry of an older run has fewer keys.
            and all(old.items() <= new.items() for old, new in zip(self.manifest or (), manifest or (), strict=True))
        )

    def ignored_settings(self, loss: LossConfig) -> list[str]:
        """A line for each requested start value that a resumed run does not use."""
        pairs = [(name, getattr(loss, name), self.content["settings"].get(name)) for name in ("tau", "bias")]
        return [
            f"{_flag(name)} {value:g} has no effect: a resumed run keeps its own"
            for name, value, saved in pairs
            if value is not None and saved is not None and value != saved
        ]

    def compare(
        self, config: TrainConfig, architecture: Mapping[str, Any], *, samples: int, reset_loss: bool
    ) -> list[str]:
        """Raise for a setting that must not change. Returns a line for each other setting that changed."""
        if _trained_architecture(architecture) != _trained_architecture(self.content["architecture"]):
            raise self._mismatch(f"it trains {self.content['settings']['model']} with another architecture")
        changes = [self._change(name, value, reset_loss=reset_loss) for name, value in settings(config).items()]
        if samples < self.content["samples"] and not reset_loss:
            raise self._mismatch(
                f"it has {self.content['samples']:,} training samples, the command {samples:,}; use the same data, or"
                " --reset-loss-state for new data"
            )
        return [f"resumed with {change}" for change in changes if change is not None]

    def compare_split(self, config: TrainConfig) -> None:
        """What decides which samples are held out, before the data are opened: there another choice of samples can
        only mean that images have changed."""
        for name, value in (("val_split", config.data.val_split), ("seed", config.run.seed)):
            self._change(name, value, reset_loss=config.run.reset_loss_state)

    def _change(self, name: str, value: Any, *, reset_loss: bool) -> str | None:
        """Raise if this setting must not change. Returns what has changed, if anything that the user should know."""
        saved, mark = self.content["settings"], RESUME_MARKS[name]
        if mark == "free" or name not in saved or saved[name] == value:
            return None
        change = f"{_flag(name)} {_text(value)}, the run has {_text(saved[name])}"
        if mark == "fixed":
            remedy = "start a new run from its weights: --pretrained"
            raise self._mismatch(f"{change}; resume with that value, or {remedy}")
        if mark == "fixed_unless_reset" and not reset_loss:
            raise self._mismatch(f"{change}; resume with that value, or with --reset-loss-state")
        return change

    def _mismatch(self, reason: str) -> UserError:
        return UserError(f"{self.path} does not fit this command: {reason}", code="resume.mismatch")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(number is None or _is_number(number) for number in value.values())


CONTENT = {
    "position": dict.fromkeys(("step", "epoch", "epoch_step", "samples", "skipped", "seen"), _is_count)
    | {"seconds": _is_number, "best": lambda value: value is None or _is_number(value)}
    | {"broken": lambda value: isinstance(value, dict) and all(map(_is_count, value.values()))},
    "samples": lambda value: _is_count(value) and value > 0,
    "settings": {"model": lambda value: isinstance(value, str), "loss": lambda value: isinstance(value, str)},
    "threads": lambda value: value is None or _is_count(value),
    "manifest": lambda value: value is None or isinstance(value, list),
    "architecture": {"model_cfg": dict.fromkeys(("vision_cfg", "text_cfg"), lambda value: isinstance(value, dict))},
    "values": {
        "optimizer": {
            "kind": lambda value: isinstance(value, str),
            "state": lambda value: isinstance(value, dict) and all(map(_are_numbers, value.values())),
            "groups": lambda value: isinstance(value, list) and all(map(_are_numbers, value)),
        },
        "scale": {"value": lambda value: _is_number(value) and value > 0, "good_steps": _is_count},
        "ema": {"updates": _is_count},
    },
}
"""What state.json holds, by name: a test of the value."""


def _fits(value: Any, content: Any) -> bool:
    if callable(content):
        return bool(content(value))
    return isinstance(value, dict) and all(_fits(value.get(name), part) for name, part in content.items())


def settings(config: TrainConfig) -> dict[str, Any]:
    return json.loads(json.dumps(config.values()))


def find_checkpoint(resume: str, run: Path) -> tuple[Path | None, list[str]]:
    """The checkpoint directory or OpenCLIP file that --resume selects; None for a new run.

    Also returns warnings: if the newest checkpoint of a run is damaged, the one before it is used.
    """
    path = run if resume in (AUTO, LATEST) else Path(resume)
    if path.is_file():
        return path.resolve(), []
    if (path / STATE_FILE).is_file():  # this one, without a fallback
        verify(path)
        SavedRun.open(path)
        return path.resolve(), []
    if not path.exists() and resume != AUTO:
        raise UserError(f"--resume {resume}: no such run or checkpoint: {path}", code="checkpoint.not_found")
    if RunDirectory(path).is_held:  # otherwise another process may be writing
        clean_up(path / "checkpoints")
    warnings = []
    for _, checkpoint in sorted(step_directories(path / "checkpoints"), reverse=True):
        try:
            verify(checkpoint)
            SavedRun.open(checkpoint)
        except DamagedError as error:
            warnings.append(f"{error}; the one before it is used")
            continue
        return checkpoint.resolve(), warnings
    if resume == AUTO and not warnings:
        return None, []
    reason = "every checkpoint is damaged" if warnings else "no checkpoint"
    code = "checkpoint.damaged" if warnings else "checkpoint.not_found"
    raise UserError(f"--resume {resume}: {reason} in {path}; start without --resume", code=code)


def _trained_architecture(architecture: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an open_clip config that must not change: not the initial temperature, patch dropout, nor where
    the text tower's configuration is."""
    copy = json.loads(json.dumps(architecture))
    model = {name: value for name, value in copy["model_cfg"].items() if not name.startswith("init_logit_")}
    model["vision_cfg"].pop("patch_dropout", None)
    for name in ("hf_model_name", "hf_tokenizer_name"):
        model["text_cfg"].pop(name, None)
    return copy | {"model_cfg": model}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _text(value: Any) -> str:
    return "none" if value is None else str(value)
