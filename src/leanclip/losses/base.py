"""What all losses have in common: the calls that a training loop makes."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from leanclip.distributed import Ranks
from leanclip.losses.attach import without_autocast
from leanclip.losses.output import LossOutput


class Local(NamedTuple):
    """A rank's embeddings, of one precision, and their place in the global batch."""

    image: Tensor
    text: Tensor
    ranks: Ranks
    batch: int

    @property
    def mine(self) -> slice:
        return self.ranks.share(self.batch)

    def gathered(self) -> tuple[Tensor, Tensor]:
        """Everybody's image and text embeddings, by one collective."""
        if self.ranks.size == 1:
            return self.image.detach(), self.text.detach()
        both = self.ranks.gather(torch.cat([self.image, self.text], 1).detach(), self.batch)
        image, text = both.chunk(2, 1)
        return image.contiguous(), text.contiguous()

    def everybodys(self, vector: Tensor | None) -> Tensor | None:
        """A vector of one number per local sample, for the whole batch, on the compute device."""
        if vector is None:
            return None
        return self.ranks.gather(vector.to(self.image.device, non_blocking=True), self.batch)


class ContrastiveLoss(nn.Module):
    """A loss over a batch of L2-normalised image and text embeddings. Works inside any training loop."""

    def __init__(self, *, name: str, implementation: str, lr_tau: float | None, follows_schedule: bool) -> None:
        super().__init__()
        self.name, self.implementation = name, implementation
        self.lr_tau, self.follows_schedule = lr_tau, follows_schedule

    @torch.compiler.disable
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        image_features: Tensor,
        text_features: Tensor,
        sample_ids: Tensor | None = None,
        *,
        text_ids: Tensor | None = None,
        groups: Tensor | None = None,
        global_batch: int | None = None,
    ) -> LossOutput:
        """The loss of a batch; row i of both embeddings is sample `sample_ids[i]`.

        Where torch.distributed is initialised, every rank gives its part of the global batch and gets the loss of the
        whole, with the complete gradient of its own embeddings times the number of ranks: averaged by DDP, the
        parameters' gradients are those of one process. Ranks have equal parts, or those of `Ranks.share` of
        `global_batch`.

        The losses with a state per sample need the ids. `text_ids` gives captions a state of their own instead of
        their image's. Samples with the same number in `groups` (several captions of one image in a batch) are not
        each other's negatives.
        """
        image, text = same_precision(image_features, text_features)
        ranks = Ranks.current()
        batch = len(image) * ranks.size if global_batch is None else global_batch
        mine = ranks.share(batch)
        if mine.stop - mine.start != len(image):
            raise ValueError(
                f"rank {ranks.rank} of {ranks.size} has {len(image)} samples, but its share of a global batch of"
                f" {batch} is {mine.stop - mine.start}"
            )
        with without_autocast(image.device.type):
            return self.compute(Local(image, text, ranks, batch), sample_ids, text_ids, groups)

    def compute(
        self,
        local: "Local",
        sample_ids: Tensor | None,
        text_ids: Tensor | None,
        groups: Tensor | None,
    ) -> LossOutput:
        """The loss itself, on embeddings of one precision."""
        raise NotImplementedError

    def temperature(self) -> Tensor:
        """The current tau, on the device."""
        raise NotImplementedError

    def set_epoch(self, epoch: float, epochs: int) -> None:
        """Tell the loss where the run is. Losses with a running estimate move gamma; the others ignore it."""

    def rollback(self) -> None:
        """Undo the last update of the per-sample state, for a step that is skipped."""

    def param_groups(self) -> list[dict[str, Any]]:
        """For the optimizer: the temperature (and bias) with their own learning rate and no weight decay.

        Without `lr`, the optimizer's own applies. `follows_schedule` says whether it goes along with the model's
        warm-up and decay.
        """
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if not parameters:
            return []
        group: dict[str, Any] = {
            "name": "temperature",
            "params": parameters,
            "weight_decay": 0.0,
            "follows_schedule": self.follows_schedule,
        }
        return [group | ({} if self.lr_tau is None else {"lr": self.lr_tau})]


def same_precision(image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
    """Both embeddings in one dtype: autocast's where it is on, as for any product, else the wider of the two."""
    if image.ndim != 2 or image.shape != text.shape:
        raise ValueError(
            f"expected two (batch, dim) tensors of one shape, got {(*image.shape,)} and {(*text.shape,)}"
        )
    device = image.device.type
    if torch.is_autocast_enabled(device) and image.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    else:
        dtype = torch.promote_types(image.dtype, text.dtype)
    return image.to(dtype), text.to(dtype)


def work_dtype(features: Tensor) -> torch.dtype:
    """What scalars are computed in: float64 for float64 embeddings, else float32."""
    return torch.float64 if features.dtype == torch.float64 else torch.float32
