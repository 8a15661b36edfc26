"""Zero-shot classification: which class name, put into sentences, is nearest to an image?"""

import contextlib
import hashlib
import json
import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from leanclip.data import evaluation_batches, evaluation_transform
from leanclip.distributed import Ranks
from leanclip.errors import UserError
from leanclip.evaluation.embed import embed_images, embed_texts, equal_share, wide_dtype
from leanclip.evaluation.labelled_sets import LabelledSet
from leanclip.evaluation.prompts import Prompts
from leanclip.filesystem import atomic_path, cache_directory
from leanclip.models import TwoTower
from leanclip.progress import ACTIVITY, progress_bar

ALL_SHOWN = 5  # with fewer classes every answer would be among the first five


def zero_shot_metrics(labelled: LabelledSet) -> tuple[str, ...]:
    """What can be measured on a set, by the names in `Classified.metrics`."""
    always = ("top1", "mean_per_class_recall")
    return (*always, "top5") if len(labelled.classnames) >= ALL_SHOWN else always


@dataclass(frozen=True, kw_only=True)
class Classified:
    """How the images of a set were classified."""

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
        """What one gets by always naming the most frequent class."""
        return float(self.confusion.sum(1).max() / self.images)

    @property
    def recall_of_class(self) -> np.ndarray:
        """The share of each class's images that was recognised; NaN for a class without images."""
        counts = self.confusion.sum(1)
        return np.where(counts > 0, self.confusion.diagonal() / np.maximum(counts, 1), math.nan)

    @property
    def mean_per_class_recall(self) -> float:
        """The mean over the classes that have images."""
        return float(np.nanmean(self.recall_of_class))

    def metrics(self) -> dict[str, float]:
        found = {"top1": self.top1, "mean_per_class_recall": self.mean_per_class_recall}
        if not math.isnan(self.top5):
            found |= {"top5": self.top5, "chance@5": 5 * self.chance}
        return found | {"images": self.images, "chance@1": self.chance}

    def per_class(self) -> list[dict[str, Any]]:
        """For each class its images, the share recognised, and what it was taken for most often."""
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
        """The figures and counts, for zero_shot.json and for the results of `leanclip evaluate`."""
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


@torch.no_grad()
def classifier_of(
    model: TwoTower,
    prompts: Prompts,
    *,
    device: torch.device,
    batch: int = 256,
    cache: "ClassifierCache | None" = None,
    shown: bool = False,
) -> Tensor:
    """One unit vector per class: the mean of its prompts' embeddings. All ranks call it together."""
    kept = None if cache is None else cache.get(prompts)
    if kept is not None:
        return kept.to(device, wide_dtype(model))
    flat = [text for texts in prompts for text in texts]
    with progress_bar("embedding class names", len(set(flat)), shown=shown) as advance:
        embedded = embed_texts(model, flat, device=device, batch=batch, advance=advance)
    means = torch.stack([part.mean(0) for part in embedded.split([len(texts) for texts in prompts])])
    made = F.normalize(means, dim=-1)
    if cache is not None:
        cache.put(prompts, made)
    return made


@torch.no_grad()
def classify(
    model: TwoTower,
    labelled: LabelledSet,
    prompts: Prompts,
    *,
    device: torch.device,
    autocast: AbstractContextManager[object],
    batch: int = 256,
    workers: int = 0,
    cache: "ClassifierCache | None" = None,
    shown: bool = False,
) -> Classified:
    """Classify every image of a set. The model's mode is left as it was.

    Several ranks share the images, each taking equally many, and all get the result. Ties count against: a wrong
    class with the same score stands before the right one. Images that cannot be decoded are counted and left out.
    """
    ranks = Ranks.current()
    was_training = model.training
    model.eval()
    transform = evaluation_transform(model.preprocess)
    own_ids = equal_share(ranks, len(labelled))
    answers: list[np.ndarray] = []
    broken: list[str] = []
    with autocast:
        classes = classifier_of(model, prompts, device=device, batch=batch, cache=cache, shown=shown)
        with progress_bar(labelled.name, len(labelled), shown=shown) as advance:
            for found in evaluation_batches(labelled.source, own_ids, transform, batch=batch, workers=workers):
                embedded = embed_images(model, found, device)
                labels = torch.from_numpy(labelled.labels[found.ids]).to(device)
                answer = _answers(embedded, classes, labels)
                rows = np.stack([np.array(found.ids, np.int64), *(part.cpu().numpy() for part in answer)])
                answers.append(rows)
                broken += [str(error) for error in found.broken][: 1 - len(broken)]
                ACTIVITY.still_working()
                advance((len(found.ids) + len(found.broken)) * ranks.size)
    model.train(was_training)
    everyones = ranks.all_gather_objects((np.concatenate(answers, axis=1), broken))
    ids, predicted, place = np.concatenate([answer for answer, _ in everyones], axis=1)
    if not len(ids):
        raise UserError(f"none of the images of {labelled.name} can be used: {everyones[0][1][0]}")
    first = np.unique(ids, return_index=True)[1]  # those that two ranks took count once
    ids, predicted, place = ids[first], predicted[first], place[first]
    size = len(labelled.classnames)
    confusion = np.bincount(labelled.labels[ids] * size + predicted, minlength=size * size).reshape(size, size)
    return Classified(
        name=labelled.name,
        classnames=labelled.classnames,
        confusion=confusion,
        top5=float((place < 5).mean()) if "top5" in zero_shot_metrics(labelled) else math.nan,
        prompts=sum(map(len, prompts)),
        broken=len(labelled) - len(ids) + labelled.left_out,
        note=labelled.note,
    )


class _Answers(NamedTuple):
    predicted: Tensor
    place: Tensor  # how many classes stand before the right one


def _answers(embedded: Tensor, classes: Tensor, labels: Tensor) -> _Answers:
    with torch.autocast(embedded.device.type, enabled=False):
        scores = embedded @ classes.T
    right = scores.gather(1, labels[:, None])
    place = (~(scores < right)).sum(1) - 1
    others = scores.scatter(1, labels[:, None], -torch.inf)
    return _Answers(torch.where(place == 0, labels, others.argmax(1)), place)


class ClassifierCache:
    """Classifiers on disk, by the text tower's weights and the prompts. Rank 0 reads and writes.

    `precision` names what the embeddings are computed in, where that is not the weights' own.
    """

    def __init__(self, model: TwoTower, *, precision: str = "", directory: Path | None = None) -> None:
        self.directory = directory or cache_directory() / "classifiers"
        self.fingerprint = Ranks.current().broadcast_from_first(lambda: precision + _fingerprint(model))

    def path(self, prompts: Prompts) -> Path:
        said = json.dumps([self.fingerprint, prompts])
        return self.directory / f"{hashlib.sha256(said.encode()).hexdigest()[:32]}.safetensors"

    def get(self, prompts: Prompts) -> Tensor | None:
        def read() -> Tensor | None:
            try:
                return load_file(self.path(prompts))["classifier"]
            except (OSError, KeyError, SafetensorError):
                return None

        return Ranks.current().broadcast_from_first(read)

    def put(self, prompts: Prompts, classifier: Tensor) -> None:
        if not Ranks.current().first:
            return
        path = self.path(prompts)
        with contextlib.suppress(OSError, SafetensorError):  # a full or read-only disk costs time, nothing else
            self.directory.mkdir(parents=True, exist_ok=True)
            with atomic_path(path) as temporary:
                save_file({"classifier": classifier.cpu().contiguous()}, temporary)


def _fingerprint(model: TwoTower) -> str:
    """Of everything that decides a text's embedding; the device's own rounding counts too."""
    digest = hashlib.sha256(json.dumps(model.config["text_cfg"], sort_keys=True, default=str).encode())
    for name, value in model.clip.state_dict().items():
        if not name.startswith(("visual.", "logit_")):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)} {value.device.type}".encode())
            digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def summary(found: Classified) -> str:
    """One line that says what was measured, and what guessing would give."""
    return (
        f"zero-shot {found.name}: top-1 {found.top1:.1%} of {found.images:,} images in {len(found.classnames):,}"
        f" classes (chance {found.chance:.1%}, always the largest class {found.largest_class:.1%})"
    )
