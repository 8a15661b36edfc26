"""Embeddings of a held-out set."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from leanclip.data import Subset, evaluation_batches, evaluation_transform
from leanclip.data.loader import EvaluationBatch
from leanclip.distributed import Ranks
from leanclip.errors import UserError
from leanclip.models import TwoTower
from leanclip.progress import ACTIVITY


class Embedded(NamedTuple):
    images: Tensor  # (N, D)
    texts: Tensor  # (M, D)
    image_of_text: Tensor  # (M,)
    captions: list[str]
    ids: list[int]  # of the images
    broken: int  # samples that could not be used

    def shared_captions(self, name: str) -> str | None:
        """A note where captions belong to several images: the others' count as wrong, and tie with the right one."""
        owners: dict[str, set[int]] = {}
        for caption, owner in zip(self.captions, self.image_of_text.tolist(), strict=True):
            owners.setdefault(caption, set()).add(owner)
        shared = sum(len(owners[caption]) > 1 for caption in self.captions)
        if not shared:
            return None
        return (
            f"{shared:,} of {len(self.captions):,} captions of {name} belong to more than one image, of which one"
            " counts as right: recall cannot be high, image-to-text least of all; for classes use --zero-shot"
        )


@torch.no_grad()
def embed(
    model: TwoTower,
    data: Subset,
    *,
    device: torch.device,
    autocast: AbstractContextManager[object],
    batch: int = 256,
    workers: int = 0,
    advance: Callable[[int], None] = lambda _: None,
) -> Embedded:
    """Embed every image and every caption, as at inference. The model's mode is left as it was.

    Several ranks share the work and all get the result. Each takes equally many, the last ones some twice, because
    FSDP wants as many forward passes from everybody. `advance` is told how many images are done.
    """
    ranks = Ranks.current()
    was_training = model.training
    model.eval()
    transform = evaluation_transform(model.preprocess)
    own_ids = data.ids[equal_share(ranks, len(data.ids))]
    embedded, own = [], _Found([], [], [])
    with autocast:
        for found in evaluation_batches(data.source, own_ids, transform, batch=batch, workers=workers):
            own.ids.extend(found.ids)
            own.captions.extend(found.captions)
            own.broken.extend(str(error) for error in found.broken)
            embedded.append(embed_images(model, found, device))
            ACTIVITY.still_working()
            advance((len(found.ids) + len(found.broken)) * ranks.size)
        everyones = ranks.all_gather_objects(own)
        ids, rows = _once_each(everyones, width=len(own_ids))
        captions = dict(
            zip([i for f in everyones for i in f.ids], [c for f in everyones for c in f.captions], strict=True)
        )
        if not ids:
            raise UserError(f"none of the held-out samples can be used: {everyones[0].broken[0]}")
        images = _everybodys(ranks, torch.cat(embedded), width=len(own_ids))[torch.tensor(rows, device=device)]
        flat = [caption for index in ids for caption in captions[index]]
        texts = embed_texts(model, flat, device=device, batch=batch)
    model.train(was_training)
    owner = torch.tensor([number for number, index in enumerate(ids) for _ in captions[index]], device=device)
    return Embedded(images, texts, owner, flat, ids, len(data.ids) - len(ids))


def embed_images(model: TwoTower, found: EvaluationBatch, device: torch.device) -> Tensor:
    """The embeddings of a batch's good images. One without any still takes part, with a blank one."""
    pixels = found.images if found.ids else torch.zeros(1, *_blank(model), dtype=torch.uint8)
    return model.encode_image(pixels.to(device)).to(wide_dtype(model))[: len(found.ids)]


def embed_texts(
    model: TwoTower,
    texts: Sequence[str],
    *,
    device: torch.device,
    batch: int = 256,
    advance: Callable[[int], None] = lambda _: None,
) -> Tensor:
    """The embedding of every text, each distinct one computed once: equal texts tie exactly."""
    ranks = Ranks.current()
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    distinct = list(numbers)
    own = [distinct[row] for row in equal_share(ranks, len(distinct))]
    embedded = []
    for start in range(0, len(own), batch):
        tokens = model.tokenizer(own[start : start + batch])  # the model takes them to the device
        embedded.append(model.encode_text(tokens).to(wide_dtype(model)))
        ACTIVITY.still_working()
        advance(len(tokens) * ranks.size)
    everyones = _everybodys(ranks, torch.cat(embedded), width=len(own))
    return everyones[torch.tensor([numbers[text] for text in texts], device=device)]


class _Found(NamedTuple):
    """What one rank found in its share of a held-out set."""

    ids: list[int]
    captions: list[list[str]]
    broken: list[str]


def equal_share(ranks: Ranks, count: int) -> np.ndarray:
    """This rank's part of 0 to count - 1, as long as everybody's: the last number comes more than once if need be."""
    width = ranks.largest_share(count)
    return np.minimum(np.arange(ranks.rank * width, (ranks.rank + 1) * width), count - 1)


def _once_each(everyones: list[_Found], *, width: int) -> tuple[list[int], list[int]]:
    """The ids that were found, and where each one's embedding stands among everybody's."""
    places = {}
    for rank, found in enumerate(everyones):
        for number, index in enumerate(found.ids):
            places.setdefault(index, rank * width + number)
    return list(places), list(places.values())


def _everybodys(ranks: Ranks, own: Tensor, *, width: int) -> Tensor:
    padded = own.new_zeros(width, *own.shape[1:])
    padded[: len(own)] = own
    return ranks.gather(padded, width * ranks.size, purpose="evaluation")


def _blank(model: TwoTower) -> tuple[int, int, int]:
    size = model.preprocess.size
    return (3, size, size) if isinstance(size, int) else (3, *size)


def wide_dtype(model: TwoTower) -> torch.dtype:
    """What embeddings are kept and compared in."""
    return torch.float64 if next(model.parameters()).dtype == torch.float64 else torch.float32
