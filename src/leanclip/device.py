"""The compute device by name, and mixed precision on it."""

import torch

from leanclip.errors import UserError


def device_of(name: str | None) -> torch.device:
    """The device with this name. Default: the GPU, or the CPU where there is none."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"unknown --device {name!r}; give cpu, cuda or cuda:N", code="device.unknown") from error
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"--device {name} is not supported; give cpu, cuda or cuda:N", code="device.unsupported")
    if device.type == "cuda" and not torch.cuda.is_available():
        message = f"--device {name}: PyTorch finds no GPU; give cpu, or leave --device out"
        raise UserError(message, code="device.no_gpu")
    return device


def autocast_of(precision: str | None, device: torch.device) -> torch.autocast:
    dtype = torch.float16 if precision == "amp" else torch.bfloat16
    return torch.autocast(device.type, dtype, enabled=precision in ("amp", "amp_bf16", "amp_bfloat16"))
