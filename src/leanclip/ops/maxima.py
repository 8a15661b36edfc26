"""The largest similarity of each row."""

import torch
from torch import Tensor

ROWS = 1024  # per tile


@torch.no_grad()
def row_maxima(rows: Tensor, cols: Tensor) -> Tensor:
    """(rows @ cols.T).amax(1) in float32 (float64 for float64 inputs), a tile at a time."""
    dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
    columns = cols.to(dtype)
    return torch.cat([(tile.to(dtype) @ columns.T).amax(1) for tile in rows.split(ROWS)])
