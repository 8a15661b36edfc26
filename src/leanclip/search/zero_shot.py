"""Images sorted into classes that were typed: the nearest class of each, and how certain that is."""

from dataclasses import dataclass

import numpy as np
import torch

ROWS_AT_ONCE = 1 << 15


@dataclass(frozen=True)
class Sorted:
    classes: tuple[str, ...]
    ids: np.ndarray  # (n,) of the images, by class and within a class the doubtful ones first
    assigned: np.ndarray  # (n,) the class of each
    second: np.ndarray  # (n,) the class that comes next
    probability: np.ndarray  # (n,) of the class against the others
    bounds: np.ndarray  # (C + 1,) the first image of each class

    @property
    def counts(self) -> list[int]:
        return np.diff(self.bounds).tolist()

    def rows_of(self, number: int) -> range:
        return range(int(self.bounds[number]), int(self.bounds[number + 1]))


def sort_into(
    classes: tuple[str, ...], classifier: np.ndarray, features: np.ndarray, ids: np.ndarray, *, scale: float
) -> Sorted:
    """`classifier` has a unit vector for each class; `scale` is that of the model's logits."""
    weights = torch.from_numpy(classifier.astype(np.float32)).T
    parts = []
    for start in range(0, len(ids), ROWS_AT_ONCE):
        rows = np.asarray(features[ids[start : start + ROWS_AT_ONCE]])
        probabilities = (scale * (torch.from_numpy(rows).float() @ weights)).softmax(1)
        top = probabilities.topk(min(2, len(classes)), dim=1)
        parts.append((top.indices[:, 0].numpy(), top.indices[:, -1].numpy(), top.values[:, 0].numpy()))
    assigned, second, probability = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((ids, probability, assigned))
    bounds = np.searchsorted(assigned[order], np.arange(len(classes) + 1))
    return Sorted(classes, ids[order], assigned[order], second[order], probability[order], bounds)
