"""open_clip's vision transformers and causal text towers, run block by block on the tokens that are needed: without
padding, and without the copies of nn.MultiheadAttention.

The blocks keep their parameters and names and get a second forward pass. In the last block of a tower only the pooled
token is computed after the attention: the others reach no embedding and get no gradient.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from leanclip.models.kernel_barriers import add_kernel_barriers
from leanclip.models.open_clip_api import CustomResidualAttentionBlock, ResidualAttentionBlock
from leanclip.models.text_length import Texts
from leanclip.models.towers.lora import in_projection
from leanclip.ops.attention import Packing, packed_attention, row_attention

RECOMPILES = 64  # of one function: towers x last block or not x with gradient or not x sizes


class Block(nn.Module):
    """A mix-in before the class of one of open_clip's blocks."""

    compiled = False

    def forward(
        self, x: Tensor, *others: Any, packing: Packing | None = None, read: Any = None, **named: Any
    ) -> Tensor:
        """`run_block` if `read` is given, else open_clip's forward pass.

        x is (B, L, D), full attention within each row, or (T, D) of packed causal sequences. `read` selects the
        tokens that are computed after the attention: one position in each row, a tensor of positions, or ... for all.
        """
        if read is None:
            return super().forward(x, *others, **named)
        return (compiled(run_block) if self.compiled and self.training else run_block)(self, x, packing, read)


OWN_BLOCKS = {
    theirs: type(f"Own{theirs.__name__}", (Block, theirs), {})
    for theirs in (ResidualAttentionBlock, CustomResidualAttentionBlock)
}


def adopt_blocks(transformer: Any) -> bool:
    """Give a transformer's blocks the second forward pass; False if one is of a type that has none."""
    blocks = list(transformer.resblocks)
    cosine_attention = any(getattr(block.attn, "logit_scale", None) is not None for block in blocks)
    if cosine_attention or any(type(block) not in OWN_BLOCKS or hasattr(block, "ln_1_kv") for block in blocks):
        return False
    for block in blocks:
        block.__class__ = OWN_BLOCKS[type(block)]
    return True


def run_block(block: Any, x: Tensor, packing: Packing | None, read: Any) -> Tensor:
    mixed = attention(block.attn, block.ln_1(x), packing)
    if read is not ...:
        mixed, x = select(mixed, read), select(x, read)
    mixed = after_attention(block.attn, mixed)
    x = x + block.ls_1(getattr(block, "ln_attn", nn.Identity())(mixed))
    return x + block.ls_2(block.mlp(block.ln_2(x)))


def select(x: Tensor, read: int | Tensor) -> Tensor:
    return x[:, read] if isinstance(read, int) else x[read]


def attention(layer: Any, x: Tensor, packing: Packing | None) -> Tensor:
    """Self-attention up to the output projection, with the weights of nn.MultiheadAttention or of open_clip's own."""
    qkv = in_projection(layer, x).unflatten(-1, (3, layer.num_heads, -1))
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
    """All blocks of a tower; `read` applies to the last. The first `recomputed` blocks keep only their input."""
    for number, block in enumerate(blocks):
        options: dict[str, Any] = {"packing": packing, "read": read if number == len(blocks) - 1 else ...}
        if number < recomputed and torch.is_grad_enabled():
            options |= {"use_reentrant": False, "preserve_rng_state": False}  # no block draws random numbers
            recomputable: Any = checkpoint(block, x, **options)
            x = recomputable
        else:
            x = block(x, **options)
    return x


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled form of a function, made once: all blocks of a tower share its code."""
    add_kernel_barriers()
    torch._dynamo.config.recompile_limit = max(RECOMPILES, torch._dynamo.config.recompile_limit)
    return torch.compile(function)


def embed_images(visual: Any, images: Tensor, mean: Tensor, std: Tensor, *, recomputed: int, compile: bool) -> Tensor:
    """Equal to `visual(images)`, for uint8 pixels or normalised images."""
    keep = kept_patches(visual, images)
    prepare = patch_tokens
    if compile and visual.training:
        prepare = compiled(patch_tokens)
        for side in (2, 3):  # compiled for each size: torch 2.11 fails at a second size, which it makes dynamic
            torch._dynamo.mark_static(images, side)
    x = prepare(visual, images, mean, std, keep)
    read_first = visual.pool_type == "tok"
    x = run_blocks(visual.transformer.resblocks, x, read=0 if read_first else ..., recomputed=recomputed)
    pooled = visual.ln_post(x) if read_first else visual._pool(x)[0]
    return pooled if visual.proj is None else pooled @ visual.proj


def kept_patches(visual: Any, images: Tensor) -> Tensor | None:
    """The patches that patch dropout keeps, drawn on the device; None for all."""
    if not visual.training or not getattr(visual.patch_dropout, "prob", 0.0):
        return None
    high, wide = (size // patch for size, patch in zip(images.shape[2:], visual.conv1.kernel_size, strict=True))
    draw = torch.randn(len(images), high * wide, device=images.device)
    return draw.topk(number_kept(visual, high * wide), dim=-1).indices


def number_kept(visual: Any, patches: int) -> int:
    return max(1, int(patches * (1 - getattr(visual.patch_dropout, "prob", 0.0))))


def patch_tokens(visual: Any, images: Tensor, mean: Tensor, std: Tensor, keep: Tensor | None) -> Tensor:
    """Pixels to the tokens of the first block. A convolution whose patches do not overlap is a matrix product."""
    weight = visual.conv1.weight
    (batch, colours, height, width), (high, wide) = images.shape, visual.conv1.kernel_size
    rows, columns = height // high, width // wide
    pixels = normalised(images, mean, std, weight.dtype)[:, :, : rows * high, : columns * wide]
    patches = pixels.reshape(batch, colours, rows, high, columns, wide).permute(0, 2, 4, 1, 3, 5)
    patches = patches.reshape(batch, rows * columns, -1)
    first, positions = visual.positional_embedding[:1], visual.positional_embedding[1:]
    if keep is not None:
        patches = patches.gather(1, keep[..., None].expand(-1, -1, patches.shape[-1]))
        positions = positions[keep]
    x = F.linear(patches, weight.flatten(1))
    start = (visual.class_embedding.to(x.dtype) + first.to(x.dtype)).expand(batch, 1, -1)
    return visual.ln_pre(torch.cat([start, x + positions.to(x.dtype)], 1))


def normalised(images: Tensor, mean: Tensor, std: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 pixels as input of an image tower of this precision; float images are returned unchanged."""
    if images.dtype != torch.uint8:
        return images
    wide = torch.promote_types(dtype, torch.float32)
    return images.to(wide).div(255).sub(mean.to(wide)).div(std.to(wide)).to(dtype)


def embed_texts(tower: Any, texts: Texts, *, recomputed: int) -> Tensor:
    """The output of the text tower for padded texts, computed at their true length."""
    dtype = tower.transformer.get_cast_dtype()
    x = tower.token_embedding(texts.tokens).to(dtype)
    x = x + F.embedding(texts.packing.positions, tower.positional_embedding).to(dtype)
    blocks = tower.transformer.resblocks
    x = run_blocks(blocks, x, packing=texts.packing, read=texts.ends, recomputed=recomputed)
    pooled, projection = tower.ln_final(x), tower.text_projection
    if projection is None:
        return pooled
    return projection(pooled) if isinstance(projection, nn.Linear) else pooled @ projection
