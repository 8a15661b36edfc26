"""The order of an epoch: a bijection, uniform, in constant memory, without repeats in a batch."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leanclip.data.order import BlockPermutation, Order, Permutation, SplitVisits, WeightedVisits
from leanclip.data.source import Part

KINDS = pytest.mark.parametrize("kind", [Permutation, BlockPermutation])


def chi_square(counts):
    """The statistic of a table in standard deviations above its expectation."""
    expected = counts.sum() / counts.size
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = (len(counts) - 1) ** 2
    return (statistic - freedom) / np.sqrt(2 * freedom)


@KINDS
@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 5000), key=st.integers(0, 2**32))
def test_every_id_comes_once(kind, size, key):
    assert (np.sort(kind(size, key)(np.arange(size))) == np.arange(size)).all()


def test_a_position_does_not_depend_on_other_positions():
    permutation = Permutation(10_007, 5)
    whole = permutation(np.arange(10_007))
    assert (permutation(np.array([4711, 3])) == whole[[4711, 3]]).all()


def test_every_position_is_equally_likely():
    """Each of 16 samples at each of 16 positions, and each pair of neighbours, over 8,000 epochs."""
    size, epochs = 16, 8000
    places, successors = np.zeros((size, size)), np.zeros((size, size))
    for epoch in range(epochs):
        order = Permutation(size, 1, epoch)(np.arange(size))
        places[order, np.arange(size)] += 1
        successors[order[:-1], order[1:]] += 1
    assert chi_square(places) < 4
    off_diagonal = successors[~np.eye(size, dtype=bool)]
    assert abs(off_diagonal / off_diagonal.mean() - 1).max() < 0.2  # 5 standard deviations


@KINDS
def test_a_large_epoch_is_mixed(kind):
    """The first batches of an epoch come from everywhere: deciles of the ids against deciles of the positions."""
    size = 1_000_000
    permutation = Permutation(size, 3, 0) if kind is Permutation else BlockPermutation(size, 3, 0, block=64)
    order = permutation(np.arange(size))
    counts = np.histogram2d(np.arange(size) * 10 // size, order * 10 // size, bins=10)[0]
    if kind is Permutation:
        assert chi_square(counts) < 4
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.005
    else:  # blocks of neighbours make it coarser, without a bias
        assert abs(counts / counts.mean() - 1).max() < 0.5


def test_the_order_of_a_huge_epoch_takes_no_memory():
    order = Order(WeightedVisits([Part(0, 400_000_000, 1.0)]), batch=4096, seed=0)
    order.batch_ids(0, range(1))
    tracemalloc.start()
    (ids,), _ = order.batch_ids(7, range(97_000, 97_001))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(ids.tolist())) == 4096 and peak < 2**20


def test_neighbours_stay_together_in_blocks():
    size = 1_000_000
    order = Order(WeightedVisits([Part(0, size, 1.0)]), batch=32 * 1024, seed=0, shuffle="blocks")
    ids = np.sort(order.batch_ids(0, range(1))[0])
    assert (np.diff(ids) > 1).sum() <= 33  # 32 runs of neighbours, one perhaps cut by the end of the ids


def test_a_split_covers_every_id():
    split = SplitVisits(1000, 100, seed=3)
    ids, _ = split.at(np.arange(900), seed=3, epoch=0)
    assert sorted([*ids, *split.held_out_ids]) == list(range(1000))


@settings(max_examples=30, deadline=None)
@given(
    counts=st.lists(st.integers(5, 60), min_size=1, max_size=3),
    factors=st.lists(st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0]), min_size=3, max_size=3),
    batch=st.integers(1, 20),
    epoch=st.integers(0, 3),
)
def test_weighted_sources_are_visited_by_their_factors(counts, factors, batch, epoch):
    ends = np.cumsum(counts)
    parts = [
        Part(int(end - count), int(end), factor)
        for end, count, factor in zip(ends, counts, factors[: len(counts)], strict=True)
    ]
    visits = WeightedVisits(parts)
    ids, copies = visits.at(np.arange(len(visits)), seed=1, epoch=epoch)
    for part in parts:
        inside = ids[(ids >= part.start) & (ids < part.stop)]
        assert len(inside) == round(part.factor * (part.stop - part.start))
        times = np.bincount(inside - part.start, minlength=part.stop - part.start)
        assert times.max() - times.min() <= 1
    assert len(set(ids[copies == 0])) == (copies == 0).sum()
    order = Order(visits, batch=batch, seed=1)
    for step in range(order.steps):
        batch_ids = order.batch_ids(epoch, range(step, step + 1))[0][0]
        distinct = batch_ids[batch_ids >= 0]
        assert len(set(distinct)) == len(distinct)


@pytest.mark.parametrize(
    "visits", [WeightedVisits([Part(0, 103, 1.0)]), WeightedVisits([Part(0, 40, 2.0), Part(40, 100, 1.0)])]
)
def test_replacements_of_different_slots_are_disjoint(visits):
    order = Order(visits, batch=10, seed=4)
    for step in range(order.steps):
        (ids,), _ = order.batch_ids(2, range(step, step + 1))
        used = set(ids.tolist())
        for slot in range(10):
            candidates = set(order.replacements(2, step, slot))
            assert candidates and not candidates & used
            used |= candidates
