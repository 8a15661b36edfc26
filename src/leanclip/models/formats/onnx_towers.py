"""Both towers as ONNX graphs, with what another program needs to use them. Only this module imports onnxruntime.

image.onnx       uint8 pixels (N, 3, H, W), RGB, to unit vectors (N, D): their normalisation is in the graph
text.onnx        int64 tokens (N, L) to unit vectors (N, D)
preprocess.json  how an image gets its size, how long a text is, scale and bias of the logits
tokenizer.json   and other files of transformers: texts to tokens, cut and padded to L
"""

import contextlib
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leanclip.errors import UserError, first_line
from leanclip.models import transformers_clip
from leanclip.models.two_tower import TwoTower

IMAGE, TEXT, PREPROCESS, TOKENIZER = "image.onnx", "text.onnx", "preprocess.json", "tokenizer.json"


class _ImageTower(nn.Module):
    mean: Tensor
    std: Tensor

    def __init__(self, model: TwoTower) -> None:
        super().__init__()
        self.clip = model.clip
        self.register_buffer("mean", model.image_mean)
        self.register_buffer("std", model.image_std)

    def forward(self, pixels: Tensor) -> Tensor:
        features = self.clip.encode_image((pixels.float() / 255 - self.mean) / self.std, normalize=False)
        return F.normalize(features, dim=-1)


class _TextTower(nn.Module):
    def __init__(self, model: TwoTower) -> None:
        super().__init__()
        self.clip = model.clip

    def forward(self, tokens: Tensor) -> Tensor:
        return F.normalize(self.clip.encode_text(tokens, normalize=False), dim=-1)


def save(directory: Path, model: TwoTower) -> None:
    """Write both graphs, the tokenizer and the preprocessing."""
    _runtime()
    length = int(model.config["text_cfg"].get("context_length", 77))
    _export(_ImageTower(model), pixels_of(model), directory / IMAGE, "pixels", "image")
    _export(_TextTower(model), model.tokenizer(["a cat", "two dogs"]), directory / TEXT, "tokens", "text")
    clean = model.config["text_cfg"].get("tokenizer_kwargs", {}).get("clean", "whitespace")
    with _quiet():
        has_tokenizer = transformers_clip.save_tokenizer(
            directory, model.tokenizer, length=length, clean=clean, pad=True
        )
    preprocess = asdict(model.preprocess) | {"size": list(pixels_of(model).shape[2:])}
    in_graph = {name: preprocess.pop(name) for name in ("mean", "std")}
    facts = {
        "image": preprocess | {"input": "uint8 RGB (N, 3, H, W)", "in_graph": in_graph},
        "text": {"context_length": length, "tokenizer": TOKENIZER if has_tokenizer else None},
        "embedding_size": model.config["embed_dim"],
        "logit_scale": 1 / model.temperature(),
        "logit_bias": model.bias(),
    }
    (directory / PREPROCESS).write_text(json.dumps(facts, indent=1) + "\n")


def load(directory: Path, model: TwoTower) -> tuple[Callable[[Tensor], Tensor], Callable[[list[str]], Tensor]]:
    """Both encoders, run by ONNX Runtime. Texts go through the tokenizer that was written, if there is one."""
    runtime = _runtime()

    def session(name: str) -> Any:
        return runtime.InferenceSession(str(directory / name), providers=["CPUExecutionProvider"])

    image, text = session(IMAGE), session(TEXT)
    tokenizer = None
    if (directory / TOKENIZER).is_file():
        tokenizer = transformers_clip.fast_tokenizer(directory / TOKENIZER)

    def tokens(texts: list[str]) -> Tensor:
        if tokenizer is None:
            return model.tokenizer(texts)
        return torch.tensor([encoded.ids for encoded in tokenizer.encode_batch(texts)])

    def run(graph: Any, name: str, rows: Tensor) -> Tensor:
        """In two batches of different sizes."""
        parts = [graph.run(None, {name: part.numpy()})[0] for part in (rows[:1], rows[1:])]
        return torch.cat([torch.from_numpy(part) for part in parts])

    return lambda pixels: run(image, "pixels", pixels), lambda texts: run(text, "tokens", tokens(texts))


def pixels_of(model: TwoTower, count: int = 2) -> Tensor:
    """Random pixels as the image tower takes them."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 3, *model.image_size), dtype=torch.uint8, generator=generator)


def _export(tower: nn.Module, example: Tensor, path: Path, name: str, side: str) -> None:
    shapes = ({0: torch.export.Dim("batch")},)
    try:
        with torch.no_grad(), _quiet():
            program = torch.onnx.export(
                tower.eval(), (example,), dynamo=True, dynamic_shapes=shapes, verbose=False,
                input_names=[name], output_names=[f"{side}_embedding"],
            )  # fmt: skip
            assert program is not None
            program.save(str(path))
    except ImportError as error:
        raise _not_installed() from error
    except (RuntimeError, ValueError, torch.onnx.errors.OnnxExporterError) as error:
        raise UserError(
            f"torch cannot write the {side} tower as ONNX ({first_line(error)}); use --format open_clip",
            code="export.unsupported_model",
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter warns of its own deprecated calls and of constants that it does not fold."""
    logger = logging.getLogger("onnxscript")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _runtime() -> Any:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401 - torch's exporter needs it
    except ImportError as error:
        raise _not_installed() from error
    return onnxruntime


def _not_installed() -> UserError:
    return UserError("ONNX is not installed: pip install 'leanclip[onnx]'", code="install.onnx")
