"""How the fused loss kernels divide the matrix of similarities: what they allocate follows from it.

Apart from the kernels, so that memory can be planned where Triton is not installed.
"""

import math

PARTIAL_BYTES = 128 << 20  # of partial sums, for each side
WEIGHT_BYTES = 256 << 20  # of a block of weights
LONGEST_STRIP = 32  # tiles
# Up to so many pairs, launches and the host cost more than memory: statistics come from a matrix of float32
# (64 MiB), and nothing is described to the copy engine.
DENSE_PAIRS = 4096**2


def ceil_div(total: int, part: int) -> int:
    return -(-total // part)


def panel_rows(num_rows: int, block: int, limit: int) -> int:
    """Rows whose partial sums are held at once: a multiple of the block, or all."""
    return num_rows if num_rows <= limit else max(block, limit // block * block)


def strip_tiles(num_tiles: int, num_processors: int) -> int:
    """Tiles per program: long strips store fewer partial sums, but every processor should get several strips."""
    return max(1, min(LONGEST_STRIP, num_tiles // (8 * num_processors)))


def block_shape(num_rows: int, num_cols: int, elements: int) -> tuple[int, int]:
    """Half as high as wide, in multiples of 256 unless all fits: the two products then fill the chip alike."""
    if num_rows * (math.ceil(num_cols / 8) * 8) <= elements:
        return num_rows, num_cols
    width = min(num_cols, max(256, int((2 * elements) ** 0.5) // 256 * 256))
    height = min(num_rows, max(256, elements // width // 256 * 256))
    return height, min(num_cols, max(256, elements // height // 256 * 256))
