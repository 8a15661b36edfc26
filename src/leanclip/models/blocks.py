"""open_clip's transformer blocks, run on tokens without padding and without the copies of nn.MultiheadAttention.

The blocks stay what they are, with their parameters under their names; they get a second way to run. In the last
block of a tower only the token that is read goes on after the attention: the others reach no embedding and get no
gradient.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from leanclip.models.kernel_barriers import mend_compiled_kernels
from leanclip.models.open_clip_api import CustomResidualAttentionBlock, ResidualAttentionBlock
from leanclip.ops.attention import Packing, packed_attention, row_attention

RECOMPILES = 64  # towers x last block or not x with gradient or not x sizes, of one function


class Block(nn.Module):
    """To be put before the class of one of open_clip's blocks."""

    compiled = False

    def forward(
        self, x: Tensor, *others: Any, packing: Packing | None = None, read: Any = None, **named: Any
    ) -> Tensor:
        """Our way where it is asked for by `read`, else open_clip's.

        x is (B, L, D), every token seeing all of its row, or (T, D) of packed causal sequences. `read` is what goes
        on after the attention: the number of a token in each row, the places of the tokens, or ... for all.
        """
        if read is None:
            return super().forward(x, *others, **named)
        return (compiled_block() if self.compiled and self.training else run_block)(self, x, packing, read)


class OwnBlock(Block, ResidualAttentionBlock):
    pass


class OwnCustomBlock(Block, CustomResidualAttentionBlock):
    pass


OWN_BLOCKS = {ResidualAttentionBlock: OwnBlock, CustomResidualAttentionBlock: OwnCustomBlock}


def adopt_blocks(transformer: Any) -> bool:
    """Make a transformer's blocks run by `run_block`; False if one is of a type that cannot."""
    blocks = list(transformer.resblocks)
    if not all(type(block) in OWN_BLOCKS and not hasattr(block, "ln_1_kv") for block in blocks):
        return False
    if any(getattr(block.attn, "logit_scale", None) is not None for block in blocks):
        return False  # cosine attention
    for block in blocks:
        block.__class__ = OWN_BLOCKS[type(block)]
    return True


def run_block(block: Any, x: Tensor, packing: Packing | None, read: Any) -> Tensor:
    mixed = attention(block.attn, block.ln_1(x), packing)
    if read is not ...:
        mixed, x = chosen(mixed, read), chosen(x, read)
    mixed = after_attention(block.attn, mixed)
    x = x + block.ls_1(getattr(block, "ln_attn", nn.Identity())(mixed))
    return x + block.ls_2(block.mlp(block.ln_2(x)))


def chosen(x: Tensor, read: int | Tensor) -> Tensor:
    return x[:, read] if isinstance(read, int) else x[read]


def attention(layer: Any, x: Tensor, packing: Packing | None) -> Tensor:
    """Self-attention up to the output projection, with the weights of nn.MultiheadAttention or of open_clip's own."""
    qkv = F.linear(x, layer.in_proj_weight, layer.in_proj_bias).unflatten(-1, (3, layer.num_heads, -1))
    norm: Any = getattr(layer, "ln_q", None)
    if norm is not None and not isinstance(norm, nn.Identity):
        q, k, v = qkv.unbind(-3)
        qkv = torch.stack([norm(q), layer.ln_k(k), v], -3)
    mixed = row_attention(qkv) if packing is None else packed_attention(qkv, packing)
    if getattr(layer, "head_scale", None) is not None:
        mixed = mixed * layer.head_scale.flatten(1)
    return mixed.flatten(-2)


def after_attention(layer: Any, mixed: Tensor) -> Tensor:
    if isinstance(layer, nn.MultiheadAttention):
        return layer.out_proj(mixed)
    return layer.out_drop(layer.out_proj(layer.ln_inner(mixed)))


def run_blocks(blocks: Any, x: Tensor, *, read: Any, packing: Packing | None = None, recomputed: int = 0) -> Tensor:
    """All blocks of a tower; after the last one only what is read. The first `recomputed` keep just their input."""
    for number, block in enumerate(blocks):
        kept = read if number == len(blocks) - 1 else ...
        if number < recomputed and torch.is_grad_enabled():
            # No block draws random numbers.
            again: Any = checkpoint(
                block, x, packing=packing, read=kept, use_reentrant=False, preserve_rng_state=False
            )
            x = again
        else:
            x = block(x, packing=packing, read=kept)
    return x


_compiled: dict[Callable[..., Any], Callable[..., Any]] = {}


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled form of a function, made once: all blocks of a tower share its code."""
    if function not in _compiled:
        mend_compiled_kernels()
        torch._dynamo.config.recompile_limit = max(RECOMPILES, torch._dynamo.config.recompile_limit)
        _compiled[function] = torch.compile(function)
    return _compiled[function]


def compiled_block() -> Callable[..., Any]:
    return compiled(run_block)
