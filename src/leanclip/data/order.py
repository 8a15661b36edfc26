"""Which samples make step t of epoch e: a pure function, the same whatever the number of workers."""

from collections.abc import Iterator

import numpy as np


def epoch_batches(ids: np.ndarray, batch: int, *, seed: int, epoch: int) -> Iterator[np.ndarray]:
    """The epoch's batches of sample ids, shuffled; a last one that is not full is left out."""
    order = np.random.default_rng([seed, epoch]).permutation(ids)
    for step in range(len(ids) // batch):
        yield order[step * batch : (step + 1) * batch]


def sample_seed(seed: int, epoch: int, sample_id: int) -> int:
    """A seed for everything random about one sample in one epoch: caption choice, augmentation."""
    return int(np.random.SeedSequence([seed, epoch, sample_id]).generate_state(1, np.uint64)[0] >> 1)
