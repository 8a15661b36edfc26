"""Trackers that show the numbers of metrics.jsonl: TensorBoard, and Weights & Biases. The only module with wandb."""

import itertools
import os
import uuid
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from leanclip.errors import UserError, first_line
from leanclip.runs.config import TrainConfig, tracker_names
from leanclip.runs.histograms import Histogram
from leanclip.runs.run_directory import RunDirectory


class TensorBoard:
    location: str | None = None  # printed at the start of the run

    def __init__(self, directory: Path, *, resume_at: int | None) -> None:
        self._directory = directory
        self._open(resume_at)

    def _open(self, resume_at: int | None) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter  # slow to import, and needed by training only

        # Hides the events after the step from which the run resumes.
        self._writer = SummaryWriter(str(self._directory), purge_step=None if resume_at is None else resume_at + 1)

    def rewind(self, step: int) -> None:
        """The steps after this one will be logged again."""
        self._writer.close()
        self._open(step)

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"{group}/{name}", value, step)

    def histogram(self, histogram: Histogram, step: int) -> None:
        edges, counts = histogram.edges, histogram.counts
        centres = [(low + high) / 2 for low, high in itertools.pairwise(edges)]
        self._writer.add_histogram_raw(
            f"state/{histogram.name}",
            min=edges[0],
            max=edges[-1],
            num=sum(counts),
            sum=sum(n * x for n, x in zip(counts, centres, strict=True)),
            sum_squares=sum(n * x * x for n, x in zip(counts, centres, strict=True)),
            bucket_limits=list(edges[1:]),
            bucket_counts=list(counts),
            global_step=step,
        )

    def close(self, *, failed: bool) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A wandb run that a resumed run continues: run.json keeps its id.

    The step is logged as a metric, because wandb's own step cannot decrease and would drop the steps that a resumed
    run repeats.
    """

    def __init__(self, directory: RunDirectory, config: TrainConfig) -> None:
        import wandb

        self._wandb: Any = wandb
        facts = directory.facts()
        identity = str(facts.get("wandb_id") or uuid.uuid4().hex[:12])
        # A run recorded offline continues so, since a run that needed no login should not need one to resume.
        offline = facts.get("wandb_offline") is True and "WANDB_MODE" not in os.environ
        try:
            self._run: Any = wandb.init(
                project=config.run.wandb_project_name,
                name=config.run.name,
                notes=config.run.wandb_notes,
                id=identity,
                resume="allow",
                mode="offline" if offline else None,
                config=config.values(),
                dir=str(directory.path),
                settings=wandb.Settings(console="off", silent=True),
            )
        except Exception as error:  # the client raises many kinds: no key, no network, no permission
            raise UserError(
                f"wandb does not start ({first_line(error)}); run `wandb login`, set WANDB_MODE=offline, or leave"
                " wandb out of --report-to",
                code="trackers.wandb",
            ) from error
        directory.describe(wandb_id=identity, wandb_offline=bool(self._run.offline))
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        folder = Path(self._run.dir).parent
        self.location = f"offline; to upload it: wandb sync {folder}" if self._run.offline else self._run.url

    def scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        self._run.log({f"{group}/{name}": value for name, value in values.items()} | {"step": step})

    def histogram(self, histogram: Histogram, step: int) -> None:
        bars = self._wandb.Histogram(np_histogram=(list(histogram.counts), list(histogram.edges)))
        self._run.log({f"state/{histogram.name}": bars, "step": step})

    def rewind(self, step: int) -> None:
        """Nothing to do: repeated steps are drawn over the earlier ones."""

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


Tracker = TensorBoard | WeightsAndBiases


def check_trackers(report_to: str) -> None:
    if "wandb" in tracker_names(report_to) and find_spec("wandb") is None:
        raise UserError(
            f"--report-to {report_to}: wandb is not installed; pip install 'leanclip[wandb]'",
            code="trackers.not_installed",
        )


def open_trackers(config: TrainConfig, directory: RunDirectory, *, resume_at: int | None) -> Sequence[Tracker]:
    names = tracker_names(config.run.report_to)
    trackers: list[Tracker] = []
    if "wandb" in names:
        trackers.append(WeightsAndBiases(directory, config))
    if "tensorboard" in names:
        trackers.append(TensorBoard(directory.path / "tensorboard", resume_at=resume_at))
    return trackers
