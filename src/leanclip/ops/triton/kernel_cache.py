"""Launches with a cache of compiled kernels: Triton's own look-up takes longer than a small kernel runs."""

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

_compiled: dict[tuple[Any, ...], Any] = {}


def on_device(tensor: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensors'."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)


def run(
    function: Any,
    grid: tuple[int, int, int],
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
    options: dict[str, int],
) -> None:
    """Launch `function` with its run-time arguments in order and its constants by name."""
    if not isinstance(function, JITFunction):  # the interpreter's stand-in
        function[grid](*arguments, **constants)
        return
    key = (
        function,
        torch.cuda.current_device(),
        *map(_specialization, arguments),
        *constants.values(),
        *options.values(),
    )
    if key in _compiled:
        compiled, values = _compiled[key]
        compiled[grid](*arguments, *values)
    else:
        compiled = function[grid](*arguments, **constants, **options)
        _compiled[key] = compiled, tuple(constants[name] for name in function.arg_names[len(arguments) :])


def _specialization(argument: Any) -> Any:
    """The properties of an argument's value that Triton compiles into the code, or more."""
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, argument >= 1 << 31
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, float):
        return float
    return argument.base.dtype, tuple(argument.block_shape)
