"""The interface of all losses: the calls that a training loop makes, and what they return."""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from leanclip.distributed import PendingGather, Ranks
from leanclip.errors import ArgumentError
from leanclip.losses.pair_weights import PairWeights
from leanclip.losses.sample_state import SampleState
from leanclip.ops import Gradients, Implementation, Pairs, accumulator_dtype, scalar_kernels

Metric = Tensor | float | str | Callable[[], Tensor]
SMALLEST_MEAN_WEIGHT = 1e-6  # of a batch: one whose pairs all have weight 0 teaches nothing, instead of NaN


class Metrics(Mapping[str, Tensor | float | str]):
    """Numbers about a step, computed when they are read: a step that is not logged does not compute them."""

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = metrics

    def __getitem__(self, name: str) -> Tensor | float | str:
        value = self._metrics[name]
        return value() if callable(value) and not isinstance(value, Tensor) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._metrics)

    def __len__(self) -> int:
        return len(self._metrics)


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """`loss` carries the gradients; `metrics` are detached and stay on the device, so reading one waits for it."""

    loss: Tensor
    metrics: Mapping[str, Tensor | float | str]


class Local(NamedTuple):
    """The embeddings of a rank, in one precision, and their position in the global batch."""

    image: Tensor
    text: Tensor
    ranks: Ranks
    batch: int
    all_images: PendingGather | None = None  # if their gather was started early
    groups: Tensor | None = None  # (B,) of the whole batch
    weights: Tensor | None = None  # (B,) of the whole batch, divided by their mean
    columns: Tensor | None = None  # (B,) of the whole batch, in tables of scores with several captions per sample

    @property
    def share(self) -> slice:
        return self.ranks.share(self.batch)

    @property
    def plain(self) -> bool:
        """One process, whose pairs all count alike."""
        return self.ranks.size == 1 and self.batch > 1 and self.groups is None and self.weights is None

    def gathered(self) -> tuple[Tensor, Tensor]:
        """The image and text embeddings of all ranks, by one collective, or two if the images were started early."""
        image, text = self.image.detach(), self.text.detach()
        if self.ranks.size == 1:
            return image, text
        if self.all_images is not None:
            texts = self.ranks.start_gather(text, self.batch, purpose="embeddings")
            return self.all_images.wait(), texts.wait()
        both = self.ranks.gather(torch.cat([image, text], 1), self.batch, purpose="embeddings")
        image, text = both.chunk(2, 1)
        return image.contiguous(), text.contiguous()

    def with_all(self, groups: Tensor | None, weights: Tensor | None, columns: Tensor | None) -> "Local":
        """With the groups, weights and columns of all ranks, on the compute device."""
        device = self.image.device
        if columns is not None:
            columns = self.ranks.gather(columns.to(device, non_blocking=True), self.batch, purpose="captions")
        if groups is not None:
            groups = self.ranks.gather(groups.to(device, non_blocking=True), self.batch, purpose="groups")
        if weights is not None:
            check_weights(weights, len(self.image))
            local = weights.to(device, accumulator_dtype(self.image.dtype), non_blocking=True)
            weights = self.ranks.gather(local, self.batch, purpose="weights")
            return self._replace(groups=groups, columns=columns).weighted_by(weights)
        return self._replace(groups=groups, columns=columns)

    def weighted_by(self, weights: Tensor) -> "Local":
        """With these weights of all pairs beside those it has."""
        weights = weights if self.weights is None else weights * self.weights
        return self._replace(weights=weights / weights.mean().clamp_min(SMALLEST_MEAN_WEIGHT))

    def pairs(self, rows: Tensor, cols: Tensor, *, mask_positives: bool = False) -> Pairs:
        """Local embeddings of one side against all of the other."""
        return Pairs(
            rows=rows,
            cols=cols,
            offset=self.share.start,
            mask_positives=mask_positives,
            groups=None if self.groups is None else (self.groups[self.share], self.groups),
        )


class ContrastiveLoss(nn.Module):
    """A loss over a batch of L2-normalised image and text embeddings. Works inside any training loop."""

    def __init__(
        self,
        *,
        name: str,
        implementation: str,
        lr_tau: float | None,
        follows_schedule: bool,
        state: SampleState | None = None,
        pair_weights: PairWeights | None = None,
    ) -> None:
        super().__init__()
        self.name, self.implementation = name, implementation
        self.state, self.pair_weights = state, pair_weights
        self.lr_tau, self.follows_schedule = lr_tau, follows_schedule
        self._early: tuple[Tensor, PendingGather] | None = None  # image embeddings, and their gather
        self._since_set_epoch: float = math.inf  # samples; more than an epoch means that a call was forgotten

    @torch.compiler.disable
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        image_features: Tensor,
        text_features: Tensor,
        sample_ids: Tensor | None = None,
        *,
        text_ids: Tensor | None = None,
        groups: Tensor | None = None,
        weights: Tensor | None = None,
        caption_numbers: Tensor | None = None,
        global_batch: int | None = None,
    ) -> LossOutput:
        """The loss of a batch; row i of both embeddings is sample `sample_ids[i]`.

        Where torch.distributed is initialised, every rank gives its part of the global batch and gets the loss of the
        whole, with the complete gradient of its own embeddings times the number of ranks: averaged by DDP, the
        parameters' gradients are those of one process. Ranks have equal parts, or those of `Ranks.share` of
        `global_batch`.

        The losses with a state per sample need the ids. `text_ids` gives captions a state of their own instead of
        their image's. Samples with the same number in `groups` (several captions of one image in a batch) are not
        each other's negatives; a sample without negatives contributes nothing and leaves its state. `weights`, 0 or
        more, multiply what each pair teaches as an anchor, divided by their mean over the global batch; a pair of
        weight 0 is still a negative of the others, and its running estimates go on. `caption_numbers` say
        which of its sample's captions each text is, from 0; with `captions_per_sample` learned weights need them.
        """
        if image_features.ndim != 2 or image_features.shape != text_features.shape:
            shapes = f"{(*image_features.shape,)} and {(*text_features.shape,)}"
            raise ArgumentError(
                f"expected two (batch, dim) tensors of one shape, got {shapes}", code="loss.bad_shapes"
            )
        image, text = in_step_precision(image_features), in_step_precision(text_features)
        dtype = torch.promote_types(image.dtype, text.dtype)
        ranks = Ranks.current()
        batch = len(image) * ranks.size if global_batch is None else global_batch
        early, self._early = self._early, None
        all_images = early[1] if early is not None and early[0] is image_features else None
        local = Local(image.to(dtype), text.to(dtype), ranks, batch, all_images)
        if (expected := local.share.stop - local.share.start) != len(image):
            raise ArgumentError(
                f"rank {ranks.rank} of {ranks.size} has {len(image)} samples, but its share of a global batch of"
                f" {batch} is {expected}",
                code="loss.bad_share",
            )
        columns = None if self.pair_weights is None else self.pair_weights.columns(caption_numbers, len(image))
        with without_autocast(image.device.type):
            return self.compute(local.with_all(groups, weights, columns), sample_ids, text_ids)

    def start_gather(self, image_features: Tensor, *, global_batch: int | None = None) -> None:
        """Start to gather the image embeddings, while the texts are still being embedded.

        Optional, on several ranks: the next call with these very embeddings waits for this gather instead of starting
        one. All ranks do it or none.
        """
        ranks = Ranks.current()
        if ranks.size == 1:
            return
        batch = len(image_features) * ranks.size if global_batch is None else global_batch
        image = in_step_precision(image_features.detach())
        self._early = image_features, ranks.start_gather(image, batch, purpose="embeddings")

    def scalar_kernels(self, engine: Implementation, local: Local, tensors: Sequence[Tensor]) -> Any:
        """The engine's kernels for all scalars of a call with these tensors of the loss; None where it has none, or
        the call needs more."""
        if self.pair_weights is not None or not local.plain:
            return None
        fit = all(tensor.dtype == torch.float32 and tensor.device == local.image.device for tensor in tensors)
        return scalar_kernels(engine) if fit else None

    def compute(self, local: Local, sample_ids: Tensor | None, text_ids: Tensor | None) -> LossOutput:
        """The loss itself, on embeddings of one precision."""
        raise NotImplementedError

    def temperature(self) -> Tensor:
        """The current tau, on the device."""
        raise NotImplementedError

    def set_epoch(self, epoch: float, epochs: int) -> None:
        """Set the epoch of the run, from which running estimates take gamma; learned weights of pairs are fitted."""
        self._since_set_epoch = 0.0
        if self.pair_weights is not None and self.state is not None:
            self.pair_weights.set_epoch(epoch, self.state)

    def rollback(self) -> None:
        """Undo the last update of the per-sample state, for a step that is skipped."""
        if self.state is not None:
            self.state.rollback()

    def resize(self, num_samples: int) -> None:
        """Grow the per-sample tables for samples added to the data."""
        if self.state is not None:
            self.state.resize(num_samples)
        if self.pair_weights is not None:
            self.pair_weights.fit_again()

    def gather_ids(
        self, sample_ids: Tensor | None, text_ids: Tensor | None, local: Local
    ) -> tuple[Tensor, Tensor] | None:
        """The ids of all images and all texts, checked, on the device; one tensor where they are the same."""
        if self.state is None:
            return None
        id_vectors = self.check_ids(sample_ids, text_ids, local)
        for ids in id_vectors:
            self.state.assert_inside(ids)
        on_device = torch.stack([ids.to(local.image.device, non_blocking=True) for ids in id_vectors], 1)
        gathered = local.ranks.gather(on_device.to(self.state.id_dtype), local.batch, purpose="ids")
        by_side = gathered.T.to(torch.int64, memory_format=torch.contiguous_format).unbind()
        return by_side[0], by_side[-1]

    def check_ids(self, sample_ids: Tensor | None, text_ids: Tensor | None, local: Local) -> list[Tensor]:
        """Those of a loss with a state. Whether ids on a device are inside the tables is not checked here."""
        assert self.state is not None
        if sample_ids is None:
            raise ArgumentError(
                f"{self.name} keeps a state per sample: call loss(image, text, sample_ids)", code="loss.no_ids"
            )
        if self.training:
            self._notice_forgotten_epoch(local.batch)
        id_vectors = [sample_ids] if text_ids is None else [sample_ids, text_ids]
        for ids in id_vectors:
            self.state.check(ids)
            if len(ids) != len(local.image):
                raise ArgumentError(f"{len(ids)} ids for {len(local.image)} embeddings", code="loss.bad_ids")
        return id_vectors

    def _notice_forgotten_epoch(self, batch: int) -> None:
        assert self.state is not None
        if self._since_set_epoch > 1.5 * self.state.num_samples:
            self._since_set_epoch = -math.inf  # warn once
            warnings.warn(
                f"{self.name}: set_epoch(epoch, epochs) was not called for more than an epoch, so gamma and"
                " learned weights of pairs stay as they are; call it at the start of every epoch",
                stacklevel=9,
            )
        self._since_set_epoch += batch

    def param_groups(self) -> list[dict[str, Any]]:
        """For the optimizer: the temperature (and bias) with their own learning rate and no weight decay.

        Without `lr`, the optimizer's own applies. With `follows_schedule` it follows the model's warm-up and decay.
        """
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if not parameters:
            return []
        group = {"params": parameters, "weight_decay": 0.0, "follows_schedule": self.follows_schedule}
        return [{"name": "temperature"} | group | ({} if self.lr_tau is None else {"lr": self.lr_tau})]


def check_weights(weights: Tensor, count: int) -> None:
    """Refuse other shapes and values. Weights on the host are checked there; on a device without waiting for it."""
    if weights.shape != (count,):
        raise ArgumentError(f"weights of shape {tuple(weights.shape)} for {count} pairs", code="loss.bad_weights")
    if not count:
        return
    low, high = weights.aminmax()
    valid = (low >= 0) & (high < torch.inf)  # false for NaN
    if weights.device.type != "cpu":
        torch.ops.aten._assert_async.msg(valid, "a pair's weight is negative or not finite")
    elif not valid:
        raise ArgumentError(
            f"the weights of pairs lie between {float(low)} and {float(high)}; give finite numbers, 0 or more",
            code="loss.bad_weights",
        )


def in_step_precision(features: Tensor) -> Tensor:
    """In autocast's dtype where autocast is on, as for any product."""
    device = features.device.type
    if torch.is_autocast_enabled(device) and features.dtype != torch.float64:
        return features.to(torch.get_autocast_dtype(device))
    return features


Pull = Callable[..., Gradients]
DENSE = torch.contiguous_format


def attach_gradients(
    value: Tensor,
    image: Tensor,
    text: Tensor,
    pull: Pull,
    saved: Sequence[Tensor],
    slopes: Sequence[tuple[Tensor, Tensor]],
) -> Tensor:
    """`value` with gradients: those of `pull` for the embeddings, and for each parameter its slope.

    `pull(image, text, *saved, needs=...)` runs in the backward pass, so that evaluation does not compute them.
    """
    kept = (*(slope for _, slope in slopes), *saved)  # in a tuple, because torch inspects every positional argument
    result = _AttachGradients.apply(image, text, value, pull, kept, *(parameter for parameter, _ in slopes))
    assert isinstance(result, Tensor)
    return result


class _AttachGradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        image: Tensor,
        text: Tensor,
        value: Tensor,
        pull: Pull,
        kept: tuple[Tensor, ...],
        *parameters: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(image, text, *kept)
        ctx.pull, ctx.num_parameters = pull, len(parameters)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,) = grad_outputs
        image, text, *rest = ctx.saved_tensors
        slopes, saved = rest[: ctx.num_parameters], rest[ctx.num_parameters :]
        with without_autocast(image.device.type):
            gradients = ctx.pull(image, text, *saved, needs=ctx.needs_input_grad[:2])
        # Multiplied before it is rounded to the embeddings' dtype, and without a copy in between.
        scaled = (
            None if gradient is None else torch.mul(gradient, grad, out=torch.empty_like(side, memory_format=DENSE))
            for gradient, side in zip(gradients, (image, text), strict=True)
        )
        return (*scaled, None, None, None, *(slope * grad for slope in slopes))


def without_autocast(device: str) -> contextlib.AbstractContextManager[object]:
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()
