"""Three training steps on N processes equal one on the whole batch: losses, gradients, weights, tables."""

import itertools

import pytest
import torch
from ranks_job import run_ranks
from training_worker import Case, run, run_all

import leanclip
from leanclip.distributed import Ranks

SIZES = (1, 2, 3, 4)
ALL = [
    Case(loss, micro, wrap, dtype)
    for loss, micro, wrap, dtype in itertools.product(
        leanclip.LOSSES, (False, True), ("ddp", "fsdp"), ("float64", "float32")
    )
]
CHECKPOINTED = [Case("fastclip-v3", micro, wrap, "float64", "checkpointing") for micro, wrap in
                itertools.product((False, True), ("ddp", "fsdp"))]  # fmt: skip


OPTIMIZERS = [Case("fastclip-v2", micro, "fsdp", "float64", opt) for micro, opt in ((True, "adamw"), (False, "lamb"))]
WEIGHTED = [
    Case(loss, micro, "ddp", "float64", "weights") for loss, micro in (("fastclip-v2", True), ("siglip", False))
]
ADAPTERS = [Case("fastclip-v3", micro, wrap, "float64", "lora") for micro, wrap in
            itertools.product((False, True), ("ddp", "fsdp"))]  # fmt: skip


def pairwise(size):
    """A choice in which every two values of loss, N, micro-batches, wrapping and precision meet somewhere."""
    chosen = []
    for number, loss in enumerate(leanclip.LOSSES):
        bits = number + size
        micro, fsdp, double = bits & 1, (bits >> 1) & 1, (number >> 2 ^ size >> 1 ^ bits) & 1
        chosen.append(Case(loss, bool(micro), "fsdp" if fsdp else "ddp", "float64" if double else "float32"))
    return chosen


def test_the_choice_is_pairwise():
    rows = [(size, *case[:4]) for size in SIZES for case in pairwise(size)]
    columns = [set(column) for column in zip(*rows, strict=True)]
    for one, other in itertools.combinations(range(5), 2):
        met = {(row[one], row[other]) for row in rows}
        assert met == set(itertools.product(columns[one], columns[other]))


def parts_of(name, value):
    """An attention bias holds query, key and value; the key's true gradient is zero."""
    if name.endswith("in_proj_bias") and "gradient" in name:
        query, key, val = value.chunk(3)
        return {f"{name} query": query, f"{name} key": key, f"{name} value": val}
    return {name: value}


def assert_equal(found, right, dtype):
    assert set(found) == set(right)
    for name in right:
        for part, truth in parts_of(name, right[name]).items():
            value = parts_of(name, found[name])[part]
            finite = truth.isfinite()
            assert torch.equal(finite, value.isfinite()), part
            truth, value = (side[finite].double() for side in (truth, value))
            tolerance = 1e-8 if dtype == "float64" else 1e-4
            scale = 1.0 if part.endswith(" key") else truth.norm()
            allowed = tolerance * scale + 1e-12
            assert (value - truth).norm() <= allowed, f"{part}: {(value - truth).norm():.2e} of {truth.norm():.2e}"


def check(cases, size, folder):
    results = run_ranks(run_all, size, folder, cases)
    for case in cases:
        plain = case._replace(micro=False, extra="" if case.extra == "checkpointing" else case.extra)
        right = run(plain, Ranks(0, 1, None), folder)
        for found in results:
            assert_equal(found[case.name], right, case.dtype)


@pytest.mark.parametrize("size", SIZES)
def test_ranks_equal_one_process(size, tmp_path):
    check(pairwise(size) + (CHECKPOINTED + OPTIMIZERS + WEIGHTED + ADAPTERS if size == 2 else []), size, tmp_path)


def test_patch_dropout_in_micro_batches(tmp_path):
    """Each rank drops what its own random numbers say, the same in both passes, whatever is around the model."""
    cases = [Case("fastclip-v3", True, wrap, "float64", "dropout") for wrap in ("ddp", "fsdp")]
    for found in run_ranks(run_all, 2, tmp_path, cases):
        assert_equal(found[cases[1].name], found[cases[0].name], "float64")
        plain = run_all(Ranks(0, 1, None), tmp_path, [cases[0]._replace(extra="")])
        assert found[cases[0].name]["step 0 loss"] != plain[cases[0]._replace(extra="").name]["step 0 loss"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("loss", leanclip.LOSSES)
def test_the_full_matrix(loss, size, tmp_path):
    check([case for case in ALL if case.loss == loss], size, tmp_path)
