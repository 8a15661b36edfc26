"""The GPU of this machine: its matrix rate and bandwidth are measured, the rest of its model is that of an H200."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from leanclip.planning.gpu_model import REFERENCE, GpuModel, read_gpu


def measured_gpu(device: torch.device) -> GpuModel:
    """Takes about a second and 2 GiB."""
    properties: Any = torch.cuda.get_device_properties(device)
    gpu = replace(
        read_gpu(REFERENCE),
        name=properties.name,
        memory=properties.total_memory,
        capability=(properties.major, properties.minor),
        processors=properties.multi_processor_count,
        matrix_rate=matrix_rate(device, torch.bfloat16),
        bandwidth=copy_rate(device),
    )
    torch.cuda.empty_cache()
    return gpu


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large product on this machine."""
    side = 1024 if device.type == "cpu" else 8192 if dtype.itemsize == 2 else 4096
    square = torch.randn(side, side, device=device).to(dtype)
    return 2 * side**3 / seconds(lambda: square @ square)


def copy_rate(device: torch.device) -> float:
    """Bytes/s of a large copy, read and written."""
    source = torch.zeros(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source))


def seconds(call: Callable[[], object]) -> float:
    """The shortest of several runs."""
    times = []
    for _ in range(8):  # the first one warms up
        began = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return min(times)
