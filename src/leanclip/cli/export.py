"""leanclip export: a trained model for other libraries."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from leanclip import __version__
from leanclip.cli.parse import parse
from leanclip.errors import UserError
from leanclip.inference import find_model, load_model
from leanclip.models import ModelConfig, TwoTower, create_model
from leanclip.models.export import TOLERANCE, Exported, export_open_clip, export_transformers
from leanclip.runs import RunDirectory
from leanclip.runs.metrics import read_results
from leanclip.runs.model_card import model_card

DESCRIPTION = """Write a trained model for other libraries, read it back and compare its embeddings before saying so.

  open_clip:     one file of weights, OUT.safetensors or OUT.pt.
  transformers:  a directory for CLIPModel.from_pretrained, with tokenizer, image processor and model card;
                 for CLIP's own vision transformers, the only ones that CLIPModel has.

Neither needs a network or an account.

  leanclip export logs/mine mine.safetensors
  leanclip export logs/mine/checkpoints/best mine-hf --format transformers
  leanclip export epoch_32.pt mine-hf --format transformers --model ViT-B-32
"""


@dataclass(frozen=True, kw_only=True)
class ExportCommand:
    checkpoint: str
    """A run (its last checkpoint), a checkpoint directory, or a file of weights together with --model."""
    out: str
    """The file or directory to write."""
    format: Literal["open_clip", "transformers"] = "open_clip"
    """open_clip: one file. transformers: a CLIPModel directory."""
    model: str | None = None
    """What a file of weights is of: an open_clip model name, or a config file."""
    overwrite: bool = False
    """Replace OUT, and the .json beside it."""


def run(arguments: list[str]) -> None:
    command = parse(ExportCommand, arguments, command="export", description=DESCRIPTION)
    source, out = Path(command.checkpoint), Path(command.out)
    found = _find(source, command.model)
    if out.exists() and not command.overwrite:
        raise UserError(f"{out} exists; give another name, or --overwrite")
    given = command.model
    model = load_model(found) if given is None else create_model(ModelConfig(model=given, pretrained=str(found)))
    console = Console(soft_wrap=True, highlight=False)
    with console.status("exporting and comparing") if console.is_terminal else contextlib.nullcontext():
        exported = _export(model, source, out, command)
    for path in exported.files:
        console.print(f"wrote {path}")
    console.print(f"loaded again: embeddings equal to {TOLERANCE:g} (largest difference {exported.difference:.1g})\n")
    console.print(exported.load, markup=False)


def _find(source: Path, model: str | None) -> Path:
    """A file of weights, where a model is given, else a checkpoint directory."""
    if not source.exists():
        raise UserError(f"no such run, checkpoint or file of weights: {source}")
    if source.is_file():
        if model is None:
            raise UserError(f"{source} holds weights only; say of what with --model")
        return source
    if model is not None:
        raise UserError(f"--model is for a file of weights; {source} says itself what it is")
    return find_model(source)


def _export(model: TwoTower, source: Path, out: Path, command: ExportCommand) -> Exported:
    if command.format == "open_clip":
        if out.is_dir():
            raise UserError(f"{out} is a directory; an open_clip export is one file")
        return export_open_clip(model, out, overwrite=command.overwrite)
    if out.is_dir():
        if any(out.iterdir()) and not (out / "config.json").is_file():
            raise UserError(f"{out} is no model directory, so --overwrite leaves it alone; give another name")
    elif out.exists():
        raise UserError(f"{out} is a file; a transformers export is a directory")
    return export_transformers(model, out, lambda: _card(model, source, out.name))


def _card(model: TwoTower, source: Path, name: str) -> str:
    run = RunDirectory.containing(source)
    size = model.preprocess.size
    facts: dict[str, Any] = {"name": name, "version": __version__} | ({} if run is None else run.facts())
    facts |= {
        "model": Path(str(facts.get("model") or "unknown")).name.removesuffix(".json"),
        "parameters": sum(parameter.numel() for parameter in model.clip.parameters()),
        "architecture": {
            "Embedding size": model.config["embed_dim"],
            "Image size": size if isinstance(size, int) else " x ".join(str(side) for side in size),
            "Context length": model.config["text_cfg"].get("context_length", 77),
            "Temperature": f"{model.temperature():.4f}",
        },
    }
    return model_card(facts, {} if run is None else read_results(run.metrics), library="transformers")
