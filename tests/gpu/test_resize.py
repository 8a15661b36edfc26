"""The kernel that resizes against torch's filter on the CPU, and runs whose GPU or whose workers resize."""

import json

import pytest
import torch

from leanclip.cli.train import run
from leanclip.ops.resize import has_kernel, resize_crops
from numerics.resize_cases import SIZES, filters, ragged, torchs
from run_records import losses

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize(
    ("size", "larger"),
    [((33, 47), []), ((224, 224), [(365, 480), (840, 840), (224, 225)]), ((224, 160), [(110, 600), (448, 299)])],
)
def test_the_kernel_has_torchs_pixels(size, larger):
    assert has_kernel(torch.device("cuda", 0))
    crops, data, layout, out = ragged(SIZES + larger, size)
    out = out.cuda()
    resize_crops(data.cuda(), layout, *filters(size, "cuda:0"), out)
    assert torch.equal(out.cpu(), torchs(crops, size))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_is_the_same_wherever_its_images_are_resized(tmp_path, workers):
    logged = {}
    for decode in ("cpu", "gpu"):
        run(
            f"--train-data synthetic:600:jpeg --model leanclip-tiny --global-batch-size 150 --max-steps 6 --epochs 2"
            f" --loss infonce --workers {workers} --eval-every 0 --log-every 1 --report-to none --compile off"
            f" --decode {decode} --name {decode} --logs {tmp_path}".split()
        )
        logged[decode] = losses(tmp_path / decode)
        assert json.loads((tmp_path / decode / "run.json").read_text())["decode"] == decode
    assert len(logged["cpu"]) == 6 and logged["cpu"] == logged["gpu"]
