"""Do N processes compute what one does, with this model, loss and data? Two training steps, in float64."""

import multiprocessing
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from leanclip.distributed import Launch, device_for, full_tensor, process_group
from leanclip.errors import UserError
from leanclip.runs.config import TrainConfig
from leanclip.training.setup import set_up
from leanclip.training.step import training_step

STEPS = 2  # the second with weights, temperatures and estimates that the first one changed
TOLERANCE = 1e-8


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """One tensor on N processes against one: the norm of the difference, relative to the tensor's."""

    quantity: str
    size: float  # its norm
    error: float

    @property
    def passed(self) -> bool:
        return self.error <= TOLERANCE  # false for NaN


def processes_selftest(config: TrainConfig, *, processes: int, batch: int) -> Iterator[Agreement]:
    """Compare loss, gradients, temperatures and tables. The config's FSDP and micro-batches are used by the many."""
    run = replace(config.run, precision="fp64", resume=None, device=config.run.device, name="selftest")
    data = replace(config.data, global_batch_size=batch, batch_size=None, workers=0)
    config = replace(config, run=run, data=data)
    plain = replace(config, parallel=replace(config.parallel, fsdp=False, micro_batch=None))
    if config.parallel.micro_batch is not None:  # at least two of them, however small the batch here
        half = max(1, batch // processes // 2)
        config = replace(
            config, parallel=replace(config.parallel, micro_batch=min(config.parallel.micro_batch, half))
        )
    with tempfile.TemporaryDirectory() as folder:
        (truth,) = _run(plain, 1, Path(folder) / "one")
        found = _run(config, processes, Path(folder) / "many")
    # A gradient whose true value is zero (a key's bias) has only rounding in it: held against the largest one.
    floor = 1e-6 * max(value.norm().item() for name, value in truth.items() if "gradient" in name)
    for name, right in sorted(truth.items(), key=lambda item: not item[0].startswith("loss of")):
        finite = right.isfinite()  # an estimate of a sample that was never met is -inf
        same = all(torch.equal(finite, one[name].isfinite()) for one in found)
        worst = max((one[name][finite] - right[finite]).norm().item() for one in found)
        size = right[finite].norm().item()
        error = worst / max(size, floor if "gradient" in name else 1e-300) if same else float("nan")
        yield Agreement(quantity=name, size=size, error=error if worst else 0.0 if same else error)


def _run(config: TrainConfig, processes: int, folder: Path) -> list[dict[str, Tensor]]:
    """What each process finds."""
    folder.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    launches = [Launch(rank, processes, rank, "selftest", port=port) for rank in range(processes)]
    children = [context.Process(target=_one, args=(config, launch, folder), daemon=True) for launch in launches]
    for child in children:
        child.start()
    for child in children:
        child.join()
    for complaint in sorted(folder.glob("error-*")):
        raise UserError(complaint.read_text())
    if any(child.exitcode for child in children):
        raise UserError("a process of the selftest ended early; its own message stands above")
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(processes)]


def _one(config: TrainConfig, launch: Launch, folder: Path) -> None:
    torch.set_num_threads(max(1, torch.get_num_threads() // launch.size))
    device = device_for(launch, config.run.device)
    config = replace(config, run=replace(config.run, device=device))
    try:
        with process_group(
            launch, torch.device(device), timeout=config.parallel.dist_timeout, always=config.parallel.fsdp
        ):
            torch.save(_two_steps(config), folder / f"{launch.rank}.pt")
    except UserError as error:
        (folder / f"error-{launch.rank}").write_text(str(error))


def _two_steps(config: TrainConfig) -> dict[str, Tensor]:
    job = set_up(config)
    job.model.train()
    job.context.loss.train()
    _without_chance(job.model)
    found: dict[str, Tensor] = {}
    named = [
        *job.model.named_parameters(),
        *((f"the loss's {name}", p) for name, p in job.context.loss.named_parameters()),
    ]

    def remember(*_: object) -> None:
        for name, parameter in named:
            if parameter.grad is not None:
                found[f"gradient of {name.removeprefix('clip.')}"] = (
                    full_tensor(parameter.grad).cpu().double().clone()
                )

    job.context.optimizer.register_step_pre_hook(remember)
    for group in job.context.optimizer.param_groups:
        group["lr"] = min(group["lr"], 1e-4)
    batches = job.loader.epoch(0)
    for step in range(min(STEPS, job.loader.steps_per_epoch)):
        job.context.loss.set_epoch(step, STEPS)
        result = training_step(job.context, next(batches).to(job.device, job.dtype))
        found[f"loss of step {step + 1}"] = result.loss.cpu().double()
    state = {name: full_tensor(value).cpu().double() for name, value in job.context.loss.state_dict().items()}
    return found | {f"the loss's {name}": value for name, value in state.items()}


def _without_chance(model: nn.Module) -> None:
    """Dropout off, and batch normalisation by its running averages: neither is the same on another split."""
    for module in model.modules():
        if isinstance(module, _BatchNorm) or "Drop" in type(module).__name__:
            module.eval()
