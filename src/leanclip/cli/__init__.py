"""The command line: `leanclip COMMAND`."""

import difflib
import errno
import gc
import importlib
import multiprocessing
import os
import re
import select
import signal
import sys
import threading
import time
from dataclasses import fields
from types import FrameType, ModuleType
from typing import NoReturn

from leanclip.errors import ArgumentError, UserError, stopped_code
from leanclip.version import __version__

USAGE = """usage: leanclip COMMAND [options]

Train CLIP models on few GPUs.

{commands}

Start with:         leanclip train --recipe demo
Help of a command:  leanclip COMMAND --help"""
COMMANDS = {
    "train": "train a model; without arguments, a small one on the bundled data",
    "plan": "memory, speed and the command of a run on given GPUs, without running it",
    "evaluate": "retrieval and zero-shot metrics of a run, a checkpoint or an open_clip model",
    "embed": "embeddings of images and captions, in files that NumPy maps",
    "search": "a local page to search embedded images by a sentence or an image",
    "data": "pack images and captions into shards; check a data set",
    "export": "write a trained model as an open_clip file or a transformers directory",
    "report": "write one HTML file with the curves, metrics and images of a run",
    "selftest": "check the losses and their gradients on this machine",
}


def main(arguments: list[str] | None = None) -> None:
    """Run a command. A UserError is printed as one line on stderr, with exit code 2."""
    own_process = arguments is None
    arguments = sys.argv[1:] if arguments is None else arguments
    training = arguments[:1] == ["train"]
    if own_process and training:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, _stopped_before_training)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            threading.Thread(target=_end_with_torchrun, args=(os.getppid(),), daemon=True).start()
    try:
        try:
            _run(arguments)
            sys.exit(0)
        finally:
            sys.stdout.flush()  # here, where a broken pipe is caught
    except UserError as error:
        if not error.shown:
            code = f" [{error.code}]" if error.code else ""
            print(f"leanclip: {_rank()}{_message(error)}{code}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        hint = "; to continue from the last checkpoint, give the same --name and --resume auto" if training else ""
        print(f"leanclip: {_rank()}interrupted{hint}", file=sys.stderr)
        if training and own_process:
            _exit_now(130)
        sys.exit(130)
    except (BrokenPipeError, SystemExit) as stop:
        if not _output_is_closed(stop):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for output that is still in a buffer
        sys.exit(141)  # as after SIGPIPE


def _message(error: UserError) -> str:
    """A loss names its hyper-parameters as Python does: here they are flags."""
    if not isinstance(error, ArgumentError):
        return str(error)
    from leanclip.losses import LossConfig

    names = {field.name: f"--{field.name.replace('_', '-')}" for field in fields(LossConfig)}
    return re.sub(r"'?\b(\w+)\b'?", lambda word: names.get(word[1], word[0]), str(error))


def _stopped_before_training(number: int, _: FrameType | None) -> NoReturn:
    """The exit code is that of a run which has saved: it should be started again."""
    os.write(2, f"leanclip: {_rank()}{signal.Signals(number).name} before the first step\n".encode())
    os._exit(stopped_code())


def _end_with_torchrun(parent: int) -> None:
    """From the start of the process, whatever it waits for: the store that the ranks meet at ends with torchrun."""
    while os.getppid() == parent:
        time.sleep(1)
    os.write(2, f"leanclip: {_rank()}torchrun has ended\n".encode())
    _exit_now(3)


def _output_is_closed(stop: BaseException) -> bool:
    """Whether the reader has closed the pipe, as in `leanclip ... | head -3`."""
    if isinstance(stop, SystemExit):
        return isinstance(stop.__context__, BrokenPipeError)  # raised by rich
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in output.poll(0))


def _exit_now(code: int) -> NoReturn:
    """Exit without waiting for a checkpoint that is being written."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)


def _rank() -> str:
    """The start of a message: empty in the first process."""
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    return "" if rank == "0" else f"rank {rank}: "


def _imported(name: str) -> ModuleType:
    """The module of a command. Searching half a million new objects for garbage takes a fifth of the time."""
    if name in sys.modules:
        return sys.modules[name]
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.freeze()  # what was imported stays
        gc.enable()


def _run(arguments: list[str]) -> None:
    command = arguments[0] if arguments else "--help"
    if command in ("-h", "--help", "help"):
        lines = [f"  {name:<10} {text}" for name, text in COMMANDS.items()]
        print(USAGE.format(commands="\n".join(lines)))
    elif command == "--version":
        print(__version__)
    elif command in COMMANDS:
        try:
            _imported(f"leanclip.cli.{command}").run(arguments[1:])
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            name = str(error.filename)[:80]
            raise UserError(f"a path is too long: {name}...; give a shorter one", code="file.long_name") from error
    else:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}"
        raise UserError(f"unknown command {command!r}; {hint}", code="cli.unknown_command")
