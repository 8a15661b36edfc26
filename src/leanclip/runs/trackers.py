"""Where numbers go beside metrics.jsonl: TensorBoard, and Weights & Biases. The only module that imports wandb."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from leanclip.errors import UserError, first_line
from leanclip.runs.config import TrainConfig, tracker_names
from leanclip.runs.histograms import Histogram
from leanclip.runs.run_directory import RunDirectory


class Tracker(Protocol):
    """Shows a run's numbers elsewhere. `place` says where, if the user should know."""

    place: str | None

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None: ...

    def histogram(self, found: Histogram, step: int) -> None: ...

    def rewind(self, step: int) -> None:
        """What was shown after this step will come again."""
        ...

    def close(self, *, failed: bool) -> None: ...


class TensorBoard:
    """Event files in the run's own directory."""

    place: str | None = None

    def __init__(self, directory: Path, *, resume_at: int | None) -> None:
        self._directory = directory
        self._open(resume_at)

    def _open(self, resume_at: int | None) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter  # slow to import, and needed by training only

        # What a broken-off run wrote after the checkpoint is hidden; the checkpoint's own step stays.
        self._writer = SummaryWriter(str(self._directory), purge_step=None if resume_at is None else resume_at + 1)

    def rewind(self, step: int) -> None:
        self._writer.close()
        self._open(step)

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"{group}/{name}", value, step)

    def histogram(self, found: Histogram, step: int) -> None:
        total = sum(found.counts)
        centres = [(low + high) / 2 for low, high in zip(found.edges, found.edges[1:], strict=False)]
        self._writer.add_histogram_raw(
            f"state/{found.name}",
            min=found.edges[0],
            max=found.edges[-1],
            num=total,
            sum=sum(n * x for n, x in zip(found.counts, centres, strict=True)),
            sum_squares=sum(n * x * x for n, x in zip(found.counts, centres, strict=True)),
            bucket_limits=list(found.edges[1:]),
            bucket_counts=list(found.counts),
            global_step=step,
        )

    def close(self, *, failed: bool) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A wandb run that a resumed run goes on with: run.json keeps its id.

    The step is logged as a number of its own. wandb's step only ever grows, so that it would drop what a resumed run
    computes again after its checkpoint.
    """

    def __init__(self, directory: RunDirectory, config: TrainConfig) -> None:
        import wandb

        self._wandb: Any = wandb
        known = directory.facts().get("wandb_id")
        identity = str(known) if known else uuid.uuid4().hex[:12]
        values = {name: value for part in asdict(config).values() for name, value in part.items()}
        try:
            self._run: Any = wandb.init(
                project=config.run.wandb_project_name,
                name=config.run.name,
                notes=config.run.wandb_notes,
                id=identity,
                resume="allow",
                config=values,
                dir=str(directory.path),
                settings=wandb.Settings(console="off", silent=True),
            )
        except Exception as error:  # whatever the client raises: no key, no network, no rights
            raise UserError(
                f"wandb does not start ({first_line(error)}); run `wandb login`, set WANDB_MODE=offline, or leave"
                " wandb out of --report-to",
                code="trackers.wandb",
            ) from error
        directory.describe(wandb_id=identity)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        folder = Path(self._run.dir).parent
        self.place = f"offline; to upload it: wandb sync {folder}" if self._run.offline else self._run.url

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        self._run.log({f"{group}/{name}": value for name, value in values.items()} | {"step": step})

    def histogram(self, found: Histogram, step: int) -> None:
        bars = self._wandb.Histogram(np_histogram=(list(found.counts), list(found.edges)))
        self._run.log({f"state/{found.name}": bars, "step": step})

    def rewind(self, step: int) -> None:
        """The step is a number of its own: what comes again is drawn over what was there."""

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def check_trackers(report_to: str) -> None:
    """Complain now about a tracker that could not be opened later."""
    if "wandb" in tracker_names(report_to) and find_spec("wandb") is None:
        raise UserError(f"--report-to {report_to}: wandb is not installed; pip install 'leanclip[wandb]'")


def open_trackers(config: TrainConfig, directory: RunDirectory, *, resume_at: int | None) -> Sequence[Tracker]:
    """The trackers that --report-to names, on the process that writes."""
    names = tracker_names(config.run.report_to)
    found: list[Tracker] = []
    if "wandb" in names:
        found.append(WeightsAndBiases(directory, config))
    if "tensorboard" in names:
        found.append(TensorBoard(directory.path / "tensorboard", resume_at=resume_at))
    return found
