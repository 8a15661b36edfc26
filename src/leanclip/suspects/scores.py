"""The score of every pair, from the table of a run or by one pass of its model, and how likely the pair is wrong."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from leanclip.checkpointing.checkpoint import TENSORS
from leanclip.checkpointing.storage import StoredTensors
from leanclip.data import Source
from leanclip.data.order import Permutation
from leanclip.errors import UserError
from leanclip.evaluation import EvaluationSettings
from leanclip.evaluation.embed import embed_texts, embedded_batches, inference
from leanclip.losses import create_loss
from leanclip.losses.pair_weights import MIN_VISITS, SMALLEST_SHARE, count_scores, gate, log_odds
from leanclip.models import TwoTower

NAMES = ("score", "scored", "null")
BATCH, POOL = 1024, 8192  # samples that are compared with each other, and from which such batches are drawn
ORDER_KEY = 0x5C0E


class Scores(NamedTuple):
    """By sample id; with several `captions` of each sample, those of one sample follow each other."""

    score: np.ndarray  # float32; high for wrong pairs
    probability: np.ndarray  # float32, of being wrong; 0 where the model cannot tell
    scored: np.ndarray  # bool: whether there is a score
    share: float  # of wrong pairs, estimated
    can_tell: bool  # whether the model tells right from wrong well enough for the estimate
    captions: int = 1  # of each sample that have a score each; further ones share them


def stored_scores(checkpoint: Path) -> Scores | None:
    """From the table that a run with learned pair weights saves; None if the checkpoint has none."""
    if not (checkpoint / TENSORS).is_dir():
        return None
    stored, names = StoredTensors.open(checkpoint / TENSORS), [f"loss.state.{name}" for name in NAMES]
    if not set(names) <= set(stored.shapes):
        return None
    return judge(*stored.read(names).values())


def model_scores(
    model: TwoTower, source: Source, ids: np.ndarray, settings: EvaluationSettings, captions_per_sample: int = 1
) -> Scores:
    """By one pass over these samples. Every pair is compared twice, with other pairs each time; of several captions
    the first two, or each of `captions_per_sample`."""
    tau = min(max(model.temperature(), 0.01), 1.0)
    loss = create_loss(
        "infonce", num_samples=len(source), tau=tau, learn_tau=False, pair_weights="learned",
        captions_per_sample=captions_per_sample,
    ).to(settings.device)  # fmt: skip
    draw = torch.Generator().manual_seed(0)
    with inference(model, settings):
        for images, captions, pool in _pools(model, source, ids, settings):
            for visit in range(MIN_VISITS * captions_per_sample):
                loss.set_epoch(0, 1)  # it expects this once per epoch, and each visit is one
                wanted = visit if captions_per_sample == 1 else visit % captions_per_sample
                numbers = torch.tensor([wanted % len(options) for options in captions])
                texts = [options[number] for options, number in zip(captions, numbers.tolist(), strict=True)]
                embedded = embed_texts(model, texts, settings, title="captions")
                order = torch.randperm(len(pool), generator=draw)
                for part in order.tensor_split(-(-len(pool) // BATCH)):
                    loss(images[part], embedded[part], pool[part], caption_numbers=numbers[part])
    assert loss.state is not None
    return judge(*(loss.state.get_buffer(name).cpu() for name in NAMES))


def _pools(
    model: TwoTower, source: Source, used: np.ndarray, settings: EvaluationSettings
) -> Iterator[tuple[Tensor, list[list[str]], Tensor]]:
    """Image embeddings, captions and ids of random samples, as many as fit a few batches; the last pool has more."""
    random_ids = used[Permutation(len(used), ORDER_KEY)(np.arange(len(used)))]
    images, captions, ids = [], [], []
    for batch, embedded in embedded_batches(model, source, random_ids, settings, "images"):
        images.append(embedded)
        captions += batch.captions
        ids += batch.ids
        if len(ids) >= 2 * POOL:
            joined = torch.cat(images)
            yield joined[:POOL], captions[:POOL], torch.tensor(ids[:POOL])
            images, captions, ids = [joined[POOL:]], captions[POOL:], ids[POOL:]
    if len(ids) < 3:
        raise UserError("fewer than three samples can be used", code="data.no_usable_samples")
    yield torch.cat(images), captions, torch.tensor(ids)


def judge(score: Tensor, scored: Tensor, null: Tensor) -> Scores:
    """From the tables of a loss. The probability is that of the fit with the gate's share of wrong pairs: the fit
    alone calls some pairs wrong in any data. Where the gate is closed for another reason than a small share, right
    and wrong pairs score alike: a probability would be a guess."""
    captions = score.shape[1] if score.ndim == 2 else 1
    score, scored = score.flatten(), scored.flatten()
    visits = min(MIN_VISITS, max(1, int(scored.max()))) if len(scored) else 1
    counts = count_scores(score, scored, visits).double()
    wrong = gate(counts, null)
    if wrong is None:
        raise UserError("the run has not scored its pairs yet; train it longer", code="suspects.no_scores")
    share, fit = wrong.share, wrong.fit
    can_tell = wrong.open or share <= SMALLEST_SHARE
    odds = log_odds(score.float(), *torch.tensor(fit))
    probability = torch.sigmoid(_logit(share if can_tell else 0.0) - _logit(fit.share) - odds)
    listed = scored >= (1 if captions == 1 else visits)  # of one visit to a caption, chance would list many
    return Scores(score.float().numpy(), probability.numpy(), listed.numpy(), share, can_tell, captions)


def _logit(share: float) -> float:
    return -math.inf if share <= 0 else math.inf if share >= 1 else math.log(share / (1 - share))
