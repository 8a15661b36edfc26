"""JSON from files that may be damaged: its content, or one line."""

import os

import pytest

from leanclip.filesystem import MAX_JSON_DEPTH, parse_json, read_json
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
