"""leanclip export: trained models for other libraries."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from leanclip import __version__
from leanclip.cli.parse import parse
from leanclip.errors import UserError
from leanclip.filesystem import write_atomically, writing
from leanclip.inference import SavedModel, find_start, find_weights_directory, interpolated
from leanclip.models import ModelConfig, TwoTower, config_of_file, create_model, load_model
from leanclip.models.export import export_onnx, export_open_clip, export_transformers
from leanclip.models.towers.lora import ADAPTER_FILE, merge_adapters
from leanclip.progress import make_console
from leanclip.runs import RunDirectory
from leanclip.runs.metrics import read_results
from leanclip.runs.model_card import model_card
from leanclip.settings import between, check_limits, setting

DESCRIPTION = """Export a trained model to another library. The export is loaded again and compared.

  open_clip:     one weights file, OUT.safetensors or OUT.pt.
  transformers:  a directory for CLIPModel.from_pretrained, with tokenizer, image processor and model card;
                 for CLIP's vision transformers, and SigLIP's models as SiglipModel.
  onnx:          a directory with both towers as ONNX graphs, tokenizer and preprocessing.
  lora:          what a run with adapters trained, without the weights that it froze: a small OUT.safetensors.

No network or account is needed.

  leanclip export logs/mine mine.safetensors
  leanclip export logs/mine between.safetensors --interpolate 0.5      (half way back to where fine-tuning started)
  leanclip export logs/mine/checkpoints/best mine-hf --format transformers
  leanclip export logs/mine mine-onnx --format onnx
  leanclip export logs/mine adapters.safetensors --format lora
  leanclip export start.pt mine.safetensors --model ViT-B-32 --lora adapters.safetensors
  leanclip export epoch_32.pt mine-hf --format transformers --model ViT-B-32
"""


@dataclass(frozen=True, kw_only=True)
class ExportCommand:
    checkpoint: str
    """A run (its last checkpoint), a checkpoint directory, an exported file, or any weights file with --model."""
    out: str
    """The file or directory to write."""
    format: Literal["open_clip", "transformers", "onnx", "lora"] = "open_clip"
    """open_clip: one file. transformers, onnx: a directory. lora: a file of adapters."""
    model: str | None = None
    """The architecture of a weights file: an open_clip model name, or a config file."""
    lora: str | None = None
    """Merge these adapters, which --format lora wrote, into CHECKPOINT: the weights that their run started from."""
    interpolate: float | None = setting(None, limits=between(0, 1))
    """Export (1 - W) times the weights that the run started from plus W times its own, W in [0, 1]."""
    start: str | None = None
    """With --interpolate: where it starts, given as for evaluate. Default: what the run started from."""
    overwrite: bool = False
    """Replace an existing OUT, and the .json beside it."""

    def __post_init__(self) -> None:
        check_limits(self)
        if self.start is not None and self.interpolate is None:
            raise ValueError("--start needs --interpolate")
        if self.format == "lora" and (self.lora is not None or self.interpolate is not None):
            raise ValueError("--format lora writes adapters as they are, without --lora and --interpolate")


def run(arguments: list[str]) -> None:
    command = parse(ExportCommand, arguments, command="export", description=DESCRIPTION)
    source, out = Path(command.checkpoint), Path(command.out)
    weights = _find_weights(source, command.model)
    _check_target(out, command)
    if command.format == "lora":
        _copy_adapters(weights, out)
        return
    if command.model is None:
        model = load_model(weights)
    else:
        model = create_model(ModelConfig(model=command.model, pretrained=str(weights)))
    if command.lora is not None:
        merge_adapters(model.clip, Path(command.lora))
    note = None
    if command.interpolate is not None:
        end = SavedModel(str(source), lambda: model, None if command.model else weights, "", "")
        between = interpolated(find_start(command.start, end), end, command.interpolate)
        note, model = f"Interpolated weights: {between.label}.", between.load()
    console = make_console()
    waiting = console.status("exporting and comparing") if console.is_terminal else contextlib.nullcontext()
    with waiting, writing(out, code="export.cannot_write"):
        if command.format == "open_clip":
            exported = export_open_clip(model, out, overwrite=command.overwrite)
        else:
            library = command.format
            write = {"transformers": export_transformers, "onnx": export_onnx}[library]
            exported = write(model, out, lambda: _card(model, source, out.name, note, library))
    for path in exported.files:
        console.print(f"wrote {path}")
    console.print(
        f"loaded again: embeddings equal to {exported.tolerance:g} (largest difference {exported.difference:.1g})\n"
    )
    console.print(exported.load)


def _copy_adapters(checkpoint: Path, out: Path) -> None:
    adapters = checkpoint / ADAPTER_FILE
    if out.suffix != ".safetensors":
        raise UserError(f"{out}: the name must end in .safetensors", code="export.bad_suffix")
    if not adapters.is_file():
        raise UserError(
            f"{checkpoint} has no adapters: its run had neither --lora-image nor --lora-text", code="lora.not_found"
        )
    with writing(out, code="export.cannot_write"):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, adapters.read_bytes())
    make_console().print(f"wrote {out}")


def _find_weights(source: Path, model: str | None) -> Path:
    """A weights file, or a checkpoint directory. Either records its architecture, or --model gives it."""
    if not source.exists():
        raise UserError(f"no such run, checkpoint or weights file: {source}", code="checkpoint.not_found")
    if not source.is_file() and model is not None:
        raise UserError(
            f"--model is for a weights file; {source} records its architecture", code="export.unexpected_model"
        )
    if source.is_file() and model is None and config_of_file(source) is None:
        raise UserError(
            f"{source} holds weights only; give their architecture with --model", code="export.missing_model"
        )
    return source if source.is_file() else find_weights_directory(source)


def _check_target(out: Path, command: ExportCommand) -> None:
    """Refuse to overwrite anything, or, with --overwrite, anything that is not an export of this format."""
    if not out.exists():
        return
    if not command.overwrite:
        raise UserError(f"{out} exists; give another name, or --overwrite", code="export.exists")
    if out.is_dir() != (command.format in ("transformers", "onnx")):
        raise UserError(
            f"--format {command.format} writes {'one file' if out.is_dir() else 'a directory'}, which cannot replace"
            f" {out}; give another name",
            code="export.exists",
        )
    is_model = any((out / name).is_file() for name in ("config.json", "image.onnx"))
    if out.is_dir() and any(out.iterdir()) and not is_model:
        raise UserError(
            f"{out} is not a model directory, so --overwrite does not replace it; give another name",
            code="export.exists",
        )


def _card(
    model: TwoTower, source: Path, name: str, note: str | None, library: Literal["transformers", "onnx"]
) -> str:
    """With a note, the weights are not those that the run evaluated."""
    run = RunDirectory.containing(source)
    size = model.preprocess.size
    facts: dict[str, Any] = {"name": name, "version": __version__} | ({} if run is None else run.facts())
    facts |= {
        "notes": [*(facts.get("notes") or ()), *([note] if note else ())],
        "model": Path(str(facts.get("model") or "unknown")).name.removesuffix(".json"),
        "parameters": sum(parameter.numel() for parameter in model.clip.parameters()),
        "architecture": {
            "Embedding size": model.config["embed_dim"],
            "Image size": size if isinstance(size, int) else " x ".join(str(side) for side in size),
            "Context length": model.config["text_cfg"].get("context_length", 77),
            "Temperature": f"{model.temperature():.4f}",
        },
    }
    return model_card(facts, {} if run is None or note else read_results(run.metrics), library=library)
