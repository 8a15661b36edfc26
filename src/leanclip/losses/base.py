"""What all losses have in common: the calls that a training loop makes."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from leanclip.distributed import PendingGather, Ranks
from leanclip.losses.custom_gradient import without_autocast
from leanclip.losses.output import LossOutput
from leanclip.ops import Pairs


class Local(NamedTuple):
    """A rank's embeddings, of one precision, and their place in the global batch."""

    image: Tensor
    text: Tensor
    ranks: Ranks
    batch: int
    all_images: PendingGather | None = None  # where their gather is on its way already

    @property
    def share(self) -> slice:
        return self.ranks.share(self.batch)

    def gathered(self) -> tuple[Tensor, Tensor]:
        """Everybody's image and text embeddings, by one collective, or one each if the images went ahead."""
        image, text = self.image.detach(), self.text.detach()
        if self.ranks.size == 1:
            return image, text
        if self.all_images is not None:
            texts = self.ranks.start_gather(text, self.batch, purpose="embeddings")
            return self.all_images.wait(), texts.wait()
        both = self.ranks.gather(torch.cat([image, text], 1), self.batch, purpose="embeddings")
        image, text = both.chunk(2, 1)
        return image.contiguous(), text.contiguous()

    def pairs(self, rows: Tensor, cols: Tensor, all_groups: Tensor | None, *, mask_positives: bool = False) -> Pairs:
        """Local embeddings of one side against all of the other."""
        return Pairs(
            rows=rows,
            cols=cols,
            offset=self.share.start,
            mask_positives=mask_positives,
            row_groups=None if all_groups is None else all_groups[self.share],
            col_groups=all_groups,
        )

    def groups(self, groups: Tensor | None) -> Tensor | None:
        """The whole batch's groups, on the compute device."""
        if groups is None:
            return None
        return self.ranks.gather(groups.to(self.image.device, non_blocking=True), self.batch, purpose="groups")


class ContrastiveLoss(nn.Module):
    """A loss over a batch of L2-normalised image and text embeddings. Works inside any training loop."""

    def __init__(self, *, name: str, implementation: str, lr_tau: float | None, follows_schedule: bool) -> None:
        super().__init__()
        self.name, self.implementation = name, implementation
        self.lr_tau, self.follows_schedule = lr_tau, follows_schedule
        self._ahead: tuple[Tensor, PendingGather] | None = None

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
        ahead, self._ahead = self._ahead, None
        sent = ahead[1] if ahead is not None and ahead[0] is image_features else None
        mine = ranks.share(batch)
        if mine.stop - mine.start != len(image):
            raise ValueError(
                f"rank {ranks.rank} of {ranks.size} has {len(image)} samples, but its share of a global batch of"
                f" {batch} is {mine.stop - mine.start}"
            )
        with without_autocast(image.device.type):
            local = Local(image, text, ranks, batch, sent)
            return self.compute(local, sample_ids, text_ids, groups)

    def send_ahead(self, image_features: Tensor, *, global_batch: int | None = None) -> None:
        """Start to gather the image embeddings, while the texts are still being embedded.

        For several ranks, and optional: the call with these very embeddings then waits for them instead of sending
        them. All ranks do it or none.
        """
        ranks = Ranks.current()
        if ranks.size == 1:
            return
        batch = len(image_features) * ranks.size if global_batch is None else global_batch
        image = in_step_precision(image_features.detach())
        self._ahead = image_features, ranks.start_gather(image, batch, purpose="embeddings")

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
    image, text = in_step_precision(image), in_step_precision(text)
    dtype = torch.promote_types(image.dtype, text.dtype)
    return image.to(dtype), text.to(dtype)


def in_step_precision(features: Tensor) -> Tensor:
    """In autocast's dtype where that is on, as for any product."""
    device = features.device.type
    if torch.is_autocast_enabled(device) and features.dtype != torch.float64:
        return features.to(torch.get_autocast_dtype(device))
    return features


def work_dtype(features: Tensor) -> torch.dtype:
    """What scalars are computed in: float64 for float64 embeddings, else float32."""
    return torch.float64 if features.dtype == torch.float64 else torch.float32
