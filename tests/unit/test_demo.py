"""The demo and every loss learn the bundled emoji. Minutes long."""

import pytest

import leanclip
from refusal import exit_code
from run_records import records

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def recall(tmp_path, *arguments):
    assert exit_code("train", "--recipe", "demo", "--name", "run", "--logs", str(tmp_path), *arguments) == 0
    last = {line["set"]: line["metrics"] for line in records(tmp_path / "run", "eval")}
    assert last["emoji groups"]["top1"] > 0.27  # the largest group alone is 0.235
    return last["val"]["text_to_image_recall@10"]


def test_demo_learns(tmp_path):
    assert recall(tmp_path) >= 0.5


@pytest.mark.parametrize("loss", leanclip.LOSSES)
def test_every_loss_learns(loss, tmp_path):
    assert recall(tmp_path, "--loss", loss) >= 0.45
