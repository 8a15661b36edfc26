"""Embeddings of held-out images and captions. Ranks share the work, and all get the result."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from leanclip.data import EvaluationTransform, Source, Subset, evaluation_batches
from leanclip.data.feature_table import NO_FEATURES, Features, FeatureTable
from leanclip.data.loader import EvaluationBatch
from leanclip.distributed import Ranks
from leanclip.errors import UserError
from leanclip.models import TwoTower
from leanclip.progress import ACTIVITY, progress_bar

NEGLIGIBLE = 0.01  # of recall@1 that shared captions may take without a warning
MANY_SAMPLES = 2000  # decoded in a few seconds; for more it pays to start processes


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """How a model is run on evaluation data; nothing that changes the results beyond rounding."""

    device: torch.device
    autocast: AbstractContextManager[object] = field(default_factory=nullcontext)
    batch: int = 256
    workers: int = 0  # processes that decode images, for sets with many samples
    progress: bool = False  # show progress bars


class Embedded(NamedTuple):
    images: Tensor  # (N, D)
    texts: Tensor  # (M, D)
    image_of_text: Tensor  # (M,)
    captions: list[str]
    ids: list[int]  # of the images
    broken: int  # samples that could not be used

    def shared_captions(self, name: str) -> str | None:
        """A warning if captions that several images share keep recall@1 of a perfect model below 99%."""
        images_of: defaultdict[str, Counter[int]] = defaultdict(Counter)
        for caption, image in zip(self.captions, self.image_of_text.tolist(), strict=True):
            images_of[caption][image] += 1
        # A shared caption ranks the images in one order for all its copies. For an image, its copies at other images
        # tie with its own, and a tie counts as wrong.
        ties = dict.fromkeys(range(len(self.images)), len(self.captions))  # with the best caption of each image
        for counts in images_of.values():
            for image, count in counts.items():
                ties[image] = min(ties[image], counts.total() - count)

        def bounds(k: int) -> tuple[float, float]:
            right = sum(count for counts in images_of.values() for _, count in counts.most_common(k))
            return right / len(self.captions), sum(tie < k for tie in ties.values()) / len(ties)

        if min(bounds(1)) >= 1 - NEGLIGIBLE:
            return None
        shared = sum(counts.total() for counts in images_of.values() if len(counts) > 1)
        limits = [
            f"recall@{k} at most {bounds(k)[0]:.1%} text-to-image, {bounds(k)[1]:.1%} image-to-text" for k in (1, 10)
        ]
        return (
            f"{shared:,} of {len(self.captions):,} captions of {name} belong to more than one image, of which one"
            f" counts as right, so that even a perfect model has {'; '.join(limits)}; for classes use --zero-shot"
        )


def embed(
    model: TwoTower,
    data: Subset,
    settings: EvaluationSettings,
    *,
    name: str = "held-out data",
    features: Features = NO_FEATURES,
) -> Embedded:
    """All images and captions. `features` of locked towers are read instead of running these."""
    ranks = Ranks.current()
    local_ids = data.ids[equal_share(ranks, len(data.ids))]
    ids, local_captions, broken, embeddings = [], [], [], []
    with inference(model, settings):
        for batch, images in embedded_batches(model, data.source, local_ids, settings, name, features.images):
            ids += batch.ids
            local_captions += batch.captions
            broken += [str(error) for error in batch.broken]
            embeddings.append(images)
        shares = ranks.all_gather_objects((ids, local_captions, broken))
        rows: dict[int, int] = {}  # of each id in the gathered embeddings
        captions: dict[int, list[str]] = {}
        for rank, (shared_ids, shared_captions, _) in enumerate(shares):
            for number, index in enumerate(shared_ids):
                rows.setdefault(index, rank * len(local_ids) + number)
                captions[index] = shared_captions[number]
        if not rows:
            raise UserError(
                f"none of the samples of {name} can be used: {shares[0][2][0]}", code="data.no_usable_samples"
            )
        images = _gather(ranks, torch.cat(embeddings), width=len(local_ids))
        images = images[torch.tensor(list(rows.values()), device=settings.device)]
        flat = [caption for index in rows for caption in captions[index]]
        stored = None if features.texts is None else _stored_texts(features.texts, captions)
        texts = embed_texts(model, flat, settings, title=f"{name}: captions", stored=stored)
    image_of_text = [number for number, index in enumerate(rows) for _ in captions[index]]
    image_of_text = torch.tensor(image_of_text, device=settings.device)
    return Embedded(images, texts, image_of_text, flat, list(rows), len(data.ids) - len(rows))


@contextmanager
def inference(model: TwoTower, settings: EvaluationSettings) -> Iterator[None]:
    """Evaluation mode without gradients; the model's mode is restored."""
    was_training = model.training
    model.eval()
    with torch.no_grad(), settings.autocast:
        yield
    model.train(was_training)


def embedded_batches(
    model: TwoTower,
    source: Source,
    ids: np.ndarray,
    settings: EvaluationSettings,
    title: str,
    features: FeatureTable | None = None,
) -> Iterator[tuple[EvaluationBatch, Tensor]]:
    """Batches with the embeddings of their images, of this rank's ids."""
    ranks, transform = Ranks.current(), EvaluationTransform(model.preprocess)
    workers = settings.workers if len(ids) * ranks.size > MANY_SAMPLES and features is None else 0
    with progress_bar(title, len(ids) * ranks.size, shown=settings.progress) as advance:
        for batch in evaluation_batches(
            source, ids, transform, batch=settings.batch, workers=workers, features=features
        ):
            # FSDP needs the same forward passes on every rank: without a usable image, run a blank one.
            blank = (1, 3, *model.image_size) if features is None else (1, features.dim)
            pixels = batch.images if batch.ids else torch.zeros(blank, dtype=torch.uint8)
            yield batch, model.encode_image(pixels.to(settings.device)).to(wide_dtype(model))[: len(batch.ids)]
            ACTIVITY.still_working()
            advance((len(batch.ids) + len(batch.broken)) * ranks.size)


def embed_texts(
    model: TwoTower,
    texts: Sequence[str],
    settings: EvaluationSettings,
    *,
    title: str,
    stored: Mapping[str, np.ndarray] | None = None,
) -> Tensor:
    """The embedding of every text, each distinct one computed once: equal texts tie exactly.

    `stored` has the features of each text, of a locked tower.
    """
    ranks = Ranks.current()
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    distinct, embeddings = list(numbers), []
    local = [distinct[row] for row in equal_share(ranks, len(distinct))]
    with progress_bar(title, len(distinct), shown=settings.progress) as advance:
        for start in range(0, len(local), settings.batch):
            batch = local[start : start + settings.batch]
            if stored is None:
                tokens = model.tokenizer(batch)  # the model moves them to its device
            else:
                tokens = torch.from_numpy(np.stack([stored[text] for text in batch])).to(settings.device)
            embeddings.append(model.encode_text(tokens).to(wide_dtype(model)))
            ACTIVITY.still_working()
            advance(len(tokens) * ranks.size)
    gathered = _gather(ranks, torch.cat(embeddings), width=len(local))
    return gathered[torch.tensor([numbers[text] for text in texts], device=settings.device)]


def _stored_texts(features: FeatureTable, captions: Mapping[int, Sequence[str]]) -> dict[str, np.ndarray]:
    stored: dict[str, np.ndarray] = {}
    for index, texts in captions.items():
        for text, row in zip(texts, features.rows(index), strict=True):
            stored.setdefault(text, row)
    return stored


def equal_share(ranks: Ranks, count: int) -> np.ndarray:
    """This rank's part of 0 to count - 1, of the same length on every rank: the last number is repeated if needed."""
    width = ranks.largest_share(count)
    return np.minimum(np.arange(ranks.rank * width, (ranks.rank + 1) * width), count - 1)


def _gather(ranks: Ranks, local: Tensor, *, width: int) -> Tensor:
    padded = local.new_zeros(width, *local.shape[1:])
    padded[: len(local)] = local
    return ranks.gather(padded, width * ranks.size, purpose="evaluation")


def wide_dtype(model: TwoTower) -> torch.dtype:
    """The precision in which embeddings are stored and compared."""
    return torch.float64 if next(model.parameters()).dtype == torch.float64 else torch.float32
