"""Compare N processes with one on this model, loss and data: two training steps in float64."""

import multiprocessing
import socket
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial

import torch
from safetensors.torch import load, save
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
    (expected,), results = _run(single, 1), _run(config, processes)
    # A gradient whose true value is zero (the bias of a key) is only rounding error: compared with the largest one.
    floor = 1e-6 * max(value.norm().item() for name, value in expected.items() if "gradient" in name)
    for name, value in sorted(expected.items(), key=lambda item: not item[0].startswith("loss of")):
        size = value[value.isfinite()].norm().item()  # the estimate of a sample that was never visited is -inf
        differences = [torch.where(result[name] == value, 0.0, result[name] - value) for result in results]
        error = max(difference.norm().item() for difference in differences)
        yield Agreement(quantity=name, size=size, error=error / max(size, floor if "gradient" in name else 1e-300))


def _run(config: TrainConfig, processes: int) -> list[dict[str, Tensor]]:
    """The results of each process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launches = [Launch(rank, processes, rank, "selftest", port=port) for rank in range(processes)]
    try:
        with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
            return [load(result) for result in pool.map(partial(_run_rank, config), launches)]
    except BrokenProcessPool as error:
        message = "a process of the selftest failed; its error is printed above"
        raise UserError(message, code="selftest.failed") from error


def _run_rank(config: TrainConfig, launch: Launch) -> bytes:
    device = device_for(launch, config.run.device)
    parallel = replace(config.parallel, threads=max(1, torch.get_num_threads() // launch.size))
    config = replace(config, run=replace(config.run, device=device), parallel=parallel)
    with process_group(launch, torch.device(device), timeout=parallel.dist_timeout, always=parallel.fsdp):
        return save(_two_steps(config))


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
