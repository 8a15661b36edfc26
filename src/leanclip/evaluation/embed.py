"""Embeddings of a held-out set."""

from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from leanclip.data import Subset, evaluation_batches, evaluation_transform
from leanclip.errors import UserError
from leanclip.models import TwoTower


class Embedded(NamedTuple):
    images: Tensor  # (N, D)
    texts: Tensor  # (M, D)
    image_of_text: Tensor  # (M,)
    captions: list[str]
    ids: list[int]  # of the images
    broken: int  # samples that could not be used


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
    images, texts, ids, captions, owner, broken = [], [], [], [], [], []
    transform = evaluation_transform(model.preprocess)
    dtype = _wide(next(model.parameters()).dtype)
    with autocast:
        for found in evaluation_batches(data.source, data.ids, transform, batch=batch, workers=workers):
            broken += found.broken
            if not found.ids:
                continue
            images.append(model.encode_image(found.images.to(device)).to(dtype))
            owner += [len(ids) + number for number, group in enumerate(found.captions) for _ in group]
            captions += [caption for group in found.captions for caption in group]
            ids += found.ids
        if not ids:
            raise UserError(f"none of the held-out samples can be used: {broken[0]}")
        for start in range(0, len(captions), batch):
            tokens = model.tokenizer(captions[start : start + batch]).to(device)
            texts.append(model.encode_text(tokens).to(dtype))
    model.train(was_training)
    return Embedded(
        torch.cat(images), torch.cat(texts), torch.tensor(owner, device=device), captions, ids, len(broken)
    )


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
