"""The index: the samples of a tar, where the index file is, and when shards are scanned again."""

import json
import math
import multiprocessing
import os
import pickle
import tarfile
import threading
import time
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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
from leanclip.data.tar import COLUMNS, IMAGE, TXT, TarReader, scan
from leanclip.progress import ACTIVITY
from machine import wait_until
from refusal import refuses


@pytest.fixture(autouse=True)
def an_index_file_for_small_shards(monkeypatch, tmp_path):
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
def test_the_scan_agrees_with_tarfile(names, sizes, form, read_bytes):
    files = {}
    for name, size in zip(names, sizes, strict=False):
        files[f"{name}.jpg"], files[f"{name}.txt"] = b"i" * size, b"t" * (size // 2)
    try:
        content = shard_bytes(files, format=form)
    except ValueError:  # too long for USTAR
        return
    found = scanned(content, read_bytes=read_bytes)
    assert not found.broken and len(found.table) == len(set(names[:6]))
    for row, name in zip(found.table.tolist(), names, strict=False):
        for column, ending in ((IMAGE, "jpg"), (TXT, "txt")):
            start, length = row[column] * 512, row[column + 1]
            assert content[start : start + length] == files[f"{name}.{ending}"]


def test_incomplete_duplicate_and_escaping_samples_are_left_out_and_counted(tmp_path):
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


def test_samples_that_are_broken_on_reading(tmp_path):
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


def with_size_field(field):
    """A tar of three samples whose second caption has this size field and a valid checksum."""
    content = bytearray(shard_bytes(sound(3)))
    block = content.index(b"00001.txt")
    content[block + 124 : block + 136] = field
    content[block + 148 : block + 156] = b" " * 8
    content[block + 148 : block + 156] = b"%06o\0 " % sum(content[block : block + 512])
    return bytes(content)


@pytest.mark.parametrize(
    "size", [b"-0000002000\0", b"-00000002000", b"\xff" * 12, b"\x80" + b"\xff" * 11, b"77777777777\0"]
)
def test_a_size_that_points_backwards_or_beyond_the_end_is_refused(size):
    found = scanned(with_size_field(size))
    assert 1 <= len(found.table) < 3 and found.broken


def test_sizes_of_twelve_digits_and_of_binary_numbers_are_read():
    length = len(b"picture number 1")
    for field in (b"%012o" % length, b"\x80" + length.to_bytes(11, "big")):
        found = scanned(with_size_field(field))
        assert len(found.table) == 3 and not found.broken and found.table[1, TXT + 1] == length


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_a_truncated_tar_gives_the_samples_before_the_end(tmp_path, share):
    content = shard_bytes(sound(20))
    whole = Shards(str(write_shard(tmp_path / "whole.tar", sound(20))))
    (tmp_path / "cut.tar").write_bytes(content[: int(share * 20 * 512 * 4.4)])
    cut = Shards(str(tmp_path / "cut.tar"))
    assert 0 < len(cut) < 20 and cut.broken["truncated"] == 1
    assert all(cut.image_bytes(number) == whole.image_bytes(number) for number in range(len(cut)))


@pytest.mark.parametrize(
    ("magic", "command"),
    [(b"\x1f\x8b", "gunzip"), (b"BZh", "bunzip2"), (b"\xfd7zXZ\x00", "unxz"), (b"\x28\xb5\x2f\xfd", "unzstd")],
)
def test_compressed_shards_are_refused_with_the_command(tmp_path, magic, command):
    (tmp_path / "a.tar").write_bytes(magic + bytes(600))  # detected by content, not by name
    with refuses("data.compressed", f"{command} ", f"{tmp_path}/a.tar"):
        Shards(str(tmp_path / "a.tar"))


def write_shards(folder, count, samples=4):
    for number in range(count):
        write_shard(folder / f"{number}.tar", sound(samples, start=samples * number))


@pytest.fixture
def scans(monkeypatch):
    """The names of the shards that were scanned."""
    names, scan_shard = [], index._scan_shard
    monkeypatch.setattr(index, "_scan_shard", lambda file: (names.append(file.name), scan_shard(file))[1])
    return names


def test_an_index_file_is_used_and_updated(tmp_path, scans):
    write_shards(tmp_path, 3)
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


def samples_of(shards):
    return [(shards.captions(number), shards.image_bytes(number)) for number in range(len(shards))]


def entry(**changes):
    return {"size": 1, "version": "", "start": 0, "stop": 0, "stamp": 0, "broken": {}, "checksum": 0} | changes


PLANTED = {
    **{f"{key} {value:g}": {"shards": {"0.tar": entry(**{key: value})}}
       for key in ("start", "stop", "size") for value in (-5, 10**9, 10**18, 10**30, math.inf)},
    "deep": "[" * 100_000,
    "no table": [1],
    "no shards": {},
    "shards in a list": {"shards": []},
    "no numbers": {"shards": {"0.tar": entry(start="x", broken=[1])}},
}  # fmt: skip


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED)
def test_planted_values_in_an_index_file_are_not_used(tmp_path, planted):
    """With valid checksums of the text, of the size and version of the shard."""
    write_shards(tmp_path, 1)
    expected, file = samples_of(Shards(str(tmp_path))), stat_all(expand(str(tmp_path)), "")[0]
    text = planted if isinstance(planted, str) else json.dumps(planted)
    text = text.replace('"version": ""', f'"version": "{file.version}"').replace(
        '"size": 1,', f'"size": {file.size},'
    )
    head = index.HEAD.pack(index.MAGIC, len(text), zlib.crc32(text.encode())) + text.encode()
    rows = np.full((4, COLUMNS), 2**31, np.uint32)
    (tmp_path / INDEX_NAME).write_bytes(head.ljust(index._table_offset(len(text)), b"\0") + rows.tobytes())
    assert samples_of(Shards(str(tmp_path))) == expected


def test_rows_beyond_the_end_of_a_shard_are_not_used(tmp_path):
    write_shards(tmp_path, 1)
    expected, file = samples_of(Shards(str(tmp_path))), stat_all(expand(str(tmp_path)), "")[0]
    rows = index.ShardRows(np.full((4, COLUMNS), 2**31, np.uint32), 0, 4, None)
    index._save(tmp_path / INDEX_NAME, {file.path: index.IndexedShard(file, rows, Counter(), 0, rows.checksum())})
    assert samples_of(Shards(str(tmp_path))) == expected


@pytest.mark.parametrize("name", [INDEX_NAME, f"{INDEX_NAME}.lock"])
def test_a_pipe_in_place_of_an_index_file_does_not_block(tmp_path, name):
    write_shards(tmp_path, 2)
    os.mkfifo(tmp_path / name)
    assert len(Shards(str(tmp_path))) == 8
    assert (tmp_path / name).is_fifo()


def test_a_small_data_set_gets_no_index_file(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "MIN_KEPT_BYTES", 256 << 20)
    write_shard(tmp_path / "a.tar", sound(3))
    Shards(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar"]


def test_the_index_of_a_read_only_directory_is_in_the_cache(tmp_path, monkeypatch, scans):
    shards = tmp_path / "read_only"
    shards.mkdir()
    write_shard(shards / "a.tar", sound(3))
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(shards) and access(path, mode))
    for _ in range(2):
        assert len(Shards(str(shards))) == 3
    assert [path.name for path in shards.iterdir()] == ["a.tar"] and scans == ["a.tar"]


def test_shards_are_pickled_to_other_processes(tmp_path):
    write_shard(tmp_path / "a.tar", sound(4))
    shards = Shards(str(tmp_path))
    content = shards.image_bytes(2)
    assert len(pickle.dumps(shards)) < 2000
    assert pickle.loads(pickle.dumps(shards)).image_bytes(2) == content
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(shards.image_bytes, (2,)) == content


def test_one_process_scans_while_others_wait(tmp_path, monkeypatch, scans):
    write_shards(tmp_path, 3)
    scan_shard = index._scan_shard
    monkeypatch.setattr(index, "_scan_shard", lambda file: (time.sleep(0.1), scan_shard(file))[1])
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: len(Shards(str(tmp_path))), range(4))) == [12] * 4
    assert len(scans) == 3


def test_a_killed_scan_resumes(tmp_path, monkeypatch, scans):
    write_shards(tmp_path, 4)
    scan_shard = index._scan_shard

    def killed(file):
        if file.name == "2.tar":
            raise KeyboardInterrupt
        return scan_shard(file)

    for name, value in {
        "SAVE_SECONDS": 0,
        "MAX_SAVE_SHARE": math.inf,
        "SCAN_THREADS": 1,
        "_scan_shard": killed,
    }.items():
        monkeypatch.setattr(index, name, value)
    with pytest.raises(KeyboardInterrupt):
        Shards(str(tmp_path))
    monkeypatch.setattr(index, "_scan_shard", scan_shard)
    scans.clear()
    assert len(Shards(str(tmp_path))) == 16 and scans == ["2.tar", "3.tar"]


def test_an_incomplete_index_is_saved_periodically(tmp_path, monkeypatch):
    clock, saved = [0.0], []

    def save(path, scanned):
        saved.append(clock[0])
        clock[0] += 6

    def progress(path):
        clock[0] += 10

    write_shards(tmp_path, 30, samples=1)
    monkeypatch.setattr(index, "_save", save)
    monkeypatch.setattr(index, "show_progress", progress)
    monkeypatch.setattr(index.time, "monotonic", lambda: clock[0])
    index._scan_all(stat_all(expand(str(tmp_path)), ""), tmp_path / INDEX_NAME)
    assert saved == [30, 156, 282]  # at least 30 s apart, and 20 times as long as a save takes


def test_every_scanned_shard_counts_as_activity(tmp_path):
    write_shards(tmp_path, 3)
    files = stat_all(expand(str(tmp_path)), "")
    before = ACTIVITY.ticks
    open_index(files)
    assert ACTIVITY.ticks >= before + 3


def test_a_waiting_process_is_active_while_the_scan_makes_progress(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "LOCK_POLL_SECONDS", 0.01)
    path, done = tmp_path / INDEX_NAME, threading.Event()

    def wait():
        with index.lock(path, "indexes data"):
            done.set()

    def wait_for_activity_since(ticks):
        wait_until(lambda: ACTIVITY.ticks > ticks, 10)

    before, waiting = ACTIVITY.ticks, threading.Thread(target=wait)
    with index.lock(path, "indexes data"):
        waiting.start()
        wait_for_activity_since(before)
        for _ in range(2):
            before = ACTIVITY.ticks
            time.sleep(0.1)
            assert ACTIVITY.ticks == before  # no progress: the scan may hang
            index.show_progress(path)
            wait_for_activity_since(before)
        assert not done.is_set()
    waiting.join()
    assert done.is_set()


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
    for data, code in {
        "memory://bucket/01.tar": "data.not_found",
        "nothing://a.tar": "data.unreadable",
        "pipe:cat a.tar": "data.bad_pattern",
        "a{0..": "data.bad_pattern",
    }.items():
        with refuses(code, data):
            Shards(data)


def test_more_shards_than_open_files(tmp_path, monkeypatch):
    monkeypatch.setattr("leanclip.data.files.MAX_OPEN_FILES", 4)
    for number in range(12):
        write_shard(tmp_path / f"{number:02d}.tar", sound(1, start=number))
    shards = Shards(str(tmp_path))
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(2):
        assert len({shards.image_bytes(number) for number in range(12)}) == 12
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 4


def test_sources_with_factors_are_parts(tmp_path):
    for number in range(4):
        write_shard(tmp_path / f"{number}.tar", sound(2 + number, start=10 * number))
    data = f"{tmp_path}/{{0..1}}.tar::{tmp_path}/{{2..3}}.tar"
    assert Shards(data).parts == [Part(0, 14, 1.0)]
    assert Shards(data, factors=[2.0, 0.5]).parts == [Part(0, 5, 2.0), Part(5, 14, 0.5)]
    with refuses("data.duplicate_source", "0.tar"):
        Shards(f"{tmp_path}/0.tar::{tmp_path}/0.tar")


def test_a_manifest_distinguishes_shards_of_the_same_name(tmp_path):
    for number, directory in enumerate(("a", "b")):
        (tmp_path / directory).mkdir()
        write_shard(tmp_path / directory / "0.tar", sound(3 + number))
    forward, backward = (f"{tmp_path}/{one}/0.tar::{tmp_path}/{two}/0.tar" for one, two in ("ab", "ba"))
    manifest = json.loads(json.dumps(Shards(forward).manifest()))
    assert [file.path for file in Shards(backward, manifest=manifest).files] == [
        file.path for file in Shards(forward).files
    ]


def test_the_table_is_memory_mapped(tmp_path):
    write_shard(tmp_path / "a.tar", sound(3))
    files = stat_all(expand(str(tmp_path)), "")
    open_index(files)
    base = open_index(files)[0].rows.table
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    assert not isinstance(base, np.ndarray)  # an mmap at the bottom
