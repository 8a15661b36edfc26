"""A step before it is run: the real `training_step` traced on fake tensors, for any GPU and number of processes."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from leanclip.data import Batch
from leanclip.data.crops.ring import device_bytes
from leanclip.device import autocast_of
from leanclip.distributed import TRAFFIC_COUNTER, Ranks, TrafficCounter
from leanclip.distributed.ddp_fsdp import repeated_blocks
from leanclip.losses import ContrastiveLoss
from leanclip.models import TwoTower
from leanclip.models.text_length import Texts, layout
from leanclip.ops.attention import Packing
from leanclip.optim import OptimConfig, create_optimizer, weight_decay_groups
from leanclip.optim.loss_scale import LossScale
from leanclip.planning.compiled_cost import traced_compile
from leanclip.planning.simulated_gpu import simulated
from leanclip.planning.step_trace import CPU, Kernel, Trace, faked, tracing, uncollected
from leanclip.runs.config import TrainConfig
from leanclip.training.model_setup import loss_for_run, model_for_run, uses_compile, uses_cuda_graph
from leanclip.training.step import training_step
from leanclip.training.step_context import StepContext

PARTS = (
    "weights",
    "gathered weights",
    "gradients",
    "optimizer",
    "activations",
    "batch",
    "loss",
    "state tables",
    "workspace",
)
WORKSPACE = 65 << 20  # bytes that cuBLAS keeps, measured on an H200
# Micro-batches that are traced, without and again with gradients. The first one casts the weights and allocates the
# gradients, the last one stands for all later ones.
TRACED = 2
CUDA = torch.device("cuda")
GOLDEN = (5**0.5 - 1) / 2  # multiples of it are spread evenly


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """One rank's step."""

    memory: dict[str, int]  # bytes at the peak, by part
    kernels: Counter[Kernel]
    sent: TrafficCounter  # by the loss
    trained_bytes: int  # of the weights
    parameters: int  # trained tensors
    parts: int  # micro-batches
    compiled: bool  # the towers' blocks
    cuda_graph: bool  # replays the step up to the gradients
    resizing: int = 0  # bytes for the next batch's images, where the GPU resizes them
    feature_sizes: tuple[int | None, int | None] = (None, None)  # of locked towers that run once

    @property
    def peak(self) -> int:
        return sum(self.memory.values())

    @property
    def needed(self) -> int:
        """In a run, where the next batch is already on the device."""
        return self.peak + self.memory["batch"] + self.resizing


@uncollected()
def predict_step(
    config: TrainConfig,
    *,
    samples: int,
    ranks: int = 1,
    parts: int = 1,
    capability: tuple[int, int] = (9, 0),
    processors: int = 132,
    caption_length: float | None = None,
    make_loss: Callable[[], ContrastiveLoss] | None = None,
) -> Predicted:
    """Trace a step of a resolved configuration on the first of `ranks` GPUs, in `parts` micro-batches.

    Captions have `caption_length` tokens on average, or all that the model takes. `make_loss`
    replaces the configured loss.
    """
    batch, precision = config.data.global_batch_size, config.run.precision
    assert batch is not None
    model = _model(config, ranks, config.run.epochs * max(1, samples // batch))
    TRAFFIC_COUNTER.clear()
    with tracing(capability) as trace, simulated(trace, ranks=ranks, processors=processors) as first:
        model = faked(model, trace, "weights").train()
        trace.enter("other", "state tables")
        loss = make_loss() if make_loss else loss_for_run(config, samples)
        if precision == "fp64":
            loss = faked(loss, trace, "state tables", torch.float64)
        loss.set_epoch(0, 1)
        optimizer = create_optimizer(
            _open_values_filled(config.optim), [*weight_decay_groups(model, 0.1), *loss.param_groups()]
        )
        _fill_state(optimizer, trace, keep=ranks > 1)
        data = _batch(model, len(range(*first.share(batch).indices(batch))), trace, caption_length)
        towers = _Towers(model, trace, parts)
        context = StepContext(
            towers=towers,
            loss=loss,
            optimizer=optimizer,
            global_batch=batch,
            micro_batches=parts,
            autocast=autocast_of(precision, CPU),
            grad_clip_norm=config.optim.grad_clip_norm,
            scale=LossScale.of(precision),
            ranks=first,
            phase=towers.enter_phase,
        )
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(lambda p: trace.hold(p.grad, "gradients"))
        trace.enter("other")
        trace.start_again()
        training_step(context, data.pack(towers.texts, parts))
    memory = {part: trace.at_peak.get(part, 0) for part in PARTS} | {"workspace": WORKSPACE}
    if config.run.ema is not None:
        memory["weights"] *= 2
    if config.parallel.fsdp and ranks > 1:
        memory = _sharded(memory, model, ranks)
    return Predicted(
        memory=memory,
        kernels=trace.kernels,
        sent=TrafficCounter(dict(TRAFFIC_COUNTER.volumes)),
        trained_bytes=sum(parameter.nbytes for parameter in trained),
        parameters=len(trained),
        parts=parts,
        compiled=model.compiled,
        cuda_graph=parts == 1 and uses_cuda_graph(config, model, first, CUDA),
        resizing=0 if config.data.decode == "cpu" or data.images.dim() < 4 else device_bytes(data.images),
        feature_sizes=model.feature_sizes,
    )


def _model(config: TrainConfig, ranks: int, steps: int) -> TwoTower:
    """As a run of so many steps on GPUs trains it, but what it compiles is compiled for the trace."""
    model = model_for_run(config, shapes_only=True)
    if config.data.cache_locked:
        locked = (tower.frozen_layers == tower.layers for tower in model.summary())
        image, text = (model.projection(side).width if frozen else None for side, frozen in enumerate(locked))
        model.feature_sizes = image, text
    if uses_compile(config, model, Ranks(0, ranks, None), CUDA, min(steps, config.run.max_steps or steps)):
        model.compile_towers(whole=False)
        if not (model.blockwise_image or config.parallel.fsdp):
            visual = model.clip.visual
            visual._compiled_call_impl = partial(traced_compile(nn.Module._call_impl), visual)
    return model


def _open_values_filled(config: OptimConfig) -> OptimConfig:
    """Their values affect neither memory nor time."""
    defaults = {"lr": 1e-3, "wd": 0.1, "beta1": 0.9, "beta2": 0.98, "eps_opt": 1e-6}
    return replace(config, **{name: value for name, value in defaults.items() if getattr(config, name) is None})


def _fill_state(optimizer: torch.optim.Optimizer, trace: Trace, *, keep: bool) -> None:
    """The optimizer's state as after a step. On several ranks the gradients' memory stays: it is DDP's buckets."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
        trace.hold(parameter.grad, "gradients")
    trace.enter("optimizer", "optimizer")
    optimizer.step()
    if not keep:
        optimizer.zero_grad(set_to_none=True)


def _batch(model: TwoTower, share: int, trace: Trace, caption_length: float | None) -> Batch:
    """A rank's share: fake pixels; captions and ids stay real, since the step may read their values."""
    image_size, text_size = model.feature_sizes
    images = torch.empty(share, 3, *model.image_size, dtype=torch.uint8)
    if image_size is not None:
        images = torch.empty(share, image_size, dtype=torch.float16)
    trace.hold(images, "batch")
    with _disable_current_modes():
        row = model.tokenizer([""])
        tokens, ids, numbers = row.expand(share, -1), torch.arange(share), torch.zeros(share, dtype=torch.int64)
        lengths = caption_lengths(share, caption_length, row.shape[1])
    if text_size is not None:
        tokens = torch.empty(share, text_size, dtype=torch.float16)
        trace.hold(tokens, "batch")
    return _Share(images=images, tokens=tokens, sample_ids=ids, lengths=lengths, caption_numbers=numbers)


def caption_lengths(count: int, mean: float | None, most: int) -> Tensor:
    """From half to one and a half times the mean, as many of each in any part; without a mean all the longest."""
    if mean is None or mean >= most:
        return torch.full((count,), most)
    spread = torch.arange(count, dtype=torch.float64).mul(GOLDEN).frac()
    return (mean * (0.5 + spread)).round().long().clamp(2, most)


def _packed(model: TwoTower, tokens: Tensor, lengths: Tensor) -> Tensor | Texts:
    """What `model.texts` gives on a GPU, without data."""
    if tokens.is_floating_point():  # features
        return tokens
    if model.end_of_text is None:
        return torch.empty_like(tokens)
    with _disable_current_modes():
        real = Texts.at(tokens, layout(lengths, width=tokens.shape[1], few_sizes=True))
    packing = real.packing
    offsets, rows, positions, tiles = map(_like, (packing.offsets, packing.rows, packing.positions, packing.tiles))
    return Texts(_like(real.tokens), _like(real.ends), Packing(offsets, rows, positions, packing.longest, tiles))


def _like(real: Tensor) -> Tensor:
    return torch.empty(real.shape, dtype=real.dtype)


class _Share(Batch):
    """A rank's samples. However many micro-batches they make, a trace takes the same time."""

    def split(self, parts: int) -> list[Batch]:
        """The micro-batches that are traced and, without lengths, one that stands for all that follow."""
        if parts <= TRACED:
            return super().split(parts)
        size, larger = divmod(len(self), parts)
        end = TRACED * size + min(TRACED, larger)
        first = Batch(
            images=self.images[:end],
            tokens=self.tokens[:end],
            sample_ids=self.sample_ids[:end],
            lengths=None if self.lengths is None else self.lengths[:end],
            packed=self.packed[:TRACED],
        )
        rest = Batch(
            images=self.images[end:],
            tokens=self.tokens[end:],
            sample_ids=self.sample_ids[end:],
            packed=self.packed[TRACED:],
        )
        return [*first.split(TRACED), rest]


class _Towers(nn.Module):
    """The model. The last micro-batch that is traced counts for all later ones too, which are not traced.

    Their captions take the memory that those of this one took, and their embeddings what they need together.
    """

    def __init__(self, model: TwoTower, trace: Trace, parts: int) -> None:
        super().__init__()
        self.model, self.trace = model, trace
        self.untraced = max(0, parts - TRACED)
        self.calls: Counter[bool] = Counter()  # without and with gradients
        self.caption_bytes = 0  # of the last micro-batch
        self.like: tuple[Tensor, Tensor] | None = None

    def texts(self, tokens: Tensor, lengths: Tensor | None) -> Tensor | Texts:
        if lengths is None:
            return torch.empty(self.untraced * self.caption_bytes, dtype=torch.uint8)
        before = self.trace.total
        texts = _packed(self.model, tokens, lengths)
        self.caption_bytes = self.trace.total - before
        return texts

    def forward(
        self, images: Tensor, tokens: Tensor | Texts, between: Callable[[Tensor], None]
    ) -> tuple[Tensor, Tensor]:
        trained = torch.is_grad_enabled()
        self.calls[trained] += 1
        self.trace.times = 1 + self.untraced if self.calls[trained] == TRACED else 1
        if self.calls[trained] <= TRACED:
            image, text = self.model(images, tokens, between)
            self.like = image.new_empty(0, image.shape[1]), text.new_empty(0, text.shape[1])
            return image, text
        assert self.like is not None
        between(self.like[0])
        if trained:  # their backward passes are counted: nothing here needs one
            return self.like
        image, text = (like.new_empty(len(images), like.shape[1]) for like in self.like)
        return image, text

    def enter_phase(self, phase: str) -> None:
        if phase in ("loss", "optimizer"):
            self.trace.times = 1
        self.trace.enter(phase, phase if phase in PARTS else "activations")


def _sharded(memory: dict[str, int], model: TwoTower, ranks: int) -> dict[str, int]:
    """FSDP2: a rank's part of weights, gradients and optimizer state, and three whole blocks in use."""
    sizes = [sum(parameter.nbytes for parameter in block.parameters()) for block in repeated_blocks(model)]
    largest = max(sizes, default=memory["weights"])
    split = {part: -(-memory[part] // ranks) for part in ("weights", "gradients", "optimizer")}
    return memory | split | {"gathered weights": 3 * largest}


@uncollected()
def loss_memory(make_loss: Callable[[], ContrastiveLoss], *, batch: int, ranks: int, dim: int) -> int:
    """Bytes that a loss takes on a rank, forward and backward, beside the embeddings of the rank and the tables."""
    with tracing() as trace, simulated(trace, ranks=ranks, processors=132) as first:
        loss = make_loss()
        loss.set_epoch(0, 1)
        share = first.largest_share(batch)
        image, text = (torch.empty(share, dim, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        with _disable_current_modes():
            ids = torch.arange(share)
        trace.start_again()
        before = trace.total
        loss(image, text, ids, global_batch=batch).loss.backward()
        return trace.peak - before
