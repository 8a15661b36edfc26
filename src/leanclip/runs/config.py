"""A training run's configuration: the run's own part, and the tree of all parts."""

from dataclasses import dataclass, field
from typing import Literal

from leanclip.data import DataConfig
from leanclip.losses import LossConfig
from leanclip.models import ModelConfig
from leanclip.optim import OptimConfig
from leanclip.settings import common

Precision = Literal["amp_bf16", "amp_bfloat16", "amp", "fp32", "fp64"]
TRACKERS = ("tensorboard", "wandb")


def tracker_names(report_to: str) -> tuple[str, ...]:
    """The trackers that --report-to means. metrics.jsonl is always written, so `jsonl` adds none, as `none` does."""
    given = [name.strip() for name in report_to.split(",") if name.strip()]
    for name in given:
        if name not in (*TRACKERS, "all", "none", "jsonl"):
            raise ValueError(f"report_to names {name!r}; choose from {', '.join(TRACKERS)}, all, none")
    return tuple(name for name in TRACKERS if name in given or "all" in given)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Run"""

    name: str | None = common(None)
    """Name of the run: its directory under --logs. Default: made of time, model and loss."""
    logs: str = common("logs")
    """The directory that holds the runs."""
    epochs: int = common(32)
    """Passes over the training data."""
    max_steps: int | None = None
    """Stop after this many steps, if --epochs would take more. The schedules end there too."""
    loss: str = common("fastclip-v3")
    """infonce, siglip, sogclr, isogclr, fastclip-v0, fastclip-v1, fastclip-v2 or fastclip-v3. infonce and
    fastclip-v3 are statistically tied at 32,023 pairs (docs/results.md); FastCLIP's paper reports fastclip-v3 ahead
    on 2.7 to 316 million pairs."""
    implementation: Literal["auto", "reference", "tiled", "triton"] = "auto"
    """The loss backend; auto takes the fastest."""
    precision: Precision | None = common(None)
    """Arithmetic of the towers. amp_bf16: bf16 autocast; amp: fp16 autocast with a loss scale. Default: amp_bf16 on a
    GPU, fp32 without one."""
    device: str | None = common(None)
    """cpu, cuda or cuda:1. Default: a GPU if there is one."""
    seed: int = 0
    """Seed of initial weights, sample order, captions and augmentation."""
    save_frequency: int | None = None
    """Epochs between checkpoints (as in OpenCLIP); --save-every says it in steps."""
    val_frequency: int | None = None
    """Epochs between evaluations (as in OpenCLIP); --eval-every says it in steps."""
    log_every: int = 10
    """Steps between log lines."""
    eval_every: int | None = common(None)
    """Steps between evaluations. 0 evaluates only before and after. Default: a tenth of the run, at least 10."""
    zero_shot: tuple[str, ...] = common(())
    """Labelled images to classify at each evaluation. Tar shards with .cls files and a classnames.txt, or a folder
    for each class. The flag can be repeated. The bundled data set includes its own."""
    imagenet_val: str | None = None
    """ImageNet's validation images, in a folder for each class, to classify at each evaluation."""
    imagenet_v2: str | None = None
    """ImageNet-V2, likewise; its folders are numbered."""
    templates: str | None = None
    """Prompts for class names: openai (80), simple (7), or a file with one per line, {} standing for the name.
    Default: the set's own, else openai for ImageNet and simple for others."""
    save_every: int | None = common(None)
    """Steps between checkpoints. 0 saves only at the end. Default: a twentieth of the run, at least 100. Training
    continues while a checkpoint is written."""
    keep_last: int = 3
    """How many of the newest checkpoints stay; 0 keeps all. The best one (--best-metric) stays beside them."""
    keep_every: int | None = None
    """Checkpoints at multiples of this many steps stay, too."""
    stop_on_save_error: bool = False
    """End the run when a checkpoint cannot be written. Default: warn, go on, and try again at the next."""
    max_hours: float | None = common(None)
    """After this many hours save and exit with code 75. --resume auto continues. SIGTERM and SIGUSR1 do the same, and
    Ctrl-C with code 130."""
    best_metric: str = "text_to_image_recall@10"
    """The checkpoint with the highest value of this is kept as checkpoints/best. Of a zero-shot set: NAME/top1."""
    ema: float | None = None
    """Also keep a running average of the weights with this decay, such as 0.9999: what is evaluated and exported.
    The decay starts lower and rises to this. Default: off."""
    max_bad_steps: int = 10
    """Steps in a row whose loss or gradient is not finite (each is skipped) before the run goes back to its last
    checkpoint, once, and the next time stops and writes diagnosis.json."""
    report_to: str = common("tensorboard")
    """Trackers: tensorboard, wandb, all or none. metrics.jsonl is always written."""
    wandb_project_name: str = "leanclip"
    """The wandb project of the run."""
    wandb_notes: str | None = None
    """Notes that wandb shows with the run."""
    resume: str | None = common(None)
    """Continue from a checkpoint; `auto`: the newest of this run, if any. `latest`: this run's newest, an error if
    it has none. Or a path: another run, one of its checkpoints, or a checkpoint file of OpenCLIP."""
    reset_loss_state: bool = False
    """With --resume: begin the per-sample tables anew, for new data or another loss. Weights, optimizer, step and
    a temperature that all samples share go on."""
    overwrite: bool = common(False)
    """Replace a run of the same name."""

    def __post_init__(self) -> None:
        for name in ("epochs", "max_steps", "log_every", "keep_every", "max_bad_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        for epochs, steps in (("save_frequency", "save_every"), ("val_frequency", "eval_every")):
            value = getattr(self, epochs)
            if value is not None and value < 0:
                raise ValueError(f"{epochs} is {value}; it must be 0 or more")
            if value is not None and getattr(self, steps) is not None:
                raise ValueError(
                    f"--{epochs} (epochs) and --{steps} (steps) say the same; give one".replace("_", "-")
                )
        if self.keep_last < 0:
            raise ValueError(f"keep_last is {self.keep_last}; it must be 0 or more")
        if self.max_hours is not None and not self.max_hours > 0:
            raise ValueError(f"max_hours is {self.max_hours}; it must be more than 0")
        if self.reset_loss_state and self.resume is None:
            raise ValueError("--reset-loss-state is for a run that is resumed; give --resume")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; it must be 0 or more")
        for name in ("eval_every", "save_every"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} is {value}; it must be 0 or more")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"ema is {self.ema}; give a decay in (0, 1), such as 0.9999")
        tracker_names(self.report_to)
        if self.resume is not None and self.overwrite:
            raise ValueError("--resume goes on with a run, --overwrite replaces it; give one")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Memory and processes"""

    micro_batch: int | None = common(None)
    """Samples embedded at a time, for large batches on small GPUs. Only embeddings are kept; gradients are those of
    the whole batch; a step takes about half more time. Default: the share of a process, or on a GPU where that does
    not fit the most that does."""
    grad_checkpointing: bool | int = common(False)
    """Recompute activations in the backward pass to save memory. Of all transformer blocks, or of this many of each
    tower (--grad-checkpointing 6)."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the towers: faster steps after a first one that takes longer. auto: on a GPU, in runs in which that
    should save more time than it takes."""
    graph: Literal["auto", "on", "off"] = "auto"
    """Record the step as a CUDA graph, so that a small model does not wait for the host. auto: on one GPU, where
    the towers' arithmetic takes less than about 10 ms."""
    pad_text: bool = False
    """Run the text tower on captions padded to the context length, as OpenCLIP does. Default: on their own tokens
    only, which is the same for causal towers that are read at the end token, and faster."""
    fsdp: bool = common(False)
    """Shard weights, gradients and optimizer state (FSDP2). Default: every process holds all of them (DDP)."""
    use_bn_sync: bool = False
    """Batch normalisation over all processes' samples (ResNets on GPUs). Default: each process's own."""
    dist_timeout: float = 600.0
    """Seconds after which processes stop waiting for one that died or hangs."""

    def __post_init__(self) -> None:
        if self.grad_checkpointing < 0:
            raise ValueError(f"grad_checkpointing is {self.grad_checkpointing}; give a number of blocks, or none")
        if self.micro_batch is not None and self.micro_batch < 1:
            raise ValueError(f"micro_batch is {self.micro_batch}; it must be at least 1")
        if not 0 < self.dist_timeout < 1e6:
            raise ValueError(f"dist_timeout is {self.dist_timeout}; give seconds, at most a million")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that decides a run. Field names are unique over the tree: they are the flags and the TOML keys."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    run: RunConfig = field(default_factory=RunConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    loss: LossConfig = field(default_factory=LossConfig)
