"""Low-rank adapters (LoRA): a layer with a frozen matrix W computes W x + B (A x), and A and B are trained.

A has `rank` rows and B as many columns; B starts at zero, so that training starts at the model as it is. The layers
keep their parameters and names, and get a second forward pass. Nothing of the size of W is made in training.

A file of adapters has all that a run with adapters trained, without the weights that it froze. Adapters change the
matrices that they were trained with and no others, so the file holds a digest of these.
"""

import hashlib
import math
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from leanclip.errors import UserError
from leanclip.models.open_clip_api import Attention, TimmMlp, header_of
from leanclip.models.towers.layers import BLOCK, Side, lock, side_of
from leanclip.models.untrusted import check_weights

Activation = Callable[[Tensor], Tensor]
A, B = "lora_a", "lora_b"
ADAPTER_FILE = "lora.safetensors"  # in a checkpoint
HEADER_KEY = "leanclip_lora"
MATRICES = ("weight", "in_proj_weight")  # of linear layers; of query, key and value in one


class LowRankLinear(torch.autograd.Function):
    """F.linear(x, W + B A, bias) of x = activation(z), with gradients for z, A and B.

    Under autocast, F.linear would keep a copy of each frozen W in half precision until the backward pass; here that
    pass converts W again. It also computes x again, so that only z is kept. Small products are added to large ones in
    place.
    """

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, activation: Activation | None
    ) -> Tensor:
        kind = z.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else z.dtype
        ctx.activation, ctx.dtype = activation, z.dtype
        x = (z if activation is None else activation(z)).to(dtype)
        y = F.linear(x, weight.to(dtype), None if bias is None else bias.to(dtype))
        low = F.linear(x, a.to(dtype))
        y.flatten(0, -2).addmm_(low.flatten(0, -2), b.to(dtype).t())
        ctx.save_for_backward(x if activation is None else z, weight, a, b, low)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        z, weight, a, b, low = ctx.saved_tensors
        x = z
        if ctx.activation is not None:
            with torch.enable_grad():
                z = z.detach().requires_grad_()
                x = ctx.activation(z).to(gradient.dtype)
        inputs, flat, dtype, of_z = x.detach().flatten(0, -2), gradient.flatten(0, -2), gradient.dtype, None
        of_low = flat @ b.to(dtype)
        if ctx.needs_input_grad[0]:
            of_z = (flat @ weight.to(dtype)).addmm_(of_low, a.to(dtype)).view(x.shape)
            of_z = of_z.to(ctx.dtype) if ctx.activation is None else torch.autograd.grad(x, z, of_z)[0]
        of_a, of_b = of_low.t() @ inputs, flat.t() @ low.flatten(0, -2)
        return of_z, None, None, of_a.to(a.dtype), of_b.to(b.dtype), None


class Adapted(nn.Module):
    """A mix-in before the class of a layer that has a matrix."""

    matrix, offset = "weight", "bias"

    def project(self, x: Tensor, activation: Activation | None = None) -> Tensor:
        layer: Any = self
        weight, bias = getattr(layer, self.matrix), getattr(layer, self.offset)
        y: Any = LowRankLinear.apply(x, weight, bias, layer.lora_a, layer.lora_b, activation)
        return y


class Linear(Adapted):
    def forward(self, x: Tensor) -> Tensor:
        return self.project(x)


class Mlp(nn.Module):
    """Two linear layers with adapters and an activation between them, whose output is not kept."""

    def forward(self, x: Tensor) -> Tensor:
        first, activation, second = _parts(self)
        if torch.compiler.is_compiling():  # a compiler decides itself what it keeps
            return second(activation(first(x)))
        return second.project(first(x), activation)


def _parts(mlp: nn.Module) -> list[Any]:
    """The layers of an MLP that do something, in their order."""
    return [layer for layer in mlp.children() if not isinstance(layer, nn.Identity) and getattr(layer, "p", 1)]


def _is_mlp(parts: list[Any]) -> bool:
    if [isinstance(part, Linear) for part in parts] != [True, False, True]:
        return False
    return not list(parts[1].parameters()) and not getattr(parts[1], "inplace", False)


class Fused(Adapted):
    """Attention with one matrix for query, key and value: they share A, and each has its rows of B.

    Our pass through open_clip's blocks calls `in_projection`; open_clip's own pass calls `forward`.
    """

    matrix, offset = "in_proj_weight", "in_proj_bias"

    def attend(self, x: Tensor, attn_mask: Tensor | None) -> Tensor:
        """The heads, (B, heads, L, D / heads), of tokens (B, L, D)."""
        layer: Any = self
        q, k, v = self.project(x).unflatten(-1, (3, layer.num_heads, -1)).permute(2, 0, 3, 1, 4)
        if hasattr(layer, "ln_q"):
            q, k = layer.ln_q(q), layer.ln_k(k)
        if attn_mask is not None:  # (L, L), or (B heads, L, L)
            attn_mask = (attn_mask.unflatten(0, (len(x), -1)) if attn_mask.ndim == 3 else attn_mask).to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)


class TorchAttention(Fused):
    """nn.MultiheadAttention, as open_clip calls it."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, need_weights: bool, attn_mask: Tensor | None
    ) -> tuple[Tensor, None]:
        assert query is key and query is value and not need_weights
        layer: Any = self
        heads = self.attend(query if layer.batch_first else query.transpose(0, 1), attn_mask)
        y = layer.out_proj(heads.transpose(1, 2).flatten(-2))
        return (y if layer.batch_first else y.transpose(0, 1)), None


class OpenClipAttention(Fused):
    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        layer: Any = self
        heads = self.attend(x, attn_mask)
        if layer.head_scale is not None:
            heads = heads * layer.head_scale
        return layer.out_drop(layer.out_proj(layer.ln_inner(heads.transpose(1, 2).flatten(-2))))


ADAPTED: dict[type[nn.Module], Any] = {
    theirs: type(f"Adapted{theirs.__name__}", (mixin, theirs), {})
    for theirs, mixin in (
        (nn.Linear, Linear),
        (NonDynamicallyQuantizableLinear, Linear),
        (nn.MultiheadAttention, TorchAttention),
        (Attention, OpenClipAttention),
    )
}


MLPS: dict[type[nn.Module], Any] = {
    theirs: type(f"Adapted{theirs.__name__}", (Mlp, theirs), {}) for theirs in (nn.Sequential, TimmMlp)
}


def in_projection(layer: Any, x: Tensor) -> Tensor:
    """Query, key and value, (..., 3 D), of attention with one matrix for the three."""
    if isinstance(layer, Adapted):
        return layer.project(x)
    return F.linear(x, layer.in_proj_weight, layer.in_proj_bias)


def add_adapters(clip: Any, side: Side, rank: int) -> None:
    """Freeze the trunk of a tower, and give adapters to the projections of attention and MLP in its blocks."""
    layers = list(_layers(clip, side))
    if not layers:
        raise UserError(
            f"--lora-{side} {rank}: the {side} tower has no linear layer in its blocks, as transformers have, so it"
            " cannot carry adapters; leave the flag out",
            code="lora.no_layers",
        )
    largest = min(min(matrix.shape) for _, matrix in layers)
    if rank > largest:
        raise UserError(
            f"--lora-{side} {rank}: the matrices of the {side} tower have rank {largest}; give at most that, and less"
            " to save memory",
            code="lora.rank_too_large",
        )
    lock(clip, side, 0)
    for module in clip.modules():
        if hasattr(module, "qkv_bias_separate"):  # of timm: else it reads the layer's matrix and does not call it
            module.qkv_bias_separate = True
    for layer, matrix in layers:
        layer.__class__ = ADAPTED[type(layer)]
        rows, columns = matrix.shape
        low = nn.Parameter(matrix.new_empty(rank, columns))
        nn.init.kaiming_uniform_(low, a=math.sqrt(5))  # as torch starts a linear layer
        layer.register_parameter(A, low)
        layer.register_parameter(B, nn.Parameter(matrix.new_zeros(rows, rank)))
    for module in clip.modules():
        if type(module) in MLPS and _is_mlp(_parts(module)):
            module.__class__ = MLPS[type(module)]


def _layers(clip: Any, side: Side) -> Iterator[tuple[nn.Module, Tensor]]:
    """The layers that can carry adapters, with their matrices."""
    for name, module in clip.named_modules():
        if type(module) in ADAPTED and side_of(name) == side and BLOCK.search(f"{name}."):
            matrix = next((m for kind in MATRICES if (m := getattr(module, kind, None)) is not None), None)
            if matrix is not None:  # attention whose inputs differ in size has three
                yield module, matrix.detach()


def is_adapter(name: str) -> bool:
    """Whether a parameter or an entry of a state dict belongs to an adapter."""
    return name.endswith((f".{A}", f".{B}"))


def adapted_matrix(name: str, weights: Container[str]) -> str | None:
    """The name of the matrix that the adapter `name` belongs to."""
    layer = name.rpartition(".")[0]
    return next((f"{layer}.{kind}" for kind in MATRICES if f"{layer}.{kind}" in weights), None)


def merged(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Plain weights that compute what weights with adapters do."""
    plain = {name: value for name, value in weights.items() if not is_adapter(name)}
    for name in (name for name in weights if name.endswith(f".{A}")):
        matrix = adapted_matrix(name, plain)
        assert matrix is not None
        plain[matrix] = torch.addmm(plain[matrix], weights[name.removesuffix(A) + B], weights[name])
    return plain


def adapter_file(clip: Any, weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of the file: `weights`, a state dict of `clip`, without the frozen parameters."""
    frozen = {name for name, parameter in clip.named_parameters() if not parameter.requires_grad}
    kept = {name: value for name, value in weights.items() if name not in frozen or name.startswith("logit_")}
    return kept, {HEADER_KEY: _digest(weights, kept)}


def start_from_adapters(clip: Any, path: Path) -> None:
    """Load the file into a model with adapters of the same ranks."""
    weights = clip.state_dict()
    saved = _read_adapters(path, weights)
    if _adapter_shapes(saved) != _adapter_shapes(weights):
        ranks = {str(side_of(name)): shape[0] for name, shape in _adapter_shapes(saved).items() if name.endswith(A)}
        flags = " ".join(f"--lora-{side} {rank}" for side, rank in sorted(ranks.items()))
        raise UserError(f"{path} holds adapters of other ranks; give {flags} with it", code="lora.other_rank")
    clip.load_state_dict(weights | saved)


def merge_adapters(clip: Any, path: Path) -> None:
    """Load the file into a model without adapters."""
    weights = clip.state_dict()
    clip.load_state_dict(merged(weights | _read_adapters(path, weights)))


def _read_adapters(path: Path, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The content of the file, if it belongs to these weights."""
    if not path.is_file():
        raise UserError(f"no such file of adapters: {path}", code="lora.not_found")
    check_weights(path)
    header = header_of(path, HEADER_KEY) if path.suffix == ".safetensors" else None
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
