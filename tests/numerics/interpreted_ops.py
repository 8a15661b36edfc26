"""Run by `test_ops_triton.py` in a process of its own, where TRITON_INTERPRET=1 was set before Triton was imported.

float32 only: the interpreter's bfloat16 product is wrong in Triton 3.7.
"""

import pytest
import torch

from leanclip.ops import available, implementation
from leanclip.ops.triton import launch
from numerics.ops_cases import Case, check, small_cases


@pytest.mark.parametrize("case", small_cases(), ids=str)
def test_accuracy(case: Case):
    check(launch, case, torch.float32)


@pytest.mark.parametrize("case", [case for case in small_cases() if case.rows < 127 or case.tau == 0.07], ids=str)
def test_forms_for_narrow_inputs(case: Case, monkeypatch: pytest.MonkeyPatch):
    """The forms that 16-bit embeddings take round to about 1e-6 relative, far under what those inputs have lost.

    At small temperatures they meet vanishing sums, too: antipodal embeddings are all below the reference.
    """
    monkeypatch.setattr(launch, "PRECISE_FLOAT32", False)
    check(launch, case, torch.float32, slack=16)


@pytest.mark.parametrize("case", small_cases()[10:13], ids=str)
def test_several_panels_and_blocks(case: Case, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "PRECISE_FLOAT32", False)
    monkeypatch.setattr(launch, "PARTIAL_BYTES", 1024)
    monkeypatch.setattr(launch, "WEIGHT_BYTES", 8192)
    check(launch, case, torch.float32, slack=16)


def test_selection():
    rows = torch.zeros(4, 8)
    assert implementation("triton", rows)[0] == "triton"
    assert implementation("auto", rows)[0] == "tiled"
    assert available(rows) == ["reference", "triton", "tiled"]
