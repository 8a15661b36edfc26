"""Tile shapes per kernel, dtype and architecture. Fixed by measurement or by shared memory, never at run time."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Config:
    block_r: int
    block_c: int
    block_k: int
    num_warps: int
    num_stages: int
    group: int = 16  # column blocks that run together
    # float32 rounds scale times similarity as PyTorch does, so that errors cancel between the two operations.
    fused: bool = True

    def options(self) -> dict[str, int | bool]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": self.fused}

    def blocks(self) -> dict[str, int]:
        return {"BLOCK_R": self.block_r, "BLOCK_C": self.block_c, "BLOCK_K": self.block_k, "GROUP": self.group}


KERNELS = ("statistics", "weights", "pairwise", "finish")

# Shared memory one block may use, in bytes.
SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}

_FINISH = Config(block_r=64, block_c=64, block_k=32, num_warps=4, num_stages=2)
_HOPPER = Config(block_r=128, block_c=128, block_k=64, num_warps=4, num_stages=3)
_AMPERE = Config(block_r=128, block_c=128, block_k=32, num_warps=8, num_stages=3)
_FLOAT32 = Config(block_r=64, block_c=64, block_k=32, num_warps=4, num_stages=2, fused=False)
# The interpreter runs in Python: small tiles, so that small tests still meet several of them.
INTERPRETED = Config(block_r=32, block_c=32, block_k=32, num_warps=1, num_stages=1, group=2)

_NARROW: dict[int, dict[str, Config]] = {
    80: dict.fromkeys(("statistics", "weights", "pairwise"), _AMPERE),
    86: dict.fromkeys(("statistics", "weights", "pairwise"), _AMPERE),
    89: dict.fromkeys(("statistics", "weights", "pairwise"), _AMPERE),
    90: dict.fromkeys(("statistics", "weights", "pairwise"), _HOPPER),
}


def supported(capability: int) -> bool:
    """Whether there are configurations for a compute capability, such as 90."""
    return capability >= min(_NARROW)


def config(kernel: str, dtype: torch.dtype, capability: int) -> Config:
    """The configuration of the nearest architecture that is not newer."""
    if dtype == torch.float32:
        return _FLOAT32
    if kernel == "finish":
        return _FINISH
    return _NARROW[max(known for known in _NARROW if known <= capability)][kernel]
