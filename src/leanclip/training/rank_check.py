"""Compare N processes with one on this model, loss and data: two training steps in float64."""

import math
import multiprocessing
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from leanclip.distributed import Launch, device_for, full_tensor, process_group
from leanclip.errors import UserError
from leanclip.runs.config import TrainConfig
from leanclip.training.setup import set_up
from leanclip.training.step import training_step

STEPS = 2  # the second uses the weights, temperatures and estimates that the first has changed
TOLERANCE = 1e-8


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """One tensor on N processes and on one: the norm of the difference, relative to that of the tensor."""

    quantity: str
    size: float  # its norm
    error: float

    @property
    def passed(self) -> bool:
        return self.error <= TOLERANCE  # false for NaN


def processes_selftest(config: TrainConfig, *, processes: int, batch: int) -> Iterator[Agreement]:
    """Compare loss, gradients, temperatures and tables. FSDP and micro-batches are used by the N processes only."""
    run = replace(config.run, precision="fp64", resume=None, name="selftest")
    data = replace(config.data, global_batch_size=batch, batch_size=None, workers=0)
    config = replace(config, run=run, data=data)
    single = replace(config, parallel=replace(config.parallel, fsdp=False, micro_batch=None))
    if config.parallel.micro_batch is not None:  # at least two, however small the batch
        micro_batch = min(config.parallel.micro_batch, max(1, batch // processes // 2))
        config = replace(config, parallel=replace(config.parallel, micro_batch=micro_batch))
    with tempfile.TemporaryDirectory() as folder:
        (expected,) = _run(single, 1, Path(folder) / "one")
        results = _run(config, processes, Path(folder) / "many")
    # A gradient whose true value is zero (the bias of a key) is only rounding error: compared with the largest one.
    floor = 1e-6 * max(value.norm().item() for name, value in expected.items() if "gradient" in name)
    for name, value in sorted(expected.items(), key=lambda item: not item[0].startswith("loss of")):
        finite = value.isfinite()  # the estimate of a sample that was never visited is -inf
        size = value[finite].norm().item()
        error = max((result[name][finite] - value[finite]).norm().item() for result in results)
        error /= max(size, floor if "gradient" in name else 1e-300)
        same = all(torch.equal(finite, result[name].isfinite()) for result in results)
        yield Agreement(quantity=name, size=size, error=error if same else math.nan)


def _run(config: TrainConfig, processes: int, folder: Path) -> list[dict[str, Tensor]]:
    """The results of each process."""
    folder.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launches = [Launch(rank, processes, rank, "selftest", port=port) for rank in range(processes)]
    spawn = multiprocessing.get_context("spawn")
    children = [spawn.Process(target=_run_rank, args=(config, launch, folder), daemon=True) for launch in launches]
    for child in children:
        child.start()
    for child in children:
        child.join()
    for path in sorted(folder.glob("error-*")):
        raise UserError(path.read_text(), code="selftest.failed")
    if any(child.exitcode for child in children):
        raise UserError("a process of the selftest failed; its error is printed above", code="selftest.failed")
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(processes)]


def _run_rank(config: TrainConfig, launch: Launch, folder: Path) -> None:
    torch.set_num_threads(max(1, torch.get_num_threads() // launch.size))
    device, parallel = device_for(launch, config.run.device), config.parallel
    config = replace(config, run=replace(config.run, device=device))
    try:
        with process_group(launch, torch.device(device), timeout=parallel.dist_timeout, always=parallel.fsdp):
            torch.save(_two_steps(config), folder / f"{launch.rank}.pt")
    except UserError as error:
        (folder / f"error-{launch.rank}").write_text(str(error))


def _two_steps(config: TrainConfig) -> dict[str, Tensor]:
    job = set_up(config)
    loss, optimizer = job.context.loss, job.context.optimizer
    loss.train()
    job.model.train()
    for module in job.model.modules():  # dropout and batch statistics depend on how the batch is split
        if isinstance(module, _BatchNorm) or "Drop" in type(module).__name__:
            module.eval()
    results: dict[str, Tensor] = {}
    parameters = {name.removeprefix("clip."): parameter for name, parameter in job.model.named_parameters()}
    parameters |= {f"the loss's {name}": parameter for name, parameter in loss.named_parameters()}

    def store_gradients(*_: object) -> None:
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                results[f"gradient of {name}"] = full_tensor(parameter.grad).cpu().double().clone()

    optimizer.register_step_pre_hook(store_gradients)
    for group in optimizer.param_groups:
        group["lr"] = min(group["lr"], 1e-4)
    batches = job.loader.epoch(0)
    for step in range(min(STEPS, job.loader.steps_per_epoch)):
        loss.set_epoch(step, STEPS)
        result = training_step(job.context, next(batches).to(job.device, job.dtype))
        results[f"loss of step {step + 1}"] = result.loss.cpu().double()
    state = {f"the loss's {name}": full_tensor(value).cpu().double() for name, value in loss.state_dict().items()}
    return results | state
