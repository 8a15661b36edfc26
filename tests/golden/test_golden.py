"""A refactor must not move these numbers: 20 deterministic steps in float64 from stored weights."""

import json

import pytest
from make_golden import CURVES, LOSSES, curve


@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_curve_is_the_stored_one(loss, tmp_path):
    stored = json.loads(CURVES.read_text())[loss]
    assert len(stored) == 20 and stored[-1] != stored[0]
    assert curve(loss, tmp_path) == pytest.approx(stored, rel=1e-9, abs=0)


def test_the_same_command_twice_is_the_same_bit_for_bit(tmp_path):
    first, second = (curve("fastclip-v3", tmp_path / name) for name in ("one", "two"))
    assert first == second
    one, two = (
        (tmp_path / name / "fastclip-v3/checkpoints/last/open_clip_model.safetensors").read_bytes()
        for name in ("one", "two")
    )
    assert one == two
