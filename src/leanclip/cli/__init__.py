"""The command line: `leanclip COMMAND`."""

import importlib
import os
import select
import signal
import sys
from types import FrameType
from typing import NoReturn

from leanclip.errors import UserError, stopped_code

COMMANDS = {
    "train": "train a model; without arguments, a small one on the bundled data",
    "plan": "what fits on which GPUs, how fast it will be, and the command for it",
    "evaluate": "retrieval and zero-shot figures of a run, a checkpoint or an open_clip model",
    "data": "pack pictures and captions into shards; check a data set",
    "export": "a trained model as an open_clip file or a transformers directory",
    "report": "one HTML file with a run's curves, figures and pictures",
    "selftest": "check on this machine that the losses compute what they should",
}


def main(arguments: list[str] | None = None) -> None:
    """Run a command. Mistakes of the user end in one line on stderr and exit code 2."""
    alone = arguments is None  # in a process of its own
    arguments = sys.argv[1:] if arguments is None else arguments
    if alone and arguments[:1] == ["train"]:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, _not_begun)
    try:
        try:
            sys.exit(_run(arguments))
        finally:
            sys.stdout.flush()  # now, not at the very end, where nobody could take a broken pipe for what it is
    except UserError as error:
        if not error.shown:
            print(f"leanclip: {_rank()}{error}" + (f" [{error.code}]" if error.code else ""), file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        training = arguments[:1] == ["train"]
        hint = "; the last checkpoint stays, go on with the same --name and --resume auto"
        print(f"leanclip: {_rank()}interrupted{hint if training else ''}", file=sys.stderr)
        if training and alone:
            _leave(130)
        sys.exit(130)
    except (BrokenPipeError, SystemExit) as stop:
        if not _unread(stop):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is not printed yet has to go somewhere
        sys.exit(141)  # as SIGPIPE ends other programs


def _not_begun(number: int, _: FrameType | None) -> NoReturn:
    """A run that is told to end while it still loads is to be started again, like one that has saved."""
    os.write(2, f"leanclip: {_rank()}{signal.Signals(number).name} came before the run began\n".encode())
    os._exit(stopped_code())


def _unread(stop: BaseException) -> bool:
    """Whether nobody reads what is printed, as in `leanclip ... | head -3`."""
    if isinstance(stop, SystemExit):
        return isinstance(stop.__context__, BrokenPipeError)  # rich has noticed it
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in output.poll(0))


def _leave(code: int) -> NoReturn:
    """At once, without waiting for a checkpoint that is being written."""
    import multiprocessing

    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)


def _rank() -> str:
    """Which of several processes speaks; the first one need not say it."""
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    return "" if rank == "0" else f"rank {rank}: "


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if arguments[0] == "--version":
        from leanclip.version import __version__

        print(__version__)
        return 0
    command = arguments[0]
    if command not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}"
        raise UserError(f"unknown command {command!r}; {hint}", code="cli.unknown_command")
    importlib.import_module(f"leanclip.cli.{command}").run(arguments[1:])
    return 0


def _usage() -> str:
    lines = ["usage: leanclip COMMAND [options]", "", "Train CLIP models on few GPUs.", ""]
    lines += [f"  {name:<10} {text}" for name, text in COMMANDS.items()]
    lines += ["", "Start here:   leanclip train --recipe demo", "Each command:  leanclip COMMAND --help"]
    return "\n".join(lines)
