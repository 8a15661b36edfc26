"""JSON from files that may be damaged: its content, or one line. Files that are not replaced."""

import os
from pathlib import Path

import pytest

from leanclip.filesystem import MAX_JSON_DEPTH, check_target, parse_json, read_json
from refusal import refuses

DAMAGED = [b"", b"{", b"\xff", b"[" * 100_000, b"[" * 101 + b"]" * 101, b"[1" + b"0" * 400 + b"]", b"1" * 5000]


def test_json_is_read(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"a": [1, -2.5, 18446744073709551615, null, NaN]}')
    assert str(read_json(path)) == "{'a': [1, -2.5, 18446744073709551615, None, nan]}"
    assert parse_json("null") is None
    assert parse_json("[" * (MAX_JSON_DEPTH - 1) + "]" * (MAX_JSON_DEPTH - 1))


@pytest.mark.parametrize("content", DAMAGED, ids=range(len(DAMAGED)))
def test_damaged_json_is_refused(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    with refuses("file.bad_json", "a.json"):
        read_json(tmp_path / "a.json")


def test_files_that_are_missing_too_large_or_never_end_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    (tmp_path / "large").write_text("[1, 2, 3]")
    for name in ("missing", "pipe", "zeros", "large", ""):
        with refuses("file.bad_json", str(tmp_path / name)):
            read_json(tmp_path / name, max_bytes=5)


@pytest.mark.skipif(not Path("/dev/stdout").is_symlink(), reason="no /dev/stdout")
def test_the_link_to_the_output_is_not_replaced(tmp_path):
    """It leads to a regular file, as in `leanclip evaluate ... --json /dev/stdout > FILE`."""
    saved = os.dup(1)
    with (tmp_path / "output").open("w") as file:
        os.dup2(file.fileno(), 1)
        try:
            assert Path("/dev/stdout").is_file()
            with pytest.raises(OSError, match="not a regular file"):
                check_target(Path("/dev/stdout"))
        finally:
            os.dup2(saved, 1)
            os.close(saved)
