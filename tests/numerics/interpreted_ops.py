"""Run by `test_ops_triton.py` in a process of its own, where TRITON_INTERPRET=1 was set before Triton was imported.

float32 only, which the kernels take nowhere else: the interpreter's bfloat16 product is wrong in Triton 3.7.
"""

import pytest
import torch

from leanclip.ops import Pairs, Sigmoid, available, implementation
from leanclip.ops.triton import launch
from numerics.ops_cases import Case, check, small_cases

SLACK = 16  # the kernels' forms round to about 1e-6 relative, far under what 16-bit inputs have lost


@pytest.mark.parametrize("case", [case for case in small_cases() if case.rows < 127 or case.tau == 0.07], ids=str)
@pytest.mark.parametrize("dense", [True, False], ids=["dense", "fused"])
def test_accuracy(case: Case, dense: bool, monkeypatch: pytest.MonkeyPatch):
    """At small temperatures sums vanish, too: antipodal embeddings are all below the reference."""
    monkeypatch.setattr(launch, "DENSE_PAIRS", 2**24 if dense else 0)
    monkeypatch.setattr(launch, "DENSE_CHUNK", 32)
    check(launch, case, torch.float32, slack=SLACK)


@pytest.mark.parametrize("case", small_cases()[10:13], ids=str)
def test_several_panels_and_blocks(case: Case, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "DENSE_PAIRS", 0)
    monkeypatch.setattr(launch, "PARTIAL_BYTES", 1024)
    monkeypatch.setattr(launch, "WEIGHT_BYTES", 8192)
    check(launch, case, torch.float32, slack=SLACK)


def test_weights_of_one_change_nothing():
    """Not a bit, border tiles included."""
    rows, cols = (torch.nn.functional.normalize(torch.randn(count, 24), dim=1) for count in (70, 101))
    pairs, diagonal = Pairs(rows=rows, cols=cols, offset=20), torch.rand(70)
    plain = Sigmoid(torch.tensor(14.0), torch.tensor(-3.0), torch.tensor(0.3))
    ones = plain._replace(sides=(torch.full((70,), 0.5), torch.full((101,), 0.5)))
    without, weighted = (launch.pairwise(pairs, sigmoid, diagonal) for sigmoid in (plain, ones))
    for one, other in zip((*without[:3], *without.gradients), (*weighted[:3], *weighted.gradients), strict=True):
        assert one is not None and other is not None and torch.equal(one, other)


def test_selection():
    rows = torch.zeros(4, 8)
    assert implementation("triton", rows)[0] == "triton"
    assert implementation("auto", rows)[0] == "tiled"
    assert available(rows) == ["reference", "triton", "tiled"]
