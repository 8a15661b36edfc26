"""Errors that the user can fix, and the exit code of a run that was stopped and should be started again."""

import os

STOPPED = 75  # EX_TEMPFAIL


def stopped_code() -> int:
    """Of a stopped run. 0 under a torchrun with restarts left, which would take another code for a failure."""
    return 0 if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0 else STOPPED


class UserError(Exception):
    """A mistake in the input: a one-line message with cause and remedy, and a stable code (`data.not_found`)."""

    shown = False  # another process prints it already
    exit_code = 2

    def __init__(self, message: str, *, code: str = "") -> None:
        super().__init__(one_line(message))
        self.code = code


class ArgumentError(UserError, ValueError):
    """A wrong argument to a function of the library: a ValueError in Python, a UserError on the command line."""


def one_line(text: str, *, limit: int = 1000) -> str:
    """What others wrote may hold line breaks, or be as long as a file: on one line, with its middle left out."""
    text = " ".join(text.splitlines())
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"


def first_line(error: BaseException, *, limit: int = 160) -> str:
    """The type of an error and the first line of its message, for a message of ours."""
    lines = (getattr(error, "strerror", None) or str(error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:limit]}" if lines else type(error).__name__
