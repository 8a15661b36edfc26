"""leanclip plan: what fits, how fast it will be, and the command, before anything is launched."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from rich.console import Console
from rich.table import Table

from leanclip.cli.parse import parse
from leanclip.distributed import compare_traffic
from leanclip.errors import UserError
from leanclip.losses import loss_from_config
from leanclip.losses.registry import spec_of
from leanclip.models import model_config_of
from leanclip.planning import CARDS, NETWORKS, Card, calibrated, card_named
from leanclip.planning.baseline_losses import RivalLoss, loss_memory
from leanclip.planning.micro_batch_search import USED, Option, Tell, largest_batch, options, silent
from leanclip.planning.step_prediction import PARTS
from leanclip.planning.step_trace import UNTRACED
from leanclip.recipes import settings_below
from leanclip.runs import TrainConfig
from leanclip.runs.defaults import fill, total_steps
from leanclip.settings import common

DESCRIPTION = """Say what a training run needs, without running it and without a GPU.

Memory comes from tracing the real training step of your model and loss on tensors without data; time from a roofline,
measured on the GPU that is here or scaled from a card's nominal figures; communication from a model of the network.
All flags of `leanclip train` are taken, recipes and TOML files too.

  leanclip plan --model ViT-B-32 --gpus 8 --gpu-memory 40 --global-batch-size 32768 --samples 400M
  leanclip plan --model ViT-B-16 --gpus 2 --gpu RTX4090 --network pcie --global-batch-size 4096 --samples 3M --compare
  leanclip plan --config logs/RUN/config.toml --gpus 4 --samples 12M
"""
GIB = 2**30
UNITS = {"k": 10**3, "m": 10**6, "b": 10**9}
TIMES = {"hours": 3600, "minutes": 60, "seconds": 1}
PER_HOST = 8
OWN = (
    "--gpus", "--gpu", "--gpu-memory", "--samples", "--network", "--caption-length", "--compare", "--no-compare",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    recipe: str | None = common(None)
    """Start from a recipe."""
    config: str | None = common(None)
    """Start from a TOML file, such as a run's config.toml. It overrides the recipe."""
    gpus: int = common(1)
    """How many GPUs, one process each."""
    gpu: str | None = common(None)
    """Which one, such as A100-40GB; an unknown name lists those known. Default: the one that is here, else the first
    known with --gpu-memory."""
    gpu_memory: float | None = common(None)
    """GB of memory of each. Default: all that the card has."""
    samples: str = common("1M")
    """Training samples: 400M, 2.7M, 315658316."""
    network: str | None = common(None)
    """Between the GPUs: nvlink, infiniband (a card per GPU), infiniband-1 (a card per host), 25gbe or pcie. Default:
    nvlink up to 8 GPUs, then infiniband."""
    caption_length: float = common(20.0)
    """Tokens of a caption on average, with start and end. The text tower runs on no others, but with --pad-text."""
    compare: bool = common(False)
    """Add the loss memory and traffic of OpenCLIP and DisCo-CLIP."""
    settings: TrainConfig = field(default_factory=TrainConfig, metadata={"common": False})  # --help leaves them out

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise ValueError(f"--gpus is {self.gpus}; give at least 1")
        if self.gpu_memory is not None and self.gpu_memory <= 0:
            raise ValueError(f"--gpu-memory is {self.gpu_memory}; give GB")
        if self.network is not None and self.network not in NETWORKS:
            raise ValueError(f"unknown --network {self.network!r}; choose from {', '.join(NETWORKS)}")
        if self.caption_length < 3:
            raise ValueError(f"--caption-length is {self.caption_length}; it must be at least 3")


def run(arguments: list[str]) -> None:
    command = parse(
        PlanCommand,
        arguments,
        command="plan",
        description=DESCRIPTION,
        below=lambda typed: PlanCommand(settings=settings_below(typed)),
    )
    console = Console(soft_wrap=True, highlight=False)
    samples = count(command.samples)
    network = NETWORKS[command.network or ("nvlink" if command.gpus <= PER_HOST else "infiniband")]
    with waiting() as tell:
        card = card_of(command, tell)
        config = resolved(command, samples)
        room = int(USED * card.memory)
        asked = {
            "samples": samples, "ranks": command.gpus, "card": card, "room": room,
            "caption_length": command.caption_length,
        }  # fmt: skip
        with traceable(config):
            found = sorted(options(config, network=network, tell=tell, **asked), key=lambda option: option.seconds)
        compared = None
        if found and command.compare:
            tell("tracing the losses of others")
            compared = comparison(found[0], samples)
    if found:
        best = found[0]
        console.print(f"{title(config, command.gpus)} on {command.gpus} x {card.name}, {card.memory / 1e9:.0f} GB")
        console.print(memory_table(best, card, room))
        console.print(*lines(best, card, network.name, samples), sep="\n")
        for other in found[1:]:
            console.print(f"also fits:     {way(other)}: {other.samples_per_second:,.0f} samples/s, {gib(other)} GiB")
        if compared is not None:
            console.print(compared)
        console.print(f"run:           {command_line(best, arguments)}")
    with waiting() as tell, traceable(config):
        most = largest_batch(config, tell=lambda doing: tell(f"the largest batch: {doing}"), **asked)
    if not found:
        raise UserError(does_not_fit(config, card, room, most, command.gpus))
    limit = " (no more --samples)" if most > samples - 1024 * command.gpus else ""
    console.print(f"largest batch: {most:,} in micro-batches{limit}")
    if not config.parallel.pad_text:
        length = f"{command.caption_length:g}"
        console.print(f"(for captions of {length} tokens on average, --caption-length)", style="dim")


@contextmanager
def traceable(config: TrainConfig) -> Iterator[None]:
    try:
        yield
    except UNTRACED as error:
        raise UserError(f"{config.model.model} cannot be traced without data: {error}") from error


@contextmanager
def waiting() -> Iterator[Tell]:
    """Whoever waits at a terminal sees on stderr what for; nobody else does."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield silent
        return
    with console.status("") as status:
        yield status.update


def count(text: str) -> int:
    """A number of samples as people write it."""
    unit = UNITS.get(text[-1:].lower(), 1)
    try:
        number = int(float(text[:-1] if unit > 1 else text.replace(",", "").replace("_", "")) * unit)
    except ValueError:
        number = 0
    if number < 1:
        raise UserError(f"--samples {text}: expected a number such as 400M, 2.7M or 315658316")
    return number


def card_of(command: PlanCommand, tell: Tell = silent) -> Card:
    if command.gpu is not None:
        card = card_named(command.gpu)
    elif torch.cuda.is_available():
        tell("measuring the GPU")
        card = calibrated(torch.device("cuda"))
    else:
        wanted = command.gpu_memory or 80
        fitting = (name for name, nominal in CARDS.items() if nominal.memory >= wanted)
        card = card_named(min(fitting, key=lambda name: CARDS[name].memory, default="H200"))
    return card if command.gpu_memory is None else replace(card, memory=int(command.gpu_memory * 1e9))


def resolved(command: PlanCommand, samples: int) -> TrainConfig:
    """As `leanclip train` would fill it in on those GPUs."""
    settings = command.settings
    spec_of(settings.run.loss)
    model = settings.model.model or "ViT-B-32"
    model_config_of(model)
    run = replace(settings.run, device="cuda", precision=settings.run.precision or "amp_bf16", name=None)
    settings = replace(settings, run=run, model=replace(settings.model, model=model, pretrained=None))
    return fill(settings, samples=samples, processes=command.gpus)


def batch_of(config: TrainConfig) -> int:
    assert config.data.global_batch_size is not None
    return config.data.global_batch_size


def title(config: TrainConfig, gpus: int) -> str:
    return (
        f"{config.model.model}, {config.run.loss}, {config.run.precision}, global batch"
        f" {config.data.global_batch_size:,}"
    )


def memory_table(option: Option, card: Card, room: int) -> Table:
    table = Table(title="memory of each GPU at its peak", title_justify="left")
    table.add_column("part")
    table.add_column("GiB", justify="right")
    for part in PARTS:
        table.add_row(part, f"{option.predicted.memory[part] / GIB:.2f}")
    table.add_row("next batch", f"{option.predicted.memory['batch'] / GIB:.2f}")
    table.add_section()
    table.add_row("together", gib(option))
    table.add_row(f"usable ({USED:.0%} of {card.memory / GIB:.1f})", f"{room / GIB:.2f}")
    return table


def lines(option: Option, card: Card, network: str, samples: int) -> list[str]:
    config, sent = option.config, option.predicted.sent
    steps = total_steps(config, samples=samples, batch=batch_of(config))
    seconds = steps * option.seconds
    found = [
        f"a step:        {way(option)}",
        f"speed:         {option.samples_per_second:,.0f} samples/s, {option.seconds:.3f} s a step ({card.source})",
        f"the run:       {steps:,} steps ({config.run.epochs} epochs): {duration(seconds)},"
        f" {duration(seconds * option.ranks, of='GPU ')}",
    ]
    if option.ranks > 1:
        loss = compare_traffic(sent, ranks=option.ranks).leanclip
        gradients = 2 * option.predicted.trained_bytes * (option.ranks - 1) / option.ranks
        found.append(
            f"communication: {loss / 1e6:,.1f} MB for the loss and {gradients / 1e6:,.0f} MB of gradients received by"
            f" each GPU a step, {option.communication * 1e3:,.1f} ms on {network},"
            f" {option.exposed * 1e3:,.1f} ms of them not hidden"
        )
    return found


def duration(seconds: float, of: str = "") -> str:
    """In hours, or in the smaller unit of which there is at least one."""
    unit, size = next((name, size) for name, size in TIMES.items() if seconds >= size or size == 1)
    return f"{seconds / size:,.1f} {of}{unit}"


def way(option: Option) -> str:
    config = option.config
    share = -(-batch_of(config) // option.ranks)
    parts = option.predicted.parts
    size = f"{parts} micro-batches of {micro_batch(option):,}" if parts > 1 else f"all {share:,} samples at once"
    recomputed = config.parallel.grad_checkpointing
    number = "all" if recomputed is True else recomputed or "no"
    return f"{size}, {number} blocks{' of each tower' if recomputed is not True and recomputed else ''} recomputed"


def gib(option: Option) -> str:
    return f"{option.predicted.needed / GIB:.2f}"


def comparison(option: Option, samples: int) -> Table:
    """The same step's loss as others compute it: memory traced from plain PyTorch, traffic by what each sends."""
    config, ranks = option.config, option.ranks
    assert config.model.model is not None
    asked = {"batch": batch_of(config), "ranks": ranks, "dim": model_config_of(config.model.model)[1]["embed_dim"]}
    sent = compare_traffic(option.predicted.sent, ranks=ranks)
    own = loss_memory(lambda: loss_from_config(config.run.loss, config.loss, num_samples=samples), **asked)
    local = loss_memory(lambda: RivalLoss(divided=True), **asked)
    whole = loss_memory(lambda: RivalLoss(divided=False), **asked)
    table = Table(title="the loss of a step, for each GPU", title_justify="left")
    for heading in ("", "GiB", "MB received"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, memory, received in (
        (f"leanclip, {config.run.loss}", own, sent.leanclip),
        ("OpenCLIP, --local-loss --gather-with-grad", local, sent.openclip),
        ("DisCo-CLIP", local, sent.disco_clip),
        ("CLIP, the loss undivided", whole, sent.openclip),
    ):
        table.add_row(name, f"{memory / GIB:.2f}", f"{received / 1e6:,.1f}")
    return table


def does_not_fit(config: TrainConfig, card: Card, room: int, most: int, gpus: int) -> str:
    split = " --fsdp," if gpus > 1 and not config.parallel.fsdp else ""
    advice = f"the largest batch that does is {most:,}" if most else f"take{split} a larger GPU or a smaller model"
    return f"{title(config, gpus)} does not fit into {room / GIB:.1f} GiB of {gpus} x {card.name}; {advice}"


def command_line(option: Option, given: list[str]) -> str:
    """What to type: the flags that the plan was asked with, and what it chose."""
    config, gpus = option.config, option.ranks
    start = ["leanclip"]
    if gpus > 1:
        each = max(size for size in range(1, min(gpus, PER_HOST) + 1) if gpus % size == 0)
        nodes = ["--nnodes", str(gpus // each), "--rdzv-backend", "c10d", "--rdzv-endpoint", "FIRST_HOST:29500"]
        start = ["torchrun", *(nodes if gpus > each else []), "--nproc-per-node", str(each), "-m", "leanclip"]
    flags = kept(given)
    asked = {flag.split("=")[0] for flag in flags}
    for name, value in (("--model", config.model.model), ("--loss", config.run.loss)):
        flags += [] if name in asked or {"--recipe", "--config"} & asked else [name, str(value)]
    if not {"--global-batch-size", "--batch-size", "--recipe", "--config"} & asked:
        flags += ["--global-batch-size", str(batch_of(config))]
    flags += ["--micro-batch", str(micro_batch(option))]
    if recomputed := config.parallel.grad_checkpointing:
        flags += ["--grad-checkpointing", *([] if recomputed is True else [str(recomputed)])]
    data = " --train-data ..." if config.data.train_data is None else ""
    return shlex.join([*start, "train", *flags]) + data


def kept(given: list[str]) -> list[str]:
    """The flags of training among those of a plan, without the two that a plan decides."""
    found: list[str] = []
    dropped = False
    for word in given:
        if word.startswith("--"):
            dropped = word.split("=")[0].replace("_", "-") in (*OWN, "--micro-batch", "--grad-checkpointing")
        if not dropped:
            found.append(word)
    return found


def micro_batch(option: Option) -> int:
    share = -(-batch_of(option.config) // option.ranks)
    return -(-share // option.predicted.parts)
