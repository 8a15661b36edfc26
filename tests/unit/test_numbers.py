"""What schedules move lies on the device, in full precision."""

import pytest
import torch

import leanclip
from leanclip.losses.device_scalars import Numbers


def test_they_change_in_place():
    numbers = Numbers(0.25, 0.75)
    place = numbers.value.data_ptr()
    numbers.set(0.999, 0.001)
    assert numbers.value.tolist() == [0.999, 0.001] and numbers.value.data_ptr() == place
    assert numbers.state_dict() == {}


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float32, torch.float64])
def test_a_cast_of_the_loss_does_not_round_them(cast):
    loss = leanclip.create_loss("isogclr", num_samples=9, tau_betas=(0.9, 0.999))
    loss.set_epoch(1, 4)
    (numbers,) = (each for each in loss.modules() if isinstance(each, Numbers) and len(each.now) == 4)
    loss.to(cast)
    assert float(numbers.value[1]) == 0.999
    loss.to("meta")
    assert numbers.value.device.type == "meta"


def test_metrics_of_a_step_keep_their_gamma():
    loss = leanclip.create_loss("fastclip-v1", num_samples=6, gamma_min=0.2)
    image, text = torch.nn.functional.normalize(torch.randn(2, 6, 8), dim=-1).unbind()
    found = []
    for epoch in range(4):
        loss.set_epoch(epoch, 4)
        found.append((loss.gamma, loss(image, text, torch.arange(6)).metrics))
    assert len({gamma for gamma, _ in found}) > 2
    for gamma, metrics in found:
        assert float(metrics["gamma"]) == gamma
