"""Scalars that schedules change are on the device, in full precision."""

import pytest
import torch

import leanclip
from leanclip.losses.device_scalars import DeviceScalars


def test_they_change_in_place():
    scalars = DeviceScalars(0.25, 0.75)
    address = scalars.value.data_ptr()
    scalars.set(0.999, 0.001)
    assert scalars.value.tolist() == [0.999, 0.001] and scalars.value.data_ptr() == address
    assert scalars.state_dict() == {}


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float32, torch.float64])
def test_a_cast_of_the_loss_does_not_round_them(cast):
    loss = leanclip.create_loss("isogclr", num_samples=9, tau_betas=(0.9, 0.999))
    loss.set_epoch(1, 4)
    (scalars,) = (part for part in loss.modules() if isinstance(part, DeviceScalars) and len(part.on_host) == 4)
    loss.to(cast)
    assert float(scalars.value[1]) == 0.999
    loss.to("meta")
    assert scalars.value.device.type == "meta"


def test_metrics_of_a_step_keep_their_gamma():
    loss = leanclip.create_loss("fastclip-v1", num_samples=6, gamma_min=0.2)
    image, text = torch.nn.functional.normalize(torch.randn(2, 6, 8), dim=-1).unbind()
    steps = []
    for epoch in range(4):
        loss.set_epoch(epoch, 4)
        steps.append((loss.gamma, loss(image, text, torch.arange(6)).metrics))
    assert len({gamma for gamma, _ in steps}) > 2
    assert [float(metrics["gamma"]) for _, metrics in steps] == [gamma for gamma, _ in steps]
