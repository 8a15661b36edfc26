"""Embeddings of a held-out set."""

from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from leanclip.data import Subset, evaluation_images
from leanclip.models import TwoTower


class Embedded(NamedTuple):
    images: Tensor  # (N, D)
    texts: Tensor  # (M, D)
    image_of_text: Tensor  # (M,)
    captions: list[str]


@torch.no_grad()
def embed(
    model: TwoTower,
    data: Subset,
    *,
    device: torch.device,
    autocast: AbstractContextManager[object],
    batch: int = 256,
    workers: int = 0,
) -> Embedded:
    """Embed every image and every caption, as at inference. The model's mode is left as it was."""
    was_training = model.training
    model.eval()
    dtype = next(model.parameters()).dtype
    captions = [data.source.captions(int(index)) for index in data.ids]
    flat = [caption for group in captions for caption in group]
    owner = torch.tensor([number for number, group in enumerate(captions) for _ in group], device=device)
    with autocast:
        images = [
            model.encode_image(pixels.to(device, dtype)).to(_wide(dtype))
            for pixels in evaluation_images(
                data.source, data.ids, model.transform(train=False), batch=batch, workers=workers
            )
        ]
        texts = [
            model.encode_text(model.tokenizer(flat[start : start + batch]).to(device)).to(_wide(dtype))
            for start in range(0, len(flat), batch)
        ]
    model.train(was_training)
    return Embedded(torch.cat(images), torch.cat(texts), owner, flat)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
