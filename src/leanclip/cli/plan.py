"""leanclip plan: what fits, how fast it will be, and the command, before anything is launched."""

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from rich.console import Console
from rich.table import Table

from leanclip.cli.parse import parse
from leanclip.distributed import compare_traffic
from leanclip.errors import UserError, first_line
from leanclip.features.locked_towers import table_sizes
from leanclip.losses import loss_from_config
from leanclip.losses.registry import spec_of
from leanclip.models import model_config_of
from leanclip.planning.gpu_model import GPUS, GpuModel, gpu_named, measured_gpu
from leanclip.planning.network import NETWORKS, Network
from leanclip.planning.planner import LEAST_SHARE, USABLE, Option, Planner, proposed_batch, share_of
from leanclip.planning.step_prediction import PARTS, loss_memory
from leanclip.planning.step_trace import UNTRACED, uncollected, with_room
from leanclip.progress import make_console, make_table
from leanclip.recipes import settings_below
from leanclip.runs import TrainConfig
from leanclip.runs.defaults import fill, loss_name, model_of, total_steps
from leanclip.settings import Limits, at_least, between, check_limits, common

DESCRIPTION = """Predict memory, speed and communication of a training run, without running it and without a GPU.

Takes all flags of `leanclip train`, recipes and TOML files too, and prints the command to run. Without
--global-batch-size or --batch-size it proposes a batch.

  leanclip plan --model ViT-B-32 --gpus 8 --gpu-memory 40 --global-batch-size 32768 --samples 400M
  leanclip plan --model ViT-B-16 --gpus 2 --gpu RTX4090 --network pcie --global-batch-size 4096 --samples 3M --compare
  leanclip plan --config logs/RUN/config.toml --gpus 4 --samples 12M
"""
GIB = 2**30
UNITS = {"k": 10**3, "m": 10**6, "b": 10**9}
TIMES = {"hours": 3600, "minutes": 60, "seconds": 1}
GPUS_PER_HOST = 8
ASSUMED = " (assumed)"  # behind the name of a GPU
MOST_GPUS, MOST_MEMORY, MOST_SAMPLES, MOST_SHARE = 10_000, 10_000, 10**12, 1 << 20  # of each GPU: GB, batch
PLAN_FLAGS = (
    "--gpus", "--gpu", "--gpu-memory", "--samples", "--network", "--caption-length", "--compare", "--no-compare",
)  # fmt: skip
BYTES_PER_PAIR = 16  # of a dense InfoNCE in both directions: 16-bit logits, float32 log-probabilities and gradients


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    recipe: str | None = common(None)
    """Start from a recipe."""
    config: str | None = common(None)
    """Start from a TOML file, such as a run's config.toml. It overrides the recipe."""
    gpus: int = common(1, between(1, MOST_GPUS))
    """Number of GPUs, one process each."""
    gpu: str | None = common(None)
    """Model of the GPUs, such as A100-40GB; an unknown name lists the known ones. Default: the one of this machine,
    otherwise the smallest known with --gpu-memory (80 if not set), which the output names."""
    gpu_memory: float | None = common(
        None, Limits(f"positive and at most {MOST_MEMORY:,} GB", lambda size: 0 < size <= MOST_MEMORY)
    )
    """GB of memory of each. Default: all that the GPU has."""
    samples: str | None = common(None)
    """Training samples: 400M, 2.7M, 315658316. Default: 1M, also with --train-data, which is not read."""
    network: str | None = common(None)
    """Between the GPUs: nvlink, infiniband (200 Gb/s per GPU), infiniband-1 (200 Gb/s per host), 25gbe or pcie.
    Default: nvlink up to 8 GPUs, then infiniband; pcie within a host for GPUs that have no NVLink to all others."""
    caption_length: float = common(20.0, at_least(3))
    """Tokens of a caption on average, with start and end tokens. Ignored with --pad-text."""
    compare: bool = common(False)
    """Add the loss memory and traffic of OpenCLIP and DisCo-CLIP."""
    settings: TrainConfig = field(default_factory=TrainConfig, metadata={"common": False})  # --help leaves them out

    def __post_init__(self) -> None:
        check_limits(self)
        if self.network is not None and self.network not in NETWORKS:
            raise ValueError(f"unknown --network {self.network!r}; choose from {', '.join(NETWORKS)}")


@with_room
@uncollected()
def run(arguments: list[str]) -> None:
    command = parse(
        PlanCommand,
        arguments,
        command="plan",
        description=DESCRIPTION,
        below=lambda typed: PlanCommand(settings=settings_below(typed)),
    )
    console = make_console()
    samples = parse_count(command.samples or "1M")
    status = make_console(stderr=True).status("")  # shows at a terminal what is being done
    with status:
        gpu, notes = gpu_of(command, status.update)
        config = resolved(command, samples)
        if command.samples is None:
            notes.append(f"samples:       {samples:,} are assumed, no data are read; --samples sets another number")
        proposed = without_batch(command.settings)
        if proposed:
            notes.append(
                f"batch:         {share_of(config, 1):,} is proposed: the published one for {samples:,} samples, with"
                f" at least {LEAST_SHARE} on each GPU and 100 steps in an epoch. Memory allows the largest batch"
                " below; --global-batch-size sets another"
            )
        network = NETWORKS[command.network] if command.network else assumed_network(gpu.name, command.gpus)
        if command.gpus > 1 and command.network is None:
            notes.append(f"network:       {network.name} is assumed; --network sets another: {', '.join(NETWORKS)}")
        planner = Planner(
            samples=samples,
            ranks=command.gpus,
            gpu=gpu,
            room=int(USABLE * gpu.memory),
            network=network,
            caption_length=command.caption_length,
            report=status.update,
        )
        with traceable(config):
            options = sorted(planner.options(config), key=lambda option: option.seconds)
    if options:
        show(options, planner, notes, console)
        if command.compare:
            console.print(comparison(options[0], samples))
        console.print(f"run:           {command_line(options[0], arguments, proposed)}")
    with status, traceable(config):
        planner.report = lambda doing: status.update(f"the largest batch: {doing}")
        largest = planner.largest_batch(config)
    if not options:
        raise does_not_fit(config, planner, largest)
    limit = " (limited by --samples)" if largest > samples - 1024 * command.gpus else ""
    console.print(f"largest batch: {'' if limit else 'about '}{largest:,} in micro-batches{limit}")
    if not config.parallel.pad_text:
        console.print(f"(captions of {command.caption_length:g} tokens on average, --caption-length)", style="dim")


def show(options: list[Option], planner: Planner, notes: list[str], console: Console) -> None:
    best, gpu = options[0], planner.gpu
    title_line = f"{title(best.config)} on {planner.ranks} x {gpu.name}, {gpu.memory / 1e9:.0f} GB"
    console.print(title_line, *notes, sep="\n")
    console.print(memory_table(best, planner))
    console.print(*lines(best, planner), sep="\n")
    for other in options[1:]:
        console.print(f"also fits:     {way(other)}: {other.samples_per_second:,.0f} samples/s, {gib(other)} GiB")


@contextmanager
def traceable(config: TrainConfig) -> Iterator[None]:
    try:
        yield
    except (*UNTRACED, ValueError) as error:  # such as a batch norm of one sample
        if isinstance(error, UserError):
            raise
        message = f"{config.model.model} cannot be traced without data: {first_line(error)}"
        raise UserError(message, code="plan.not_traceable") from error


def parse_count(text: str) -> int:
    """A number of samples: 400M, 2.7m, 1,830."""
    unit = UNITS.get(text[-1:].lower(), 1)
    try:
        number = float(text[:-1] if unit > 1 else text.replace(",", "").replace("_", "")) * unit
    except ValueError:
        number = 0.0
    if not 1 <= number <= MOST_SAMPLES:
        message = (
            f"--samples {text[:80]}: expected a number such as 400M, 2.7M or 315658316, at most {MOST_SAMPLES:,}"
        )
        raise UserError(message, code="plan.bad_samples")
    return int(number)


def gpu_of(command: PlanCommand, report: Callable[[str], object]) -> tuple[GpuModel, list[str]]:
    """The model of the GPUs, and a line that says so where it is assumed."""
    notes: list[str] = []
    if command.gpu is not None:
        gpu = gpu_named(command.gpu)
    elif torch.cuda.is_available():
        report("measuring the GPU")
        gpu = measured_gpu(torch.device("cuda"))
    else:
        large_enough = [name for name, nominal in GPUS.items() if nominal.memory >= (command.gpu_memory or 80)]
        name = min(large_enough, key=lambda name: GPUS[name].memory, default="H200")
        gpu = replace(gpu_named(name), name=name + ASSUMED)
        notes.append(f"gpu:           {name} is assumed; name yours with --gpu: {', '.join(GPUS)}")
    return gpu if command.gpu_memory is None else replace(gpu, memory=int(command.gpu_memory * 1e9)), notes


def assumed_network(gpu: str, gpus: int) -> Network:
    """Between GPUs of this name. A GPU that is not in the list is taken to have NVLink."""
    product = GPUS.get(gpu.removesuffix(ASSUMED))
    if product is None or product.nvlink:
        return NETWORKS["nvlink" if gpus <= GPUS_PER_HOST else "infiniband"]
    inside = NETWORKS["pcie"]
    if gpus <= GPUS_PER_HOST:
        return inside
    name = "infiniband, pcie within a host"
    return replace(NETWORKS["infiniband"], name=name, inside=inside.inside, hop_inside=inside.hop_inside)


def resolved(command: PlanCommand, samples: int) -> TrainConfig:
    """As `leanclip train` would fill it in on those GPUs."""
    settings = command.settings
    loss = loss_name(settings)
    spec_of(loss)
    model = settings.model.model or model_of(settings.model.pretrained) or "ViT-B-32"
    model_config_of(model)
    run = replace(settings.run, loss=loss, device="cuda", precision=settings.run.precision or "amp_bf16", name=None)
    settings = replace(settings, run=run, model=replace(settings.model, model=model, pretrained=None))
    if without_batch(settings):
        settings = replace(
            settings, data=replace(settings.data, global_batch_size=proposed_batch(samples, command.gpus))
        )
    config = fill(settings, samples=samples, processes=command.gpus)
    if (share := share_of(config, command.gpus)) > MOST_SHARE:
        message = f"a batch of {share:,} on each GPU is not planned; the limit is {MOST_SHARE:,}"
        raise UserError(message, code="plan.batch_too_large")
    return config


def without_batch(settings: TrainConfig) -> bool:
    return settings.data.global_batch_size is None and settings.data.batch_size is None


def title(config: TrainConfig) -> str:
    return f"{config.model.model}, {config.run.loss}, {config.run.precision}, global batch {share_of(config, 1):,}"


def memory_table(option: Option, planner: Planner) -> Table:
    step = option.step
    sizes = {**{part: step.memory[part] for part in PARTS}, "next batch": step.needed - step.peak}
    rows = [(part, f"{size / GIB:.2f}") for part, size in sizes.items()]
    table = make_table("memory of each GPU at the moment of its peak", ("part", "GiB"), rows)
    table.add_section()
    table.add_row("total", gib(option))
    table.add_row(f"usable ({USABLE:.0%} of {planner.gpu.memory / GIB:.1f})", f"{planner.room / GIB:.2f}")
    return table


def lines(option: Option, planner: Planner) -> list[str]:
    config, ranks = option.config, option.ranks
    steps = total_steps(config, samples=planner.samples, batch=share_of(config, 1))
    seconds = steps * option.seconds
    texts = [
        f"a step:        {way(option)}",
        f"speed:         {option.samples_per_second:,.0f} samples/s, {option.seconds:.3f} s a step"
        f" ({planner.gpu.source})",
        f"the run:       {steps:,} steps ({config.run.epochs} epochs): {duration(seconds)},"
        f" {duration(seconds * ranks, of='GPU ')}",
    ]
    if option.step.feature_sizes != (None, None):
        size = table_sizes(*option.step.feature_sizes, samples=planner.samples, views=config.data.cache_locked or 0)
        where = "on disk and, where they fit into a quarter of what is free, in each GPU's memory"
        texts.append(
            f"features:      {size}, {where}; neither they nor the pass that computes them are counted above"
        )
    if ranks > 1:
        loss = compare_traffic(option.step.sent, ranks=ranks).leanclip
        gradients = 2 * option.step.trained_bytes * (ranks - 1) / ranks
        texts.append(
            f"communication: each GPU receives {loss / 1e6:,.1f} MB for the loss and {gradients / 1e6:,.0f} MB of"
            f" gradients in a step: {option.communication * 1e3:,.1f} ms on {planner.network.name},"
            f" {option.exposed * 1e3:,.1f} ms of them not hidden"
        )
    return texts


def duration(seconds: float, of: str = "") -> str:
    """In the largest unit that gives at least one."""
    unit, size = next((name, size) for name, size in TIMES.items() if seconds >= size or size == 1)
    return f"{seconds / size:,.1f} {of}{unit}"


def way(option: Option) -> str:
    parts, recomputed = option.step.parts, option.config.parallel.grad_checkpointing
    size = f"{parts} micro-batches of" if parts > 1 else "one batch of"
    blocks = (
        "all blocks" if recomputed is True else f"{recomputed} blocks of each tower" if recomputed else "no blocks"
    )
    return f"{size} {option.micro_batch:,}, {blocks} recomputed"


def gib(option: Option) -> str:
    return f"{option.step.needed / GIB:.2f}"


def comparison(option: Option, samples: int) -> Table:
    """The loss of the same step in other implementations: memory and traffic from what each holds and sends."""
    config, ranks, batch = option.config, option.ranks, share_of(option.config, 1)
    assert config.model.model is not None
    memory = loss_memory(
        lambda: loss_from_config(config.run.loss, config.loss, num_samples=samples),
        batch=batch,
        ranks=ranks,
        dim=config.model.embed_dim or model_config_of(config.model.model)[1]["embed_dim"],
    )
    dense = BYTES_PER_PAIR * batch**2
    received = compare_traffic(option.step.sent, ranks=ranks)
    rows = (
        (f"leanclip, {config.run.loss}", memory, received.leanclip),
        ("OpenCLIP, --local-loss --gather-with-grad", dense / ranks, received.openclip),
        ("DisCo-CLIP", dense / ranks, received.disco_clip),
        ("CLIP, the loss undivided", dense, received.openclip),
    )
    return make_table(
        "the loss of a step, for each GPU",
        ("", "GiB", "MB received"),
        [(name, f"{size / GIB:.2f}", f"{sent / 1e6:,.1f}") for name, size, sent in rows],
    )


def does_not_fit(config: TrainConfig, planner: Planner, largest: int) -> UserError:
    split = " --fsdp," if planner.ranks > 1 and not config.parallel.fsdp else ""
    advice = (
        f"the largest batch that fits is about {largest:,}"
        if largest
        else f"use{split} a larger GPU or a smaller model"
    )
    gpus = f"{planner.room / GIB:.1f} GiB of {planner.ranks} x {planner.gpu.name}"
    return UserError(f"{title(config)} does not fit into {gpus}; {advice}", code="plan.does_not_fit")


def command_line(option: Option, arguments: list[str], proposed: bool) -> str:
    """The training command: the flags of the plan, and what it chose."""
    config, gpus = option.config, option.ranks
    start = ["leanclip"]
    if gpus > 1:
        per_host = max(size for size in range(1, min(gpus, GPUS_PER_HOST) + 1) if gpus % size == 0)
        nodes = ["--nnodes", str(gpus // per_host), "--rdzv-backend", "c10d", "--rdzv-endpoint", "FIRST_HOST:29500"]
        start = ["torchrun", *(nodes if gpus > per_host else []), "--nproc-per-node", str(per_host), "-m", "leanclip"]
    flags = training_flags(arguments)
    names = {flag.split("=")[0] for flag in flags}
    if not {"--recipe", "--config"} & names:
        for name, value in (("--model", config.model.model), ("--loss", config.run.loss)):
            flags += [] if name in names else [name, str(value)]
    if proposed:
        flags += ["--global-batch-size", str(share_of(config, 1))]
    flags += ["--micro-batch", str(option.micro_batch)]
    if recomputed := config.parallel.grad_checkpointing:
        flags += ["--grad-checkpointing", *([] if recomputed is True else [str(recomputed)])]
    data = " --train-data ..." if config.data.train_data is None else ""
    return shlex.join([*start, "train", *flags]) + data


def training_flags(arguments: list[str]) -> list[str]:
    """The flags of training among those of a plan, without the two that a plan decides."""
    flags: list[str] = []
    dropped = False
    for word in arguments:
        if word.startswith("--"):
            dropped = word.split("=")[0].replace("_", "-") in (*PLAN_FLAGS, "--micro-batch", "--grad-checkpointing")
        if not dropped:
            flags.append(word)
    return flags
