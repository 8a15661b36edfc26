"""Tile shapes per kernel and architecture. Fixed by measurement or by shared memory, never at run time."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Config:
    block_r: int
    block_c: int
    block_k: int
    num_warps: int
    num_stages: int
    group: int = 16  # column blocks that run together

    def options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}

    def blocks(self) -> dict[str, int]:
        return {"BLOCK_R": self.block_r, "BLOCK_C": self.block_c, "BLOCK_K": self.block_k, "GROUP": self.group}


_FINISH = Config(block_r=64, block_c=64, block_k=32, num_warps=4, num_stages=2)
# Two blocks per processor, so that one computes exponentials while the other multiplies: 255 registers by 128 threads
# and 96 KiB each. Larger tiles read less from L2 but leave one block alone, and lose.
_HOPPER = Config(block_r=128, block_c=128, block_k=64, num_warps=4, num_stages=3, group=8)
_AMPERE = Config(block_r=128, block_c=128, block_k=32, num_warps=8, num_stages=3)
# The interpreter runs in Python: small tiles, so that small tests still use several of them.
INTERPRETED = Config(block_r=64, block_c=64, block_k=32, num_warps=2, num_stages=1, group=2)


def config(kernel: str, capability: int) -> Config:
    """A tile has at most 128 columns: the fast softplus multiplies as many factors up to 2 as half a tile has."""
    if kernel == "finish":
        return _FINISH
    if capability < 90:
        return _AMPERE
    return replace(_HOPPER, group=2) if kernel == "weights" else _HOPPER
