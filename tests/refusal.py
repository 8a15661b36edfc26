"""Commands, and assertions on the errors that users see: by code, so that the wording can improve."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

from leanclip.cli import main
from leanclip.errors import UserError


def exit_code(*arguments: object) -> int:
    """Of a leanclip command."""
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    assert isinstance(stop.value.code, int)
    return stop.value.code


def refusal(arguments: Iterable[object], capsys: pytest.CaptureFixture[str]) -> str:
    """The line that the command prints on stderr before it exits with code 2."""
    capsys.readouterr()
    code, captured = exit_code(*arguments), capsys.readouterr()
    assert code == 2, captured
    # On a busy machine a second line may say that an index is being made.
    lines = [line for line in captured.err.strip().splitlines() if not line.startswith("indexing ")]
    assert len(lines) == 1, lines
    return lines[0]


@contextmanager
def refuses(code: str, *words: str) -> Iterator[None]:
    """The block raises a UserError of this code; `words` are values the message must name (a path, a flag)."""
    with pytest.raises(UserError) as raised:
        yield
    assert raised.value.code == code, f"{raised.value.code or 'no code'}: {raised.value}"
    assert [word for word in words if word not in str(raised.value)] == [], str(raised.value)


def refusal_code(stderr: str) -> str:
    """The code at the end of the line that the command line prints: `leanclip: message [code]`."""
    return stderr.strip().splitlines()[-1].rpartition("[")[2].removesuffix("]")


def assert_refused(code: str, arguments: Iterable[object], capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The command ends in one line of this code that names `words`."""
    line = refusal(arguments, capsys)
    assert refusal_code(line) == code, line
    assert [word for word in words if str(word) not in line] == [], line
    return line
