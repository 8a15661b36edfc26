"""The engine's accuracy test, written once: cases, and what an implementation must satisfy on each.

Truth is `reference` in float64 on the very inputs the implementation gets. The yardstick is `reference` in the
precision of those inputs: twice its error is allowed, or 4 ulp of the largest entry, for each output apart.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from leanclip.ops import Pairs, Sigmoid, Terms, reference

TEMPERATURES = (1.0, 0.07, 0.01)
KINDS = ("random", "equal", "one-hot", "antipodal")


@dataclass(frozen=True, kw_only=True)
class Case:
    rows: int
    cols: int
    dim: int
    tau: float
    kind: str = "random"
    offset: int = 0
    mask_positives: bool = True
    groups: bool = False
    own_scales: bool = False  # one per anchor
    weights: bool = False  # of the pairs, for the sigmoid

    def __str__(self) -> str:
        extras = [name for name in ("groups", "own_scales", "weights") if getattr(self, name)]
        kept = [] if self.mask_positives else ["positives"]
        return "-".join([f"{self.rows}x{self.cols}x{self.dim}", f"tau{self.tau:g}", self.kind, *extras, *kept])


def square(size: int, dim: int, tau: float, **more: Any) -> Case:
    return Case(rows=size, cols=size, dim=dim, tau=tau, **more)


def small_cases() -> list[Case]:
    """Sizes that the interpreter can manage."""
    shapes = ((1, 3), (2, 96), (127, 3), (127, 96))
    found = [square(size, dim, tau) for size, dim in shapes for tau in TEMPERATURES]
    found += [square(40, 16, tau, kind=kind) for kind in KINDS[1:] for tau in TEMPERATURES]
    for tau in (0.07, 0.01):
        found.append(Case(rows=37, cols=101, dim=24, tau=tau, offset=60))
        found.append(Case(rows=70, cols=30, dim=24, tau=tau, offset=-20, mask_positives=False))
        found.append(square(50, 24, tau, groups=True))
        found.append(square(50, 24, tau, groups=True, mask_positives=False))
        found.append(square(70, 24, tau, own_scales=True))
        found.append(Case(rows=70, cols=101, dim=24, tau=tau, offset=20, mask_positives=False, weights=True))
    return found


def large_cases(*, every: bool = False) -> list[Case]:
    """With `every`, each shape at each temperature; without, the largest shapes at one: a CPU has its limits."""
    found = [square(size, dim, tau) for size, dim in ((1, 512), (2, 1280), (127, 512)) for tau in TEMPERATURES]
    largest = ((1000, 3, 0.07), (1000, 96, 1.0), (1000, 512, 0.01), (1000, 1280, 0.07), (127, 1280, 0.01))
    taus = {tau: (TEMPERATURES if every else (tau,)) for _, _, tau in largest}
    found += [square(size, dim, each) for size, dim, tau in largest for each in taus[tau]]
    for tau in TEMPERATURES if every else (0.01,):
        found += [square(300, 96, tau, kind=kind) for kind in KINDS[1:]]
        found.append(square(300, 96, tau, own_scales=True, groups=True))
        found.append(Case(rows=250, cols=700, dim=96, tau=tau, offset=400, own_scales=True))
        found.append(Case(rows=700, cols=250, dim=96, tau=tau, offset=-300, mask_positives=False))
    return found


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Embeddings are exact in the dtype under test, scalars in float32, so that truth sees the same numbers."""

    pairs: Pairs
    row_scale: Tensor
    col_scale: Tensor
    diagonal: Tensor
    bias: Tensor
    weight: Tensor
    sides: tuple[Tensor, Tensor] | None
    order: Tensor | None = None  # of the features, where they were shuffled

    @classmethod
    def of(cls, case: Case, dtype: torch.dtype, device: str) -> "Inputs":
        draw = torch.Generator().manual_seed(case.rows * 7919 + case.dim)
        rows, cols = _embeddings(case, draw)
        scales = []
        for count in (case.rows, case.cols):
            spread = 0.5 + 0.5 * torch.rand(count, generator=draw) if case.own_scales else torch.tensor(1.0)
            scales.append((spread / case.tau).to(device))
        groups = [torch.arange(count) + shift for count, shift in ((case.rows, case.offset), (case.cols, 0))]
        return cls(
            row_scale=scales[0],
            col_scale=scales[1],
            diagonal=-torch.rand(case.rows, generator=draw).to(device),
            bias=torch.tensor(-3.0, device=device),
            weight=torch.tensor(0.3, device=device),
            sides=(_weights(case.rows, draw).to(device), _weights(case.cols, draw).to(device))
            if case.weights
            else None,
            pairs=Pairs(
                rows=rows.to(device, dtype),
                cols=cols.to(device, dtype),
                offset=case.offset,
                mask_positives=case.mask_positives,
                groups=((groups[0] // 3).to(device), (groups[1] // 3).to(device)) if case.groups else None,
            ),
        )

    def embeddings(self, dtype: torch.dtype) -> Pairs:
        return replace(self.pairs, rows=self.pairs.rows.to(dtype), cols=self.pairs.cols.to(dtype))

    def terms(self) -> tuple[Terms, Terms]:
        """Weights as InfoNCE has them, finite also for anchors without pairs."""
        by_rows, by_cols = reference.statistics(
            self.embeddings(torch.float64), self.row_scale.double(), self.col_scale.double()
        )
        assert by_cols is not None
        return tuple(
            Terms(scale, -torch.nn.functional.softplus(side.log_sum).float())
            for scale, side in ((self.row_scale, by_rows), (self.col_scale, by_cols))
        )  # pyright: ignore[reportReturnType]


def outputs(
    engine: Any,
    inputs: Inputs,
    dtype: torch.dtype,
    scalars: torch.dtype,
    weights: tuple[Terms, Terms] | None = None,
) -> dict[str, Tensor]:
    """Everything the engine computes, by name, with embeddings and scalars cast first."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(scalars)

    pairs, diagonal = inputs.embeddings(dtype), cast(inputs.diagonal)
    by_rows, by_cols = engine.statistics(pairs, cast(inputs.row_scale), cast(inputs.col_scale))
    assert by_cols is not None
    row_terms, col_terms = (Terms(cast(scale), cast(weight)) for scale, weight in weights or inputs.terms())
    both = engine.gradients(pairs, row_terms, col_terms, diagonal)
    one = engine.gradients(pairs, row_terms, col_terms, diagonal, needs=(True, False))
    other = engine.gradients(pairs, row_terms, col_terms, diagonal, needs=(False, True))
    sides = None if inputs.sides is None else (cast(inputs.sides[0]), cast(inputs.sides[1]))
    sigmoid = Sigmoid(cast(inputs.row_scale.max()), cast(inputs.bias), cast(inputs.weight), sides)
    sums = engine.pairwise(pairs, sigmoid, diagonal)
    assert one.cols is None and other.rows is None
    found = {
        "row log_sum": by_rows.log_sum,
        "row mean": by_rows.mean,
        "col log_sum": by_cols.log_sum,
        "col mean": by_cols.mean,
        "d_rows": both.rows,
        "d_cols": both.cols,
        "d_rows alone": one.rows,
        "d_cols alone": other.cols,
        "softplus": sums.softplus,
        "weight": sums.weight,
        "similarity": sums.similarity,
        "pairwise d_rows": sums.gradients.rows,
        "pairwise d_cols": sums.gradients.cols,
    }
    present = {name: tensor for name, tensor in found.items() if tensor is not None}
    if inputs.order is not None:
        back = inputs.order.argsort()
        present = {name: tensor[:, back] if tensor.ndim == 2 else tensor for name, tensor in present.items()}
    return present


def check(engine: Any, case: Case, dtype: torch.dtype, device: str = "cpu", *, slack: float = 1.0) -> None:
    """Assert the yardstick for every output. `slack` widens it, for forms meant for narrower inputs."""
    inputs = Inputs.of(case, dtype, device)
    weights = inputs.terms()
    truth = outputs(reference, inputs, torch.float64, torch.float64, weights)
    plain = [outputs(reference, shuffled, dtype, dtype, weights) for shuffled in _orders(case, inputs)]
    found = outputs(engine, inputs, dtype, torch.float32, weights)
    assert found.keys() == truth.keys()
    failures = []
    for name, expected in truth.items():
        assert found[name].dtype == torch.float32
        # Only the log-sum of an anchor without pairs is infinite.
        finite = expected.isfinite()
        assert torch.equal(found[name].isfinite(), finite), f"{name} is not finite"
        if not finite.any():
            continue
        error = _error(found[name], expected)
        yardstick = max(_error(each[name], expected) for each in plain)
        largest = expected[finite].abs().max().item()
        # The absolute error of a logarithm is the relative error of the sum.
        largest = max(largest, 1.0) if name.endswith("log_sum") else largest
        allowed = slack * max(2 * yardstick, 4 * torch.finfo(dtype).eps * largest)
        if not error <= allowed:
            failures.append(f"{name}: error {error:.3g}, plain {yardstick:.3g}, largest entry {largest:.3g}")
    assert not failures, "; ".join(failures)


def _error(found: Tensor, expected: Tensor) -> float:
    finite = expected.isfinite()
    return (found.double() - expected)[finite].abs().max().item()


def _orders(case: Case, inputs: Inputs) -> list[Inputs]:
    """Where all similarities are one number, plain PyTorch's error is one draw: take the worst of several orders."""
    if case.kind not in ("equal", "antipodal"):
        return [inputs]
    draw = torch.Generator().manual_seed(0)
    rows, cols = inputs.pairs.rows, inputs.pairs.cols
    orders = [torch.randperm(case.dim, generator=draw).to(rows.device) for _ in range(8)]
    shuffled = [replace(inputs.pairs, rows=rows[:, at], cols=cols[:, at]) for at in orders]
    return [inputs, *(replace(inputs, pairs=pairs, order=at) for pairs, at in zip(shuffled, orders, strict=True))]


def _weights(count: int, draw: torch.Generator) -> Tensor:
    """Random ones, with equal stretches that a tile may see alone."""
    weights = torch.rand(count, generator=draw) * (torch.rand(count, generator=draw) > 0.2)
    weights[: count // 2] = 0.5
    return weights


def _embeddings(case: Case, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    def unit(count: int) -> Tensor:
        return torch.nn.functional.normalize(torch.randn(count, case.dim, generator=draw), dim=1)

    rows, cols = unit(case.rows), unit(case.cols)
    if case.kind == "equal":
        return rows[:1].expand_as(rows).clone(), rows[:1].expand(case.cols, -1).clone()
    if case.kind == "one-hot":
        hot = torch.eye(case.dim)
        return hot[torch.arange(case.rows) % case.dim], hot[torch.arange(case.cols) % case.dim]
    if case.kind == "antipodal":
        return rows, -rows[:1].expand(case.cols, -1) * (1 - 2 * (torch.arange(case.cols) % 2))[:, None]
    return rows, cols
