"""The configuration of a training run: the settings of the run itself, and the tree of all settings."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from leanclip.data import DataConfig
from leanclip.losses import LossConfig
from leanclip.models import ModelConfig
from leanclip.optim import OptimConfig
from leanclip.settings import POSITIVE, Limits, at_least, between, check_limits, common, setting

Precision = Literal["amp_bf16", "amp_bfloat16", "amp", "fp32", "fp64"]
AUTO_LOSS = "auto"
TRACKERS = ("tensorboard", "wandb")
LONGEST_NAME = 200  # bytes: file systems allow 255, and temporary names are longer


def tracker_names(report_to: str) -> tuple[str, ...]:
    """The trackers of --report-to. metrics.jsonl is always written, so `jsonl` adds none."""
    names = [name.strip() for name in report_to.split(",") if name.strip()]
    if unknown := [name for name in names if name not in (*TRACKERS, "all", "none", "jsonl")]:
        raise ValueError(f"report_to names {unknown[0]!r}; choose from {', '.join(TRACKERS)}, all, none")
    return tuple(name for name in TRACKERS if name in names or "all" in names)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Run"""

    name: str | None = setting(None, common=True, resume="free")
    """Name of the run: its directory under --logs. Default: made of time, model and loss."""
    logs: str = setting("logs", common=True, resume="free")
    """The directory that holds the runs."""
    epochs: int = common(32, at_least(1))
    """Passes over the training data."""
    max_steps: int | None = setting(None, limits=at_least(1))
    """Stop after this many steps, if --epochs would take more. The schedules end there too."""
    loss: str = setting(AUTO_LOSS, common=True, resume="fixed_unless_reset")
    """infonce, dcl, siglip, sogclr, isogclr, fastclip-v0, fastclip-v1, fastclip-v2 or fastclip-v3. auto:
    fastclip-v1 for new projections on locked towers, infonce for other runs from weights, else fastclip-v3. From
    scratch the last two are statistically tied at 32,023 pairs (docs/results.md)."""
    implementation: Literal["auto", "reference", "tiled", "triton"] = setting("auto", resume="free")
    """The loss backend; auto takes the fastest."""
    precision: Precision | None = common(None)
    """Arithmetic of the towers. amp_bf16: bf16 autocast; amp: fp16 autocast with a loss scale. Default: amp_bf16 on a
    GPU, fp32 without one."""
    device: str | None = setting(None, common=True, resume="free")
    """cpu, cuda or cuda:1. Default: a GPU if there is one."""
    seed: int = setting(0, limits=at_least(0), resume="fixed")
    """Seed of initial weights, sample order, captions and augmentation."""
    save_frequency: int | None = setting(None, limits=at_least(0), resume="free")
    """Epochs between checkpoints (as in OpenCLIP); --save-every sets it in steps."""
    val_frequency: int | None = setting(None, limits=at_least(0), resume="free")
    """Epochs between evaluations (as in OpenCLIP); --eval-every sets it in steps."""
    log_every: int = setting(10, limits=at_least(1), resume="free")
    """Steps between log lines."""
    eval_every: int | None = setting(None, common=True, limits=at_least(0), resume="free")
    """Steps between evaluations. 0 evaluates only before and after. Default: a tenth of the run, at least 10."""
    zero_shot: tuple[str, ...] = setting((), common=True, resume="free")
    """Labelled images to classify at each evaluation. Tar shards with .cls files and a classnames.txt, or a folder
    for each class. The flag can be repeated. The bundled data set includes its own."""
    imagenet_val: str | None = setting(None, resume="free")
    """ImageNet's validation images, in a folder for each class, to classify at each evaluation."""
    imagenet_v2: str | None = setting(None, resume="free")
    """ImageNet-V2, likewise; its folders are numbered."""
    templates: str | None = setting(None, resume="free")
    """Prompts for class names: openai (80), simple (7), or a file with one per line, with {} for the name.
    Default: those of the set, else openai for ImageNet and simple for others."""
    save_every: int | None = setting(None, common=True, limits=at_least(0), resume="free")
    """Steps between checkpoints. 0 saves only at the end. Default: a twentieth of the run, at least 100. Training
    continues while a checkpoint is written."""
    keep_last: int = setting(3, limits=at_least(0), resume="free")
    """How many of the newest checkpoints are kept; 0 keeps all. The best one (--best-metric) is kept as well."""
    keep_every: int | None = setting(None, limits=at_least(1), resume="free")
    """Checkpoints at multiples of this many steps are kept as well."""
    discard_start: bool = setting(False, resume="free")
    """Do not keep the weights that a fine-tuned run starts from. They take the room of one weights file, and serve
    the comparison of before and after and --interpolate of evaluate and export."""
    stop_on_save_error: bool = setting(False, resume="free")
    """End the run when a checkpoint cannot be written. Default: warn, and retry at the next one."""
    max_hours: float | None = setting(None, common=True, limits=POSITIVE, resume="free")
    """After this many hours save and exit with code 75. --resume auto continues. SIGTERM and SIGUSR1 do the same, and
    Ctrl-C with code 130."""
    best_metric: str = setting("text_to_image_recall@10", resume="free")
    """The checkpoint with the highest value of this is kept as checkpoints/best. Of a zero-shot set: NAME/top1."""
    ema: float | None = setting(None, limits=Limits("in (0, 1), such as 0.9999", lambda decay: 0 < decay < 1))
    """Keep a running average of the weights with this decay, such as 0.9999, and evaluate and export it.
    The decay starts lower and rises to this. Default: off."""
    max_bad_steps: int = setting(10, limits=at_least(1))
    """Non-finite steps in a row (each is skipped) before the run reloads its last checkpoint; the second time it
    stops and writes diagnosis.json."""
    report_to: str = setting("tensorboard", common=True, resume="free")
    """Trackers: tensorboard, wandb, all or none. metrics.jsonl is always written."""
    wandb_project_name: str = setting("leanclip", resume="free")
    """The wandb project of the run."""
    wandb_notes: str | None = setting(None, resume="free")
    """Notes that wandb shows with the run."""
    resume: str | None = setting(None, common=True, resume="free")
    """Continue from a checkpoint; `auto`: the newest of this run, if any. `latest`: this run's newest, an error if
    it has none. Or a path: another run, one of its checkpoints, or a checkpoint file of OpenCLIP."""
    reset_loss_state: bool = setting(False, resume="free")
    """With --resume: start with empty per-sample tables, for new data or another loss. Weights, optimizer, step and
    a temperature that all samples share are kept."""
    overwrite: bool = setting(False, common=True, resume="free")
    """Replace a run of the same name."""

    def __post_init__(self) -> None:
        check_limits(self)
        for epochs, steps in (("save_frequency", "save_every"), ("val_frequency", "eval_every")):
            if getattr(self, epochs) is not None and getattr(self, steps) is not None:
                raise ValueError(
                    f"--{epochs} (epochs) and --{steps} (steps) set the same; give one".replace("_", "-")
                )
        if self.name is not None and (not self.name.isprintable() or len(self.name.encode()) > LONGEST_NAME):
            raise ValueError(f"name is {self.name[:40]!r}...; give printable text of at most {LONGEST_NAME} bytes")
        path = Path(self.name or "run")
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise ValueError(f"name is {self.name!r}; it must be below --logs, without ..")
        if self.reset_loss_state and self.resume is None:
            raise ValueError("--reset-loss-state needs a run to resume; give --resume")
        if self.resume is not None and self.overwrite:
            raise ValueError("--resume continues a run, --overwrite replaces it; give one")
        tracker_names(self.report_to)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Memory and processes"""

    micro_batch: int | None = setting(None, common=True, limits=at_least(1), resume="free")
    """Samples embedded at a time, for large batches on small GPUs. Only embeddings are kept; gradients are those of
    the whole batch; a step takes about half more time. Default: the share of a process, or on a GPU where that does
    not fit the most that does."""
    grad_checkpointing: bool | int = setting(False, common=True, limits=at_least(0), resume="free")
    """Recompute activations in the backward pass to save memory. Of all transformer blocks, or of this many of each
    tower (--grad-checkpointing 6)."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the towers: faster steps after a slow first one. auto: on a GPU, in runs in which that
    should save more time than it takes."""
    graph: Literal["auto", "on", "off"] = "auto"
    """Record the step as a CUDA graph, so that a small model does not wait for the host. auto: on one GPU, where
    the towers' arithmetic takes less than about 10 ms."""
    pad_text: bool = False
    """Run the text tower on captions padded to the context length, as OpenCLIP does. Default: without padding,
    which is faster and gives the same result for causal towers that are read at the end token."""
    fsdp: bool = setting(False, common=True, resume="free")
    """Shard weights, gradients and optimizer state (FSDP2). Default: every process holds all of them (DDP)."""
    use_bn_sync: bool = False
    """Batch normalisation over the samples of all processes (ResNets on GPUs). Default: of each process."""
    threads: int | None = setting(None, limits=between(1, 1024), resume="free")
    """Compute threads of each process on a CPU. Default: OMP_NUM_THREADS, or the fastest of a few measured passes,
    which the checkpoints store: a resumed run keeps it on the same number of processes."""
    dist_timeout: float = setting(
        600.0, limits=Limits("more than 0, at most 1e6", lambda seconds: 0 < seconds <= 1e6), resume="free"
    )
    """Timeout in seconds after which the other processes end when one died or hangs."""

    def __post_init__(self) -> None:
        check_limits(self)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All settings of a run. Field names are unique over the tree: they are the flags and the TOML keys."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    run: RunConfig = field(default_factory=RunConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    loss: LossConfig = field(default_factory=LossConfig)

    def values(self) -> dict[str, Any]:
        """All settings by name."""
        return {name: value for part in asdict(self).values() for name, value in part.items()}
