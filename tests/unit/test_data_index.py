"""The index: what it finds in a tar, where it is kept, and when it is made anew."""

import json
import math
import multiprocessing
import os
import pickle
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_files import picture, shard_bytes, sound, write_shard

from leanclip.data import Shards, index
from leanclip.data.files import expand, stat_all
from leanclip.data.index import INDEX_NAME, open_index
from leanclip.data.source import BrokenSample, Part
from leanclip.data.tar import IMAGE, TXT, TarReader, scan
from leanclip.errors import UserError
from leanclip.progress import ACTIVITY


@pytest.fixture(autouse=True)
def everything_is_kept(monkeypatch, tmp_path):
    """Also the index of small shards, and not in the user's cache."""
    monkeypatch.setattr(index, "MIN_KEPT_BYTES", 0)
    monkeypatch.setenv("LEANCLIP_CACHE", str(tmp_path / "cache"))


def scanned(content, **options):
    return scan(TarReader(lambda offset, length: content[offset : offset + length], len(content), **options))


NAMES = st.text(st.sampled_from("abcü/_- "), min_size=1, max_size=150).filter(
    lambda name: not name.startswith("/") and ".." not in name and not name.endswith("/")
)


@settings(max_examples=80, deadline=None)
@given(
    names=st.lists(NAMES, min_size=1, max_size=6, unique=True),
    sizes=st.lists(st.integers(0, 1500), min_size=6, max_size=6),
    form=st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
    read_bytes=st.sampled_from([None, 512, 700, 5000]),
)
def test_finds_what_tarfile_finds(names, sizes, form, read_bytes):
    files = {}
    for name, size in zip(names, sizes, strict=False):
        files[f"{name}.jpg"], files[f"{name}.txt"] = b"i" * size, b"t" * (size // 2)
    try:
        content = shard_bytes(files, format=form)
    except ValueError:  # too long for the oldest form
        return
    found = scanned(content, read_bytes=read_bytes)
    assert not found.broken and len(found.table) == len(set(names[:6]))
    for row, name in zip(found.table.tolist(), names, strict=False):
        for column, ending in ((IMAGE, "jpg"), (TXT, "txt")):
            start, length = row[column] * 512, row[column + 1]
            assert content[start : start + length] == files[f"{name}.{ending}"]


def test_every_kind_of_bad_sample_is_left_out_and_counted(tmp_path):
    good = list(sound(5).items())
    bad = [
        ("no_caption.jpg", picture(1)),
        ("no_image.txt", b"x"),
        ("00001.jpg", picture(9)), ("00001.txt", b"another with the key of the first"),
        ("../escaping.jpg", picture(2)), ("../escaping.txt", b"x"),
        ("/absolute.jpg", picture(2)), ("/absolute.txt", b"x"),
        ("a/../../deep.jpg", picture(2)), ("a/../../deep.txt", b"x"),
    ]  # fmt: skip
    shards = Shards(str(write_shard(tmp_path / "a.tar", good + bad)))
    assert len(shards) == 5
    assert shards.broken == {"no caption": 1, "no image": 1, "duplicate key": 1, "escaping path": 3}
    assert shards.captions(1) == ["picture number 1"]


def test_bad_samples_that_show_when_read(tmp_path):
    files = {
        "a.jpg": b"", "a.txt": b"no bytes",
        "b.jpg": picture(1), "b.txt": "ü".encode("latin-1"),
        "c.jpg": picture(1), "c.txt": b"  ",
        "d.jpg": picture(1), "d.json": b'{"captions": [',
        "e.jpg": picture(1), "e.json": b'{"other": 1}',
        "f.jpg": picture(1), "f.json": b'{"captions": ["", " "]}',
        "g.jpg": picture(1), "g.json": b'{"captions": [1, 2]}',
        "h.jpg": picture(1), "h.json": b'{"captions": ["one"], "weights": [1, 2]}',
        "i.jpg": picture(1), "i.json": b"[" * 100_000,
        "j.jpg": picture(1), "j.json": b'{"other": 1}', "j.txt": b"from the text",
    }  # fmt: skip
    shards = Shards(str(write_shard(tmp_path / "a.tar", files)), weights_key="weights")
    with pytest.raises(BrokenSample, match=r"a of .* has no bytes") as empty:
        shards.image_bytes(0)
    assert empty.value.kind == "empty" and pickle.loads(pickle.dumps(empty.value)).kind == "empty"
    kinds = {1: "encoding", 2: "empty", 3: "caption", 4: "no caption", 5: "empty", 6: "caption", 7: "caption"}
    for number, kind in (kinds | {8: "caption"}).items():
        with pytest.raises(BrokenSample) as broken:
            shards.captions(number)
        assert broken.value.kind == kind and "abcdefghi"[number] + " of " in str(broken.value)
    assert shards.captions(9) == ["from the text"]


@pytest.mark.parametrize(
    "size", [b"-0000002000\0", b"-00000002000", b"\xff" * 12, b"\x80" + b"\xff" * 11, b"77777777777\0"]
)
def test_a_hostile_size_does_not_lead_the_walk_astray(size):
    """With a checksum that holds: sizes that point backwards, or beyond everything."""
    content = bytearray(shard_bytes(sound(3)))
    block = content.index(b"00001.txt")
    content[block + 124 : block + 136] = size
    content[block + 148 : block + 156] = b" " * 8
    content[block + 148 : block + 156] = b"%06o\0 " % sum(content[block : block + 512])
    found = scanned(bytes(content))
    assert 1 <= len(found.table) < 3 and found.broken


def test_sizes_of_twelve_digits_and_of_binary_numbers_are_read():
    for field in (b"%012o", None):
        content = bytearray(shard_bytes(sound(3)))
        block = content.index(b"00001.txt")
        length = len(b"picture number 1")
        written = b"\x80" + length.to_bytes(11, "big") if field is None else field % length
        content[block + 124 : block + 136] = written
        content[block + 148 : block + 156] = b" " * 8
        content[block + 148 : block + 156] = b"%06o\0 " % sum(content[block : block + 512])
        found = scanned(bytes(content))
        assert len(found.table) == 3 and not found.broken and found.table[1, TXT + 1] == length


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_a_cut_tar_gives_what_stands_before_the_cut(tmp_path, share):
    content = shard_bytes(sound(20))
    whole = Shards(str(write_shard(tmp_path / "whole.tar", sound(20))))
    (tmp_path / "cut.tar").write_bytes(content[: int(share * 20 * 512 * 4.4)])
    cut = Shards(str(tmp_path / "cut.tar"))
    assert 0 < len(cut) < 20 and cut.broken["truncated"] == 1
    assert all(cut.image_bytes(number) == whole.image_bytes(number) for number in range(len(cut)))


@pytest.mark.parametrize(("ending", "command"), [("gz", "gunzip"), ("bz2", "bunzip2"), ("xz", "unxz")])
def test_compressed_shards_are_refused_with_the_command(tmp_path, ending, command):
    path = tmp_path / f"a.tar.{ending}"
    mode: Any = f"w:{ending}"
    with tarfile.open(path, mode):
        pass
    with pytest.raises(UserError, match=rf"{command} .*a\.tar\.{ending}"):
        Shards(str(path))
    (tmp_path / "b.tar").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(600))  # by content, not by name
    with pytest.raises(UserError, match=r"unzstd .*b\.tar"):
        Shards(str(tmp_path / "b.tar"))


def test_a_kept_index_is_used_and_follows_the_files(tmp_path, monkeypatch):
    scans = []
    once = index._scan_shard
    monkeypatch.setattr(index, "_scan_shard", lambda file: (scans.append(file.name), once(file))[1])
    for number in range(3):
        write_shard(tmp_path / f"{number}.tar", sound(4, start=4 * number))
    first = Shards(str(tmp_path))
    assert sorted(scans) == ["0.tar", "1.tar", "2.tar"] and (tmp_path / INDEX_NAME).is_file()
    again = Shards(str(tmp_path / "{0..1}.tar"))
    assert len(scans) == 3 and len(again) == 8
    assert [again.image_bytes(i) for i in range(8)] == [first.image_bytes(i) for i in range(8)]
    write_shard(tmp_path / "1.tar", sound(6, start=50))
    write_shard(tmp_path / "3.tar", sound(1, start=90))
    assert len(Shards(str(tmp_path))) == 15
    assert sorted(scans[3:]) == ["1.tar", "3.tar"]
    (tmp_path / INDEX_NAME).write_bytes((tmp_path / INDEX_NAME).read_bytes()[:-30])
    assert len(Shards(str(tmp_path))) == 15 and len(scans) == 9
    for garbage in (b"", b"garbage", index.MAGIC + b"\xff" * 100, index.MAGIC + (2).to_bytes(8, "little") + b"{}"):
        (tmp_path / INDEX_NAME).write_bytes(garbage)
        assert len(Shards(str(tmp_path))) == 15
    assert not list(tmp_path.glob(f"{INDEX_NAME}.*[!k]"))  # nothing but the lock beside it


def test_a_small_data_set_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "MIN_KEPT_BYTES", 256 << 20)
    write_shard(tmp_path / "a.tar", sound(3))
    Shards(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar"]


def test_a_directory_that_cannot_be_written_to_is_indexed_in_the_cache(tmp_path, monkeypatch):
    shards = tmp_path / "read_only"
    shards.mkdir()
    write_shard(shards / "a.tar", sound(3))
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(shards) and may(path, mode))
    assert len(Shards(str(shards))) == 3
    assert [path.name for path in shards.iterdir()] == ["a.tar"]
    kept = [path for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"]
    assert len(kept) == 1
    before = kept[0].stat().st_mtime_ns
    assert len(Shards(str(shards))) == 3 and kept[0].stat().st_mtime_ns == before


def test_shards_travel_to_other_processes(tmp_path):
    write_shard(tmp_path / "a.tar", sound(4))
    shards = Shards(str(tmp_path))
    content = shards.image_bytes(2)
    assert len(pickle.dumps(shards)) < 2000
    assert pickle.loads(pickle.dumps(shards)).image_bytes(2) == content
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(shards.image_bytes, (2,)) == content


def test_one_process_scans_while_others_wait(tmp_path, monkeypatch):
    for number in range(3):
        write_shard(tmp_path / f"{number}.tar", sound(4, start=4 * number))
    scans, once = [], index._scan_shard

    def slow(file):
        scans.append(file.name)
        time.sleep(0.1)
        return once(file)

    monkeypatch.setattr(index, "_scan_shard", slow)
    found = []
    threads = [threading.Thread(target=lambda: found.append(len(Shards(str(tmp_path))))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [12] * 4 and len(scans) == 3


def test_a_scan_that_is_killed_goes_on_where_it_was(tmp_path, monkeypatch):
    for number in range(4):
        write_shard(tmp_path / f"{number}.tar", sound(4, start=4 * number))
    scans, once = [], index._scan_shard

    def killed(file):
        if file.name == "2.tar":
            raise KeyboardInterrupt
        return once(file)

    for name, value in {
        "SAVE_SECONDS": 0,
        "MAX_SAVE_SHARE": math.inf,
        "SCAN_THREADS": 1,
        "_scan_shard": killed,
    }.items():
        monkeypatch.setattr(index, name, value)
    with pytest.raises(KeyboardInterrupt):
        Shards(str(tmp_path))
    monkeypatch.setattr(index, "_scan_shard", lambda file: (scans.append(file.name), once(file))[1])
    assert len(Shards(str(tmp_path))) == 16 and scans == ["2.tar", "3.tar"]


def test_an_index_is_saved_now_and_then(tmp_path, monkeypatch):
    clock, saved = [0.0], []

    def save(place, found):
        saved.append(clock[0])
        clock[0] += 6

    monkeypatch.setattr(index, "_save", save)
    monkeypatch.setattr(index.time, "monotonic", lambda: clock[0])
    keep = index._PeriodicSave(tmp_path / INDEX_NAME)
    for _ in range(30):
        clock[0] += 10
        keep({})
    assert saved == [30, 156, 282]  # between two lie 30 s, and 20 times as long as one takes


def test_every_scanned_shard_is_a_sign_of_work(tmp_path):
    for number in range(3):
        write_shard(tmp_path / f"{number}.tar", sound(1, start=number))
    files = stat_all(expand(str(tmp_path)), "")
    before = ACTIVITY.ticks
    open_index(files)
    assert ACTIVITY.ticks >= before + 3


def test_who_waits_for_a_scan_is_at_work_as_long_as_the_scan_is(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "LOCK_POLL_SECONDS", 0.01)
    place, looks = tmp_path / INDEX_NAME, []

    def wait():
        with index._lock(place, "here"):
            looks.append("done")

    def worked_since(count):
        deadline = time.monotonic() + 10
        while ACTIVITY.ticks == count and time.monotonic() < deadline:
            time.sleep(0.01)
        return ACTIVITY.ticks > count

    before, waiting = ACTIVITY.ticks, threading.Thread(target=wait)
    with index._lock(place, "here"):
        waiting.start()
        assert worked_since(before)
        for _ in range(2):
            before = ACTIVITY.ticks
            time.sleep(0.1)
            assert ACTIVITY.ticks == before  # who scans stands still: it may hang
            index._PeriodicSave(place)({})
            assert worked_since(before)
        assert not looks
    waiting.join()
    assert looks


def test_urls_are_read_by_position(tmp_path):
    files = fsspec.filesystem("memory")
    for number in range(3):
        with files.open(f"/bucket/{number:02d}.tar", "wb") as file:
            file.write(shard_bytes(sound(5, start=5 * number)))
    local = Shards(str(write_shard(tmp_path / "local.tar", sound(15))))
    for pattern in ("memory://bucket/{00..02}.tar", "memory://bucket/*.tar", "memory://bucket/"):
        shards = Shards(pattern)
        assert len(shards) == 15
        assert [shards.captions(i) for i in range(15)] == [local.captions(i) for i in range(15)]
        assert shards.image_bytes(14) == local.image_bytes(14) and shards.name(14).startswith("00014 of memory://")
    assert any((tmp_path / "cache").iterdir())
    files.rm("/bucket/01.tar")
    with pytest.raises(BrokenSample, match=r"cannot read memory://.*01\.tar") as broken:
        shards.image_bytes(7)
    assert broken.value.kind == "vanished"
    with pytest.raises(UserError, match=r"no such file or folder: memory://bucket/01\.tar$"):
        Shards("memory://bucket/01.tar")
    with pytest.raises(UserError, match="cannot read nothing://"):
        Shards("nothing://a.tar")
    with pytest.raises(UserError, match="is a command; give the URL"):
        Shards("pipe:cat a.tar")


def test_more_shards_than_open_files(tmp_path, monkeypatch):
    monkeypatch.setattr("leanclip.data.files.MAX_OPEN_FILES", 4)
    for number in range(12):
        write_shard(tmp_path / f"{number:02d}.tar", sound(1, start=number))
    shards = Shards(str(tmp_path))
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(2):
        assert len({shards.image_bytes(number) for number in range(12)}) == 12
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 4


def test_a_million_samples_take_little_memory():
    table = scanned(shard_bytes(sound(50))).table
    assert table.nbytes / len(table) < 32


def test_sources_with_factors_are_parts(tmp_path):
    for number in range(4):
        write_shard(tmp_path / f"{number}.tar", sound(2 + number, start=10 * number))
    data = f"{tmp_path}/{{0..1}}.tar::{tmp_path}/{{2..3}}.tar"
    assert Shards(data).parts == [Part(0, 14, 1.0)]
    assert Shards(data, factors=[2.0, 0.5]).parts == [Part(0, 5, 2.0), Part(5, 14, 0.5)]
    with pytest.raises(UserError, match=r"0\.tar is named twice"):
        Shards(f"{tmp_path}/0.tar::{tmp_path}/0.tar")


def test_a_manifest_tells_shards_of_one_name_apart(tmp_path):
    for number, directory in enumerate(("a", "b")):
        (tmp_path / directory).mkdir()
        write_shard(tmp_path / directory / "0.tar", sound(3 + number))
    forward, backward = (f"{tmp_path}/{one}/0.tar::{tmp_path}/{two}/0.tar" for one, two in ("ab", "ba"))
    manifest = json.loads(json.dumps(Shards(forward).manifest()))
    assert [file.path for file in Shards(backward, manifest=manifest).files] == [
        file.path for file in Shards(forward).files
    ]


def test_the_table_is_mapped_not_read(tmp_path):
    write_shard(tmp_path / "a.tar", sound(3))
    files = stat_all(expand(str(tmp_path)), "")
    open_index(files)
    base = open_index(files)[0].rows.table
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    assert not isinstance(base, np.ndarray)  # an mmap at the bottom
