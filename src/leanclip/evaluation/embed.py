"""Embeddings of a held-out set."""

from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from leanclip.data import Subset, evaluation_images
from leanclip.distributed import Ranks
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
    """Embed every image and every caption, as at inference. The model's mode is left as it was.

    Several ranks share the work and all get the result. Each takes equally many, the last ones some twice, because
    FSDP wants as many forward passes from everybody.
    """
    ranks = Ranks.current()
    was_training = model.training
    model.eval()
    dtype = next(model.parameters()).dtype
    captions = [data.source.captions(int(index)) for index in data.ids]
    flat = [caption for group in captions for caption in group]
    owner = torch.tensor([number for number, group in enumerate(captions) for _ in group], device=device)
    own_images = data.ids[_equal_share(ranks, len(data.ids))]
    own_texts = [flat[row] for row in _equal_share(ranks, len(flat))]
    with autocast:
        images = [
            model.encode_image(pixels.to(device, dtype)).to(_wide(dtype))
            for pixels in evaluation_images(
                data.source, own_images, model.transform(train=False), batch=batch, workers=workers
            )
        ]
        texts = [
            model.encode_text(model.tokenizer(own_texts[start : start + batch]).to(device)).to(_wide(dtype))
            for start in range(0, len(own_texts), batch)
        ]
    model.train(was_training)
    return Embedded(_everybodys(ranks, images, len(data.ids)), _everybodys(ranks, texts, len(flat)), owner, flat)


def _equal_share(ranks: Ranks, count: int) -> np.ndarray:
    width = ranks.largest_share(count)
    return np.minimum(np.arange(ranks.rank * width, (ranks.rank + 1) * width), count - 1)


def _everybodys(ranks: Ranks, parts: list[Tensor], count: int) -> Tensor:
    own = torch.cat(parts)
    return ranks.gather(own, len(own) * ranks.size, purpose="evaluation")[:count]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
