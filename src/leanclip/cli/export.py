"""leanclip export: a trained model for other libraries."""

import contextlib
import json
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
from leanclip.runs.model_card import one_line

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
    return export_transformers(model, out, lambda: model_card(model, _run_of(source), out.name))


def _run_of(source: Path) -> dict[str, Any]:
    """What run.json says of the run that a checkpoint belongs to, and its last evaluation."""
    for parent in (source.resolve(), *source.resolve().parents[:2]):
        described = parent / "run.json"
        if described.is_file():
            lines = (
                (parent / "metrics.jsonl").read_text().splitlines() if (parent / "metrics.jsonl").is_file() else []
            )
            evaluated = [json.loads(line) for line in lines if '"kind": "eval"' in line]
            return json.loads(described.read_text()) | ({"evaluation": evaluated[-1]} if evaluated else {})
    return {}


def model_card(model: TwoTower, run: dict[str, Any], name: str) -> str:
    """README.md of an exported model: what it is, how it was trained, how it is used."""
    title = one_line(run.get("name") or name)
    size = model.preprocess.size
    facts = {
        "architecture": Path(run["model"]).name.removesuffix(".json") if "model" in run else None,
        "loss": run.get("loss"),
        "training samples": f"{run['train_samples']:,}" if "train_samples" in run else None,
        "global batch": run.get("global_batch"),
        "steps": run.get("steps"),
        "parameters": f"{sum(parameter.numel() for parameter in model.clip.parameters()):,}",
        "embedding size": model.config["embed_dim"],
        "image size": size if isinstance(size, int) else " x ".join(str(side) for side in size),
        "context length": model.config["text_cfg"].get("context_length", 77),
        "temperature": f"{model.temperature():.4f}",
    }
    rows = [f"| {key} | {one_line(value)} |" for key, value in facts.items() if value is not None]
    evaluation = run.get("evaluation")
    figures = []
    if evaluation:
        figures = [
            "## Held-out retrieval",
            "",
            f"At step {evaluation['step']}, on data held out from the training:",
            "",
        ]
        figures += ["| | |", "|---|---|"]
        figures += [
            f"| {one_line(key.replace('_', ' '))} | {value:.1%} |"
            for key, value in evaluation["metrics"].items()
            if "@" in key
        ]
        figures += [""]
    notes = [f"{one_line(note)}\n" for note in run.get("notes", ())]
    return "\n".join(
        [
            "---",
            "library_name: transformers",
            "pipeline_tag: zero-shot-image-classification",
            "tags:",
            "- clip",
            "- leanclip",
            "---",
            "",
            f"# {title}",
            "",
            f"A CLIP model, trained with leanclip {one_line(run.get('version', __version__))}.",
            "",
            "| | |",
            "|---|---|",
            *rows,
            "",
            *figures,
            *notes,
            "## Use",
            "",
            "```python",
            "from PIL import Image",
            "from transformers import CLIPModel, CLIPProcessor",
            "",
            f'model, processor = CLIPModel.from_pretrained("{name}"), CLIPProcessor.from_pretrained("{name}")',
            'inputs = processor(text=["a cat", "a dog"], images=Image.open("picture.jpg"),',
            '                   return_tensors="pt", padding=True, truncation=True)',
            "print(model(**inputs).logits_per_image.softmax(-1))",
            "```",
            "",
            "## Limits",
            "",
            "It knows what its training data show, and their errors and biases. Nothing else is known about it until",
            "it is measured on data like yours. The licence is for those who trained it to say.",
            "",
        ]
    )
