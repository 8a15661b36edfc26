"""The arguments and results of the engine: named tensors, never positional lists.

Shape suffixes: R rows (anchors of one block), C columns (everything they are compared with), D embedding size.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

Needs = tuple[bool, bool]  # whether the gradients of rows and of columns are required


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """The similarity matrix s = rows @ cols.T, and which of its pairs (row i, column j) count.

    The positive of row i is column `i + offset`. With `mask_positives` it is left out of the sums over pairs.
    With group ids, pairs of one group that are not the positive are left out: several captions of one image
    are then not each other's negatives.
    """

    rows: Tensor  # (R, D)
    cols: Tensor  # (C, D)
    offset: int = 0
    mask_positives: bool = False
    groups: tuple[Tensor, Tensor] | None = None  # (R,) and (C,) integers, of the rows and of the columns

    def transposed(self) -> "Pairs":
        """The same pairs with rows and columns swapped."""
        return Pairs(
            rows=self.cols,
            cols=self.rows,
            offset=-self.offset,
            mask_positives=self.mask_positives,
            groups=None if self.groups is None else (self.groups[1], self.groups[0]),
        )


class Statistics(NamedTuple):
    """Of each anchor, over the pairs that count. An anchor without pairs has log_sum -inf and mean 0."""

    log_sum: Tensor  # (R,) log sum_j exp(scale_i s_ij)
    mean: Tensor  # (R,) sum_j p_ij s_ij with p_ij = exp(scale_i s_ij - log_sum_i)


class Terms(NamedTuple):
    """How one side's anchors weigh their pairs: exp(scale_i s_ij + log_weight_i).

    Temperature, shift, log-normaliser and weight of an anchor all fold into these two numbers.
    """

    scale: Tensor  # () or (R,)
    log_weight: Tensor  # (R,)


class Sigmoid(NamedTuple):
    """How a sigmoid weighs all pairs: weight * sigmoid(scale s_ij + bias).

    With `sides`, all sums and weights over pairs have the factor `sides[0]_i + sides[1]_j`.
    """

    scale: Tensor  # ()
    bias: Tensor  # ()
    weight: Tensor  # ()
    sides: tuple[Tensor, Tensor] | None = None  # (R,) and (C,)


class Gradients(NamedTuple):
    rows: Tensor | None  # (R, D) sum_j W_ij cols_j
    cols: Tensor | None  # (C, D) sum_i W_ij rows_i


class Pairwise(NamedTuple):
    """Of each row, over the pairs that count, with z_ij = scale s_ij + bias, each with its factor if it has one."""

    softplus: Tensor  # (R,) sum_j log(1 + exp z_ij)
    weight: Tensor  # (R,) sum_j sigmoid(z_ij)
    similarity: Tensor  # (R,) sum_j sigmoid(z_ij) s_ij
    gradients: Gradients


class StoredTemperature(NamedTuple):
    """One temperature for all anchors, as a loss keeps it between two optimizer steps."""

    stored: Tensor  # () tau, or log(1/tau) where it is learned
    learned: bool
    bounds: tuple[float, float] = (0.0, 0.0)  # of log(1/tau)
    previous: Tensor | None = None  # log(1/tau) before the optimizer's last step, if that step may shrink
    drop_above: float = 0.0  # from this `previous` on the step shrinks
    drop_to: float = 1.0  # this share of it


class AnchorForm(NamedTuple):
    """How a loss with one temperature turns statistics into its value, its slope and the weights of its anchors."""

    decoupled: bool  # without a running estimate: the normaliser leaves the positive out
    times_tau: bool  # the value is 2 tau (mean log norm + rho), else the cross-entropy
    weight_by_tau: bool
    slope: Literal["plain", "published", "exact"] | None  # of the value for log(1/tau)
    slope_factor: float = 1.0  # plain
    log_eps: float = 0.0
    rho: float = 0.0


class Estimates(NamedTuple):
    """The running estimates of all samples, and the share of the newest batch."""

    shares: Tensor  # (2,) of the old estimate and of the batch
    image: Tensor  # (n,) log u
    text: Tensor  # (n,)
    visited: Tensor  # () how many samples have an estimate
    update: bool


class Implementation(Protocol):
    """The signatures that `reference`, `tiled` and `triton` share; `reference` states what each call equals."""

    def statistics(
        self, pairs: Pairs, row_scale: Tensor, col_scale: Tensor | None
    ) -> tuple[Statistics, Statistics | None]: ...

    def gradients(
        self, pairs: Pairs, row_terms: Terms, col_terms: Terms, diagonal: Tensor, *, needs: Needs = ...
    ) -> Gradients: ...

    def pairwise(self, pairs: Pairs, sigmoid: Sigmoid, diagonal: Tensor, *, needs: Needs = ...) -> Pairwise: ...
