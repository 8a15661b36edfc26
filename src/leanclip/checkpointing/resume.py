"""Going on with a run: which checkpoint, and whether what is asked for now is still that run."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from leanclip.checkpointing.checkpoint import FORMAT, STATE_FILE, TENSORS, Position, tidy
from leanclip.checkpointing.state import RunState
from leanclip.checkpointing.storage import DamagedError, StoredTensors, verify
from leanclip.data import Manifest, check_manifest
from leanclip.errors import UserError, first_line
from leanclip.losses import LossConfig
from leanclip.models import step_directories
from leanclip.runs.config import TrainConfig
from leanclip.runs.run_directory import RunDirectory

AUTO, LATEST = "auto", "latest"

SAME = (  # or it is another run
    "loss", "global_batch_size", "opt", "seed", "lock_image", "lock_image_unlocked_groups", "lock_text",
    "lock_text_unlocked_layers", "shuffle", "val_split", "train_data_upsampling_factors",
)  # fmt: skip
FREE = (  # how it is run and looked at, not what it computes
    "name", "model", "logs", "device", "workers", "log_every", "eval_every", "val_frequency", "save_every",
    "save_frequency", "keep_last", "keep_every", "stop_on_save_error", "max_hours", "best_metric", "report_to",
    "wandb_project_name", "wandb_notes", "zero_shot", "imagenet_val", "imagenet_v2", "templates", "resume",
    "reset_loss_state", "overwrite", "train_data", "val_data", "pretrained", "batch_size", "micro_batch",
    "grad_checkpointing", "fsdp", "dist_timeout", "train_num_samples", "data_size", "max_broken", "implementation",
    "tau", "bias",
)  # fmt: skip
OF_THE_DATA = ("shuffle", "val_split", "train_data_upsampling_factors")  # new data may come with new ones
OF_THE_LOSS = ("loss",)


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint that was found whole."""

    path: Path
    content: dict[str, Any]

    @classmethod
    def open(cls, path: Path) -> "SavedRun":
        """Without a look at the hashes; see `check`."""
        try:
            content = json.loads((path / STATE_FILE).read_text())
            found = content["format"]
            if found == FORMAT:
                _check_content(content)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedError(f"{path} is damaged: {STATE_FILE} cannot be read") from error
        if found != FORMAT:
            raise UserError(f"{path} has format {found}, this version of leanclip reads {FORMAT}")
        return cls(path, content)

    @property
    def position(self) -> Position:
        return Position(**self.content["position"])

    @property
    def manifest(self) -> Manifest | None:
        """The ids that the run began with."""
        found = self.content["manifest"]
        return None if found is None else check_manifest(found, str(self.path / STATE_FILE))

    def load(self, state: RunState, group: dist.ProcessGroup | None, *, reset_loss: bool) -> None:
        """Give the pieces of a run the state that was saved. All processes call it together."""
        try:
            state.load(StoredTensors.open(self.path / TENSORS), self.content["values"], group, reset_loss=reset_loss)
        except DamagedError:
            raise
        except UserError as error:
            raise UserError(f"{self.path} is of another run: {error}") from error
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:  # made by something else
            raise DamagedError(f"{self.path} cannot be read ({first_line(error)})") from error

    def already_reset(self, config: TrainConfig, manifest: Manifest | None, samples: int) -> bool:
        """Whether --reset-loss-state was done for these data and this loss: the same command, given again."""
        before = self.content["settings"]
        return bool(
            before.get("reset_loss_state")
            and before["loss"] == config.run.loss
            and self.content["samples"] == samples
            and self.content["manifest"] == json.loads(json.dumps(manifest))
        )

    def without_effect(self, asked: LossConfig) -> list[str]:
        """A line for each value that was given and that the run has its own of by now."""
        pairs = [(name, getattr(asked, name), self.content["settings"].get(name)) for name in ("tau", "bias")]
        return [
            f"{_flag(name)} {value:g} has no effect: a resumed run goes on with its own"
            for name, value, before in pairs
            if value is not None and before is not None and value != before
        ]

    def compare(
        self, config: TrainConfig, architecture: Mapping[str, Any], *, samples: int, reset_loss: bool
    ) -> list[str]:
        """Complain about what must not differ. Returns a line for each setting that differs and may."""
        if _trained(architecture) != _trained(self.content["architecture"]):
            name = self.content["settings"]["model"]
            raise UserError(f"{self.path} is of another run: it trains {name}, in another form than asked for")
        before, now = self.content["settings"], settings(config)
        allowed = (*OF_THE_DATA, *OF_THE_LOSS) if reset_loss else ()
        notes = []
        for name, value in now.items():
            if name in FREE or name not in before or before[name] == value:
                continue
            said = f"{_flag(name)} {_shown(value)}, the run has {_shown(before[name])}"
            if name in SAME and name not in allowed:
                raise UserError(f"{self.path} is of another run: {said}; {_remedy(name)}")
            notes.append(f"resumed with {said}")
        if samples < self.content["samples"] and not reset_loss:
            raise UserError(
                f"{self.path} is of another run: it has {self.content['samples']:,} training samples, here are"
                f" {samples:,}; give its data, or --reset-loss-state for new ones"
            )
        return notes


def _check_content(content: dict[str, Any]) -> None:
    """Complain about anything in state.json that is not what we write."""
    position, values = content["position"], content["values"]
    Position(**position)
    whole = ("step", "epoch", "epoch_step", "samples", "skipped", "seen")
    kinds = [(position[name], int) for name in whole] + [(position["seconds"], (int, float))]
    kinds += [(position["best"], (int, float, type(None))), (position["broken"], dict), (content["samples"], int)]
    kinds += [(count, int) for count in position["broken"].values()]
    kinds += [(content["settings"], dict), (content["manifest"], (list, type(None)))]
    kinds += [(content["architecture"]["model_cfg"], dict), (values["optimizer"]["state"], dict)]
    kinds += [(values["optimizer"]["groups"], list), (values["scale"]["value"], (int, float))]
    kinds += [(values["scale"]["good_steps"], int), (values["ema"]["updates"], int)]
    for value, kind in kinds:
        if not isinstance(value, kind):
            raise TypeError(f"{value!r} is no {kind}")


def settings(config: TrainConfig) -> dict[str, Any]:
    """All settings by name, as JSON gives them back."""
    flat = {name: value for part in asdict(config).values() for name, value in part.items()}
    return json.loads(json.dumps(flat))


def find_saved(resume: str, run: Path) -> tuple[Path | None, list[str]]:
    """What --resume means: the directory of a checkpoint, a file of OpenCLIP's, or nothing for a run that begins.

    And warnings: where the newest checkpoint of a run is damaged, the one before it is taken.
    """
    given = run if resume in (AUTO, LATEST) else Path(resume)
    if given.is_file():
        return given.resolve(), []
    if (given / STATE_FILE).is_file():  # this one and no other
        verify(given)
        SavedRun.open(given)
        return given.resolve(), []
    if not given.exists() and resume != AUTO:
        raise UserError(f"--resume {resume}: no such run or checkpoint: {given}")
    if RunDirectory(given).is_held:  # else somebody may be writing just now
        tidy(given / "checkpoints")
    warnings = []
    for _, path in sorted(step_directories(given / "checkpoints"), reverse=True):
        try:
            verify(path)
            SavedRun.open(path)
        except DamagedError as error:
            warnings.append(f"{error}; the one before it is used")
            continue
        return path.resolve(), warnings
    if resume == AUTO and not warnings:
        return None, []
    none = "every checkpoint is damaged" if warnings else "there is no checkpoint"
    raise UserError(f"--resume {resume}: {none} in {given}; start without --resume")


def _trained(architecture: Mapping[str, Any]) -> dict[str, Any]:
    """What of an open_clip config decides about weights and what they see: not how they start, or are spared."""
    found = json.loads(json.dumps(architecture))
    model = {name: value for name, value in found["model_cfg"].items() if not name.startswith("init_logit_")}
    model["vision_cfg"].pop("patch_dropout", None)
    return found | {"model_cfg": model}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)


def _remedy(name: str) -> str:
    if name in (*OF_THE_DATA, *OF_THE_LOSS):
        return "resume with that, or with --reset-loss-state"
    return "resume with that, or start a new run from its weights: --pretrained"
