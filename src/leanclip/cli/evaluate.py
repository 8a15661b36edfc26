"""leanclip evaluate: retrieval figures of a trained model."""

import contextlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.table import Table

from leanclip.cli.parse import Positional, parse
from leanclip.config import load_toml, override
from leanclip.data import Manifest, load_manifest, open_validation
from leanclip.errors import UserError
from leanclip.evaluation import embed, retrieval_metrics
from leanclip.inference import find_model, load_model
from leanclip.training import RunDirectory, TrainConfig, device_of

DESCRIPTION = """Image-to-text and text-to-image recall at 1, 5 and 10 on held-out data.

Example: leanclip evaluate logs/demo
         leanclip evaluate logs/mine/checkpoints/best --val-data flickr8k-test.tar
"""


@dataclass(frozen=True, kw_only=True)
class EvaluateCommand:
    checkpoint: Annotated[str, Positional]
    """A run (its last checkpoint) or a checkpoint directory."""
    val_data: str | None = None
    """Held-out shards. Default: those of the run."""
    device: str | None = None
    """cpu or cuda. Default: a GPU if there is one."""
    json: str | None = None
    """Also write the figures to this file."""


def run(arguments: list[str]) -> None:
    command = parse(EvaluateCommand, arguments, command="evaluate", description=DESCRIPTION)
    directory = find_model(Path(command.checkpoint))
    config, manifest = _data_of(directory, command.val_data)
    data = config.data
    if command.val_data is not None:
        data = replace(data, val_data=command.val_data, val_split=0.0)
    subset, note = open_validation(data, seed=config.run.seed, manifest=manifest)
    if subset is None:
        raise UserError("the run has no validation data; give --val-data")
    device = device_of(command.device)
    model = load_model(directory).to(device)
    console = Console(soft_wrap=True, highlight=False)
    with console.status("embedding") if console.is_terminal else contextlib.nullcontext():
        embedded = embed(model, subset, device=device, autocast=contextlib.nullcontext())
    metrics = dict(retrieval_metrics(embedded.images, embedded.texts, embedded.image_of_text))
    table = Table(title=f"{directory}: {len(embedded.ids)} held-out images, {len(embedded.captions)} captions")
    for heading in ("direction", "recall@1", "recall@5", "recall@10"):
        table.add_column(heading, justify="left" if heading == "direction" else "right")
    for direction in ("image_to_text", "text_to_image"):
        figures = [f"{metrics[f'{direction}_recall@{k}']:.1%}" for k in (1, 5, 10)]
        table.add_row(direction.replace("_", "-"), *figures)
    console.print(table)
    console.print(f"held-out text-to-image recall@10: {metrics['text_to_image_recall@10']:.1%} "
                  f"(chance {metrics['chance@10']:.1%})")  # fmt: skip
    if embedded.broken:
        console.print(f"{embedded.broken} held-out samples could not be used")
    if note:
        console.print(note)
    if command.json is not None:
        Path(command.json).write_text(json.dumps(metrics, indent=1))


def _data_of(directory: Path, val_data: str | None) -> tuple[TrainConfig, Manifest | None]:
    """The configuration of the run that the checkpoint belongs to, and which ids its samples have."""
    for parent in directory.resolve().parents:
        if (parent / "config.toml").is_file():
            config = override(TrainConfig(), load_toml(parent / "config.toml"), str(parent / "config.toml"))
            return config, load_manifest(RunDirectory(parent).manifest)
    if val_data is None:
        raise UserError(f"{directory} belongs to no run; give --val-data")
    return TrainConfig(), None
