"""Zero-shot classification: the class whose prompts have the embedding nearest to that of the image."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from leanclip.distributed import Ranks
from leanclip.errors import UserError
from leanclip.evaluation.embed import (
    EvaluationSettings,
    embed_texts,
    embedded_batches,
    equal_share,
    inference,
)
from leanclip.evaluation.labelled_sets import LabelledSet, Prompts
from leanclip.models import TwoTower

FEWEST_FOR_TOP5 = 5  # classes


def zero_shot_metrics(labelled: LabelledSet) -> tuple[str, ...]:
    """The names of the accuracies in `Classified.metrics` for a set."""
    names = ("top1", "mean_per_class_recall")
    return (*names, "top5") if len(labelled.classnames) >= FEWEST_FOR_TOP5 else names


@dataclass(frozen=True, kw_only=True)
class Classified:
    name: str
    classnames: tuple[str, ...]
    confusion: np.ndarray  # (C, C) counts: a row per true class, a column per predicted one
    top5: float  # NaN with fewer than five classes
    prompts: int  # of all classes
    broken: int  # images that could not be used
    note: str | None = None

    @property
    def images(self) -> int:
        return int(self.confusion.sum())

    @property
    def top1(self) -> float:
        return float(self.confusion.trace() / self.images)

    @property
    def chance(self) -> float:
        return 1 / len(self.classnames)

    @property
    def largest_class(self) -> float:
        """The accuracy of always predicting the most frequent class."""
        return float(self.confusion.sum(1).max() / self.images)

    @property
    def recall_of_class(self) -> np.ndarray:
        """The accuracy on the images of each class; NaN for a class without images."""
        counts = self.confusion.sum(1)
        return np.where(counts > 0, self.confusion.diagonal() / np.maximum(counts, 1), math.nan)

    @property
    def mean_per_class_recall(self) -> float:
        """The mean over the classes that have images."""
        return float(np.nanmean(self.recall_of_class))

    def metrics(self) -> dict[str, float]:
        top5 = {} if math.isnan(self.top5) else {"top5": self.top5, "chance@5": 5 * self.chance}
        accuracies = {"top1": self.top1, "mean_per_class_recall": self.mean_per_class_recall}
        return accuracies | top5 | {"images": self.images, "chance@1": self.chance}

    def per_class(self) -> list[dict[str, Any]]:
        """For each class its images, its recall, and the class it is most often mistaken for."""
        rows = []
        for number, recall in enumerate(self.recall_of_class.tolist()):
            wrong = self.confusion[number].copy()
            wrong[number] = 0
            mistaken = int(wrong.argmax())
            rows.append({
                "class": self.classnames[number],
                "images": int(self.confusion[number].sum()),
                "recall": None if math.isnan(recall) else recall,
                "mistaken_for": self.classnames[mistaken] if wrong[mistaken] else None,
                "times": int(wrong[mistaken]),
            })  # fmt: skip
        return rows

    def to_json(self) -> dict[str, Any]:
        """Metrics and counts, for zero_shot.json and for the results of `leanclip evaluate`."""
        return {
            "classnames": list(self.classnames),
            "confusion": self.confusion.tolist(),
            "top1": self.top1,
            "top5": None if math.isnan(self.top5) else self.top5,
            "mean_per_class_recall": self.mean_per_class_recall,
            "images": self.images,
            "broken": self.broken,
            "prompts": self.prompts,
            "chance": self.chance,
            "note": self.note,
            "per_class": self.per_class(),
        }


def classifier_of(model: TwoTower, prompts: Prompts, settings: EvaluationSettings) -> Tensor:
    """One unit vector per class: the mean of the embeddings of its prompts. All ranks call it together."""
    flat = [text for texts in prompts for text in texts]
    embeddings = embed_texts(model, flat, settings, title="embedding class names")
    means = torch.stack([part.mean(0) for part in embeddings.split([len(texts) for texts in prompts])])
    return F.normalize(means, dim=-1)


def classify(model: TwoTower, labelled: LabelledSet, prompts: Prompts, settings: EvaluationSettings) -> Classified:
    """Classify every image of a set. Images that cannot be decoded are counted and skipped.

    A tie counts as wrong: a wrong class with the same score ranks before the right one.
    """
    ranks = Ranks.current()
    answers: list[np.ndarray] = []
    broken: list[str] = []
    with inference(model, settings):
        classifier = classifier_of(model, prompts, settings)
        local_ids = equal_share(ranks, len(labelled))
        for batch, embeddings in embedded_batches(model, labelled.source, local_ids, settings, labelled.name):
            labels = torch.from_numpy(labelled.labels[batch.ids]).to(settings.device)
            predicted_and_rank = (part.cpu().numpy() for part in predictions(embeddings, classifier, labels))
            answers.append(np.stack([np.array(batch.ids, np.int64), *predicted_and_rank]))
            broken += [str(error) for error in batch.broken][: 1 - len(broken)]
    gathered = ranks.all_gather_objects((np.concatenate(answers, axis=1), broken))
    ids, predicted, rank = np.concatenate([answer for answer, _ in gathered], axis=1)
    if not len(ids):
        raise UserError(
            f"none of the images of {labelled.name} can be used: {gathered[0][1][0]}", code="data.no_usable_samples"
        )
    first = np.unique(ids, return_index=True)[1]  # an image that two ranks classified counts once
    ids, predicted, rank = ids[first], predicted[first], rank[first]
    size = len(labelled.classnames)
    confusion = np.bincount(labelled.labels[ids] * size + predicted, minlength=size * size).reshape(size, size)
    return Classified(
        name=labelled.name,
        classnames=labelled.classnames,
        confusion=confusion,
        top5=float((rank < 5).mean()) if "top5" in zero_shot_metrics(labelled) else math.nan,
        prompts=sum(map(len, prompts)),
        broken=len(labelled) - len(ids) + labelled.skipped,
        note=labelled.note,
    )


def predictions(embeddings: Tensor, classifier: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The predicted class of each image, and the rank of the right one: the number of classes before it."""
    with torch.autocast(embeddings.device.type, enabled=False):
        scores = embeddings @ classifier.T
    right = scores.gather(1, labels[:, None])
    rank = (~(scores < right)).sum(1) - 1  # NaN counts as before it
    others = scores.scatter(1, labels[:, None], -torch.inf)
    return torch.where(rank == 0, labels, others.argmax(1)), rank


def summary(classified: Classified) -> str:
    return (
        f"zero-shot {classified.name}: top-1 {classified.top1:.1%} of {classified.images:,} images in"
        f" {len(classified.classnames):,} classes (chance {classified.chance:.1%}, always the largest class"
        f" {classified.largest_class:.1%})"
    )
