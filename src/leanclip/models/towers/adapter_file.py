"""Adapters in a file of their own: all that a run with adapters trained, without the weights that it froze.

Adapters change the matrices that they were trained with and no others, so the file holds a digest of these.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from leanclip.errors import UserError
from leanclip.models.towers.layers import side_of
from leanclip.models.towers.lora import A, B, adapted_matrix, is_adapter, merged
from leanclip.models.untrusted import check_weights

ADAPTER_FILE = "lora.safetensors"  # in a checkpoint
HEADER_KEY = "leanclip_lora"


def adapter_file(clip: Any, weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of the file: `weights`, a state dict of `clip`, without the frozen parameters."""
    frozen = {name for name, parameter in clip.named_parameters() if not parameter.requires_grad}
    kept = {name: value for name, value in weights.items() if name not in frozen or name.startswith("logit_")}
    return kept, {HEADER_KEY: _digest(weights, kept)}


def start_from_adapters(clip: Any, path: Path) -> None:
    """Load the file into a model with adapters of the same ranks."""
    weights = clip.state_dict()
    saved = _read(path, weights)
    if _adapter_shapes(saved) != _adapter_shapes(weights):
        ranks = {str(side_of(name)): shape[0] for name, shape in _adapter_shapes(saved).items() if name.endswith(A)}
        flags = " ".join(f"--lora-{side} {rank}" for side, rank in sorted(ranks.items()))
        raise UserError(f"{path} holds adapters of other ranks; give {flags} with it", code="lora.other_rank")
    clip.load_state_dict(weights | saved)


def merge_adapters(clip: Any, path: Path) -> None:
    """Load the file into a model without adapters."""
    weights = clip.state_dict()
    clip.load_state_dict(merged(weights | _read(path, weights)))


def _read(path: Path, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The content of the file, if it belongs to these weights."""
    if not path.is_file():
        raise UserError(f"no such file of adapters: {path}", code="lora.not_found")
    check_weights(path)
    header: str | None = None
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            header = (file.metadata() or {}).get(HEADER_KEY)
    if header is None:
        raise UserError(
            f"{path} holds no adapters; leanclip export --format lora writes such a file", code="lora.not_adapters"
        )
    saved = load_file(path)
    shapes = {name: tuple(value.shape) for name, value in weights.items() if not is_adapter(name)}
    plain = {name: tuple(value.shape) for name, value in saved.items() if not is_adapter(name)}
    fits = plain.items() <= shapes.items() and _fit(_adapter_shapes(saved), shapes)
    if not fits or _digest(weights, saved) != header:
        raise UserError(
            f"the adapters of {path} were trained with other weights; give those that their run started from",
            code="lora.other_weights",
        )
    return saved


def _adapter_shapes(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in weights.items() if is_adapter(name)}


def _fit(adapters: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether every A has its B, and both a matrix of their size."""
    expected: dict[str, tuple[int, ...]] = {}
    for name, shape in adapters.items():
        matrix = adapted_matrix(name, shapes)
        if matrix is None or len(shapes[matrix]) != 2 or not shape:
            return False
        if name.endswith(f".{A}"):
            rows, columns = shapes[matrix]
            expected |= {name: (shape[0], columns), name.removesuffix(A) + B: (rows, shape[0])}
    return expected == adapters


def _digest(weights: Mapping[str, Tensor], adapters: Mapping[str, Tensor]) -> str:
    """Of the first row of every matrix with adapters: other weights differ there."""
    digest = hashlib.sha256()
    for name in sorted(name for name in adapters if name.endswith(f".{A}")):
        matrix = adapted_matrix(name, weights)
        assert matrix is not None
        digest.update(weights[matrix][0].detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()
