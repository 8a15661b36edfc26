"""open_clip's vision transformers and causal text towers, run block by block on the tokens that are needed."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leanclip.models.blocks import compiled, run_blocks
from leanclip.models.text_length import Texts


def embed_images(visual: Any, images: Tensor, mean: Tensor, std: Tensor, *, recomputed: int, compile: bool) -> Tensor:
    """Equal to `visual(images)`, for uint8 pixels or normalised images."""
    keep = kept_patches(visual, images)
    prepare = compiled(patch_tokens) if compile and visual.training else patch_tokens
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
