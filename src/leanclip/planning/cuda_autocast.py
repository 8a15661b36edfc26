"""CUDA's autocast on tensors that are not on a GPU.

A trace uses fake CPU tensors, because the autograd engine needs a real GPU for tensors on one. CPU and CUDA cast the
same products to 16 bits, but CUDA computes norms, exponentials and sums in float32 where CPUs do not, and attention
has fused kernels. The difference is registered on the CPU's autocast key during a trace, above autograd, where CUDA
has it.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

aten = torch.ops.aten
CUDNN_FIRST = ((9, 0), (10, 0))  # compute capabilities on which PyTorch prefers cuDNN's attention
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
# Cast to float32 by CUDA's autocast and not, or not under this name, by the CPU's.
WIDENED = (
    aten.layer_norm.default, aten.native_layer_norm.default, aten.group_norm.default, aten.rms_norm.default,
    aten.exp.default, aten.expm1.default, aten.log.default, aten.log1p.default, aten.reciprocal.default,
    aten.rsqrt.default, aten.softplus.default, aten.logsumexp.default, aten.cosine_similarity.default,
    aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.pow.Scalar,
)  # fmt: skip
# Summed in float32 without a copy of the input, where no dtype is given.
SUMMED = (
    aten.softmax.int, aten.log_softmax.int, aten.cumsum.default, aten.sum.default, aten.sum.dim_IntList,
    aten.linalg_vector_norm.default,
)  # fmt: skip


@contextlib.contextmanager
def cuda_autocast(capability: tuple[int, int]) -> Iterator[None]:
    """Inside, `torch.autocast("cpu", dtype)` decides as `torch.autocast("cuda", dtype)` does on such a GPU."""
    library = torch.library.Library("aten", "IMPL", "AutocastCPU")
    kernels: dict[Any, Callable[..., Any]] = {operation: _widened(operation) for operation in WIDENED}
    kernels |= {operation: _summed(operation) for operation in SUMMED}
    kernels[aten.scaled_dot_product_attention.default] = partial(_attention, capability in CUDNN_FIRST)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")  # what is overridden
            for operation, kernel in kernels.items():
                library.impl(operation, kernel, allow_override=True)
        yield
    finally:
        library._destroy()


def without_autocast() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(_AUTOCAST)


def _widened(operation: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with without_autocast():
            return operation(*tree_map(_to_float32, args), **tree_map(_to_float32, kwargs))

    return kernel


def _summed(operation: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with without_autocast():
            has_dtype = kwargs.get("dtype") is not None or any(isinstance(value, torch.dtype) for value in args)
            if not has_dtype and args[0].dtype in (torch.float16, torch.bfloat16):
                names = [argument.name for argument in operation._schema.arguments]
                at = names.index("dtype")
                args, kwargs = args[:at], kwargs | {"dtype": torch.float32}
            return operation(*args, **kwargs)

    return kernel


def _to_float32(value: Any) -> Any:
    narrow = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.to(torch.float32) if narrow else value


def _attention(
    cudnn: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The kernels that CUDA selects in 16 bits: cuDNN's, otherwise flash attention, or with a mask the
    memory-efficient one, whose output has a different layout, which the next layer copies."""
    dtype = torch.get_autocast_dtype("cpu")
    with without_autocast():
        query, key, value = (part.to(dtype) for part in (query, key, value))
        fits = query.shape[-1] <= 256 and query.shape[-1] % 8 == 0 and query.ndim == 4
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            attn_mask = attn_mask.to(dtype)
        if not fits:
            return aten.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if attn_mask is None and not cudnn:
            return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                attn_mask = torch.zeros_like(attn_mask, dtype=dtype).masked_fill_(~attn_mask, -torch.inf)
            attn_mask = attn_mask.expand(*query.shape[:2], query.shape[2], key.shape[2])
        kernel = aten._scaled_dot_product_cudnn_attention if cudnn else aten._scaled_dot_product_efficient_attention
        return kernel(query, key, value, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale)[0]
