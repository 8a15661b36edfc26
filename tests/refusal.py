"""Assertions on the errors that users see: by code, so that the wording can improve."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from leanclip.errors import UserError


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
