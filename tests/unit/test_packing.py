"""Packing: damaged input, interruption, repeated calls, worker processes."""

import contextlib
import io
import json
import subprocess
import sys
import tarfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from data_forms import bundled, make_coco, make_csv, make_folder, make_parquet_bytes, write_images, write_table
from in_workers import die, square
from PIL import Image
from pyarrow import parquet
from ranks_job import processes_where
from shard_files import picture

from leanclip.data import BrokenSample, Shards
from leanclip.data.csv_table import Table
from leanclip.data.synthetic import Synthetic
from leanclip.packing.coco import Coco
from leanclip.packing.folder import Folder
from leanclip.packing.pack import PackConfig, pack
from leanclip.packing.parquet import Parquet
from leanclip.worker_pool import run_tasks
from machine import wait_until
from refusal import assert_refused, exit_code, refuses


def command(*arguments):
    return exit_code("data", "pack", *arguments)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.tar")}


def test_the_same_input_gives_the_same_bytes_with_any_number_of_workers(tmp_path):
    table = make_csv(tmp_path / "data", 20)
    config = PackConfig(samples_per_shard=6)
    counted = []
    one = pack(Table(table), tmp_path / "one", config, progress=counted.append)
    two = pack(Table(table), tmp_path / "two", config, workers=2)
    assert one == two and one.samples == 20 and one.shards == 4
    assert sum(counted) == 20
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    with tarfile.open(tmp_path / "one" / "00003.tar") as archive:
        assert archive.getnames() == ["000000018.jpg", "000000018.txt", "000000019.jpg", "000000019.txt"]
        assert {(entry.mtime, entry.uid, entry.mode) for entry in archive} == {(0, 0, 0o644)}


def test_only_missing_shards_are_written_again(tmp_path, capsys):
    table, out = make_csv(tmp_path / "data", 12), tmp_path / "out"
    arguments = (table, out, "--samples-per-shard", "4", "--workers", "1")
    assert command(*arguments) == 0
    before = contents(out)
    written = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    (out / "00001.tar").unlink()
    (out / "00002.tar").write_bytes(b"short")
    (out / ".00002.tar.x.tmp").write_bytes(b"left behind")
    with (out / "pack.jsonl").open("a") as file:
        file.write('\0\0\n{"shard": 7, "samp')
    capsys.readouterr()
    assert command(*arguments) == 0
    assert "3 (1 from an earlier run)" in capsys.readouterr().out
    assert contents(out) == before
    assert (out / "00000.tar").stat().st_mtime_ns == written["00000.tar"]
    assert not list(out.glob("*.tmp"))
    assert command(*arguments) == 0
    assert "3 (3 from an earlier run)" in capsys.readouterr().out


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_killed_command_resumes(tmp_path, workers):
    out = tmp_path / "out"
    arguments = ["data", "pack", "synthetic:500:jpeg", str(out), "--samples-per-shard", "5", "--workers", workers]
    process = subprocess.Popen([sys.executable, "-m", "leanclip", *arguments], start_new_session=True)
    try:
        wait_until(lambda: len(list(out.glob("*.tar"))) >= 3, 120)
    finally:
        process.kill()  # only the parent: its workers must notice
        process.wait()
    written = len(list(out.glob("*.tar")))
    assert written < 100
    if workers == "2":
        wait_until(lambda: not processes_where(2, process.pid), 120)  # its process group
    summary = pack(Synthetic(500, jpeg=True), out, PackConfig(samples_per_shard=5), workers=1)
    assert 0 < summary.finished_before <= written and summary.samples == 500
    whole = pack(Synthetic(500, jpeg=True), tmp_path / "whole", PackConfig(samples_per_shard=5))
    assert whole.samples == 500
    assert contents(out) == contents(tmp_path / "whole")


def test_other_data_or_settings_are_refused(tmp_path):
    table, out = make_csv(tmp_path / "data", 8), tmp_path / "out"
    config = PackConfig(samples_per_shard=4)
    pack(Table(table), out, config)
    (tmp_path / "mine.tar").write_bytes(b"x")
    for code, source, target, settings in (
        ("pack.other_settings", Table(table), out, PackConfig(samples_per_shard=5)),
        ("pack.other_settings", Table(table), out, PackConfig(samples_per_shard=4, resize=16)),
        ("pack.other_settings", Table(table), out, PackConfig(samples_per_shard=4, quality=80)),
        ("pack.other_source", Table(table, caption_key="filepath"), out, config),
        ("pack.foreign_folder", Table(table), tmp_path, config),
    ):
        with refuses(code, str(target)):
            pack(source, target, settings)
    journal = out / "pack.jsonl"
    written = journal.read_text()
    assert '"resize": null' in written
    journal.write_text(written.replace('"resize": null', '"max_size": 16'))  # as 0.1.0 wrote it
    with refuses("pack.other_settings", "--resize 16"):
        pack(Table(table), out, config)
    journal.write_text(written)
    with table.open("a") as file:
        file.write("images/000.jpg,one more\n")
    with refuses("pack.other_source"):
        pack(Table(table), out, config)
    (out / "pack.jsonl").write_text("[1]\n")
    with refuses("pack.journal_damaged", "pack.jsonl"):
        pack(Table(table), out, config)


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe", b"[" * 100_000, b"[1, 2]", b'{"shard": "0", "samples": 4, "bytes": 1}',
        b'{"shard": 0.5, "samples": 4, "bytes": 1}', b'{"shard": null, "samples": 4, "bytes": 1}',
        b'{"shard": %s, "samples": 4, "bytes": 1}' % (b"9" * 18), b'{"shard": -1, "samples": 4, "bytes": 1}',
        b'{"shard": 0, "samples": -9, "bytes": BYTES}', b'{"shard": 0, "samples": "x", "bytes": BYTES}',
        b'{"shard": 0, "samples": 4, "bytes": BYTES, "skipped": 5}',
        b'{"shard": 0, "samples": 4, "bytes": BYTES, "skipped": {"huge": 1}, "examples": [1]}',
    ],
    ids=lambda line: line[:60].decode(errors="replace"),
)  # fmt: skip
def test_damaged_lines_of_the_journal_are_not_used(line, tmp_path):
    table, out, config = make_csv(tmp_path / "data", 8), tmp_path / "out", PackConfig(samples_per_shard=4)
    expected = pack(Table(table), out, config)
    content, size = (out / "pack.jsonl").read_bytes(), (out / "00000.tar").stat().st_size
    head, _, second = content.splitlines()
    damaged = line.replace(b"BYTES", str(size).encode())
    (out / "pack.jsonl").write_bytes(b"\n".join([head, damaged, second, b""]))
    again = pack(Table(table), out, config)
    assert (again.samples, again.finished_before, again.bytes) == (expected.samples, 1, expected.bytes)
    (out / "pack.jsonl").write_bytes(damaged + b"\n" + content)
    with refuses("pack.other_source" if line.startswith(b"{") else "pack.journal_damaged", str(out)):
        pack(Table(table), out, config)


def test_a_second_process_is_refused(tmp_path):
    class Slow(Synthetic):
        def captions(self, index):
            if index == 0:
                with refuses("pack.locked"):
                    pack(Synthetic(3), tmp_path, PackConfig())
            return super().captions(index)

    assert pack(Slow(3), tmp_path, PackConfig()).samples == 3


def hostile_table(folder: Path) -> Path:
    """Six good rows, and broken rows of every kind."""
    pairs = write_images(folder, 6)
    whole = (folder / pairs[0][0]).read_bytes()
    (folder / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "empty.jpg").touch()
    (folder / "text.jpg").write_text("no image")
    (folder / "directory.jpg").mkdir()
    bad = ["cut.jpg", "empty.jpg", "text.jpg", "directory.jpg", "gone.jpg", "", "../../gone.jpg"]
    table = write_table(folder / "pairs.csv", [*pairs, *((name, "a kite") for name in bad), ("blank.jpg", " ")])
    with table.open("ab") as file:
        file.write(b"latin.jpg,caf\xe9\n000.jpg,one,too many\n")
    return table


def test_broken_samples_are_left_out_counted_and_named(tmp_path, capsys):
    table, out = hostile_table(tmp_path / "data"), tmp_path / "out"
    assert command(table, out, "--workers", "1") == 1
    assert "62.5% of the samples are broken, more than --max-broken 1.0%" in capsys.readouterr().err
    assert command(table, out, "--workers", "1", "--max-broken", "0.7") == 0
    shown = " ".join(capsys.readouterr().out.split())
    for kind, count in {"image": 2, "no image": 4, "empty": 2, "encoding": 1, "row": 1}.items():
        assert f"left out: {kind} {count}, such as" in shown
    packed = Shards(str(out))
    assert [(packed.image_bytes(i), packed.captions(i)[0]) for i in range(len(packed))] == bundled(6)


def test_large_images_are_scaled_down_and_other_formats_converted(tmp_path):
    images = {
        "a.jpg": (picture(0, (400, 300), quality=95), ("JPEG", (67, 50), "RGB")),
        "b.png": (picture(0, (64, 200), "PNG", "RGBA"), ("PNG", (50, 156), "RGBA")),
        "c.webp": (picture(0, (120, 120), "WEBP"), ("WEBP", (50, 50), "RGB")),
        "d.gif": (picture(0, (90, 60), "GIF", "P"), ("PNG", (75, 50), "RGB")),
        "e.bmp": (picture(0, (30, 20), "BMP"), ("PNG", (30, 20), "RGB")),
        "f.jpg": (picture(0, (300, 200), mode="CMYK"), ("JPEG", (75, 50), "RGB")),
        "g.jpg": (picture(0, (40, 50)), ("JPEG", (40, 50), "RGB")),
    }
    (tmp_path / "data").mkdir()
    for name, (content, _) in images.items():
        (tmp_path / "data" / name).write_bytes(content)
        (tmp_path / "data" / name).with_suffix(".txt").write_text(name)
    summary = pack(Folder(tmp_path / "data"), tmp_path / "out", PackConfig(resize=50))
    assert summary.samples == len(images) and not summary.skipped
    packed = Shards(str(tmp_path / "out"))
    for index, (_, expected) in enumerate(images.values()):
        with Image.open(io.BytesIO(packed.image_bytes(index))) as image:
            assert (image.format, image.size, image.mode) == expected
    assert packed.image_bytes(6) == images["g.jpg"][0]
    small, large = (Image.open(io.BytesIO(content)) for content in (packed.image_bytes(0), images["a.jpg"][0]))
    resized = large.resize((67, 50), Image.Resampling.BICUBIC)
    assert np.abs(np.asarray(small, float) - np.asarray(resized, float)).mean() < 2
    pack(Folder(tmp_path / "data"), tmp_path / "coarse", PackConfig(resize=50, quality=30))
    coarse = Shards(str(tmp_path / "coarse"))
    smaller = [len(coarse.image_bytes(index)) < len(packed.image_bytes(index)) for index in range(len(images))]
    assert smaller == [True, False, True, False, False, True, False]  # the JPEGs and the WebP that were encoded again


def test_a_folder_packed_before_there_was_a_quality_resumes(tmp_path):
    table, out = make_csv(tmp_path / "data", 4), tmp_path / "out"
    pack(Table(table), out, PackConfig())
    lines = (out / "pack.jsonl").read_text().splitlines(keepends=True)
    head = json.loads(lines[0])
    del head["resize"], head["quality"]
    (out / "pack.jsonl").write_text(json.dumps(head) + "\n" + "".join(lines[1:]))
    assert pack(Table(table), out, PackConfig()).finished_before == 1


def test_an_image_bomb_is_a_broken_sample(tmp_path, monkeypatch):
    monkeypatch.setattr("leanclip.data.decode.MAX_PIXELS", 1000)
    pairs = write_images(tmp_path / "data", 2)
    (tmp_path / "data" / "small.png").write_bytes(picture(0, (20, 20), "PNG"))
    table = write_table(tmp_path / "data" / "pairs.csv", [*pairs, ("small.png", "a kite")])
    summary = pack(Table(table), tmp_path / "out", PackConfig())
    assert summary.samples == 1 and summary.skipped == {"huge": 2}


def test_lists_may_not_name_files_outside_their_folder(tmp_path):
    write_images(tmp_path, 3)
    (tmp_path / "data").mkdir()
    rows = [("../000.jpg", "out"), (str(tmp_path / "001.jpg"), "absolute"), ("x/../../002.jpg", "around")]
    write_table(tmp_path / "data" / "captions.csv", rows, header=("file_name", "caption"))
    coco = make_coco(tmp_path / "coco", 2)
    content = json.loads(coco.read_text())
    content["images"][1]["file_name"] = "../../000.jpg"
    coco.write_text(json.dumps(content))
    folder = Folder(tmp_path / "data")
    assert len(folder) == 3
    for source, index in ((folder, 0), (folder, 1), (folder, 2), (Coco(coco), 1)):
        with broken("escaping path"):
            source.image_bytes(index)


@contextlib.contextmanager
def broken(kind):
    with pytest.raises(BrokenSample) as raised:
        yield
    assert raised.value.kind == kind


def test_a_folder_counts_incomplete_samples(tmp_path):
    data = make_folder(tmp_path, 6)
    (data / "001.txt").unlink()
    (data / "003.txt").write_bytes(b"caf\xe9")
    (data / "metadata.jsonl").write_text('{"file_name": "gone.jpg", "caption": "a kite"}\n')
    summary = pack(Folder(data), tmp_path / "out", PackConfig())
    assert summary.samples == 4 and summary.skipped == {"no caption": 1, "encoding": 1, "no image": 1}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metadata.jsonl", '{"file_name": "a.jpg"}'),
        ("metadata.jsonl", "not json"),
        ("captions.csv", "a.jpg,a kite\n"),
        ("captions.txt", "a.jpg a kite\n"),
        ("captions.csv", "file_name,caption\na.jpg\n"),
    ],
)
def test_invalid_lists_are_refused(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with refuses("pack.bad_list", name):
        Folder(tmp_path)


def test_numbered_captions_of_flickr_are_read(tmp_path):
    pairs = write_images(tmp_path, 2)
    lines = [f"{name}#{number}\t{caption} {number}" for name, caption in pairs for number in range(2)]
    (tmp_path / "captions.txt").write_text("\n".join(lines), encoding="utf-8")
    folder = Folder(tmp_path)
    assert folder.captions(1) == [f"{pairs[1][1]} 0", f"{pairs[1][1]} 1"]


def test_coco_with_duplicate_ids_and_unused_captions(tmp_path):
    path = make_coco(tmp_path / "coco", 4)
    content = json.loads(path.read_text())
    content["images"][3]["id"] = 0
    content["annotations"] = [entry for entry in content["annotations"] if entry["image_id"] != 1]
    path.write_text(json.dumps(content))
    source = Coco(path)
    assert source.notes == ("2 captions belong to images that the file does not list",)
    summary = pack(source, tmp_path / "out", PackConfig())
    assert summary.samples == 2 and summary.skipped == {"no caption": 1, "duplicate key": 1}
    path.write_text("[]")
    with refuses("pack.not_coco"):
        Coco(path)


def test_coco_images_are_searched_and_can_be_named(tmp_path):
    path = make_coco(tmp_path / "coco", 2)
    (tmp_path / "coco" / "val2017").rename(tmp_path / "elsewhere")
    with refuses("pack.no_images", "--images"):
        Coco(path)
    assert command(path, tmp_path / "out", "--images", tmp_path / "elsewhere", "--workers", "1") == 0


def test_parquet_is_read_in_any_order(tmp_path):
    source = Parquet(make_parquet_bytes(tmp_path, 12))
    expected = bundled(12)
    for index in (3, 3, 4, 11, 0, 5, 6, 2):
        assert (source.image_bytes(index), source.captions(index)[0]) == expected[index]
    assert source.name(7) == f"row 2 of {tmp_path / '1.parquet'}"


def test_invalid_parquet_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    rows = {"picture": [b"x", None], "caption": pyarrow.array([b"caf\xe9", None]), "n": [1, 2]}
    parquet.write_table(pyarrow.table(rows), path)
    with refuses("data.missing_column", "picture, caption, n", "--image-key"):
        Parquet(path)
    with refuses("data.missing_column", "no column missing"):
        Parquet(path, image_key="picture", caption_key="missing")
    source = Parquet(path, image_key="picture")
    for read, index, kind in (
        (source.captions, 0, "encoding"),
        (source.captions, 1, "no caption"),
        (source.image_bytes, 1, "no image"),
    ):
        with broken(kind):
            read(index)
    path.write_bytes(b"PAR1 not really")
    with refuses("pack.not_parquet"):
        Parquet(path)
    with refuses("data.not_found"):
        Parquet(tmp_path / "*.pq")


def test_a_damaged_row_group_is_left_out_and_counted(tmp_path):
    make_parquet_bytes(tmp_path / "data", 12)
    path = tmp_path / "data" / "0.parquet"
    content = bytearray(path.read_bytes())
    content[8:40] = bytes(32)  # the first page's header
    path.write_bytes(content)
    summary = pack(Parquet(tmp_path / "data"), tmp_path / "out", PackConfig())
    assert summary.samples + sum(summary.skipped.values()) == 12
    assert summary.skipped.get("row", 0) == 5  # its row group


def test_without_pyarrow_the_error_names_the_command_that_installs_it(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with refuses("pack.no_pyarrow", "pip install 'leanclip[parquet]'"):
        Parquet(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("arguments", "code", "value"),
    [
        ("gone out", "data.not_found", "gone"),
        ("gone.json out", "data.not_found", "gone.json"),
        ("folder/notes.md out", "data.unsupported_format", "--format"),
        ("folder out", "pack.no_images", "folder"),
        ("folder out --image-key x", "pack.flag_of_other_format", "--image-key"),
        ("synthetic:5 out --samples-per-shard 0", "pack.bad_value", "--samples-per-shard is 0"),
        ("synthetic:5 out --resize 256 --quality 101", "pack.bad_value", "--quality is 101"),
        ("synthetic:5 folder/notes.md/out", "pack.cannot_write", "notes.md/out"),
        ("synthetic:5 out --workers -1", "data.bad_value", "--workers is -1"),
        ("pairs.csv out", "data.missing_column", "--image-key, --caption-key, --separator"),
    ],
)
def test_user_errors_are_one_line(tmp_path, monkeypatch, capsys, arguments, code, value):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.md").touch()
    (tmp_path / "pairs.csv").write_text("a,b\n1,2\n")
    assert_refused(code, ["data", "pack", *arguments.split()], capsys, value)


def test_tasks_are_done_by_processes():
    assert sorted(run_tasks(square, range(40), workers=2, progress=lambda _: None)) == [i * i for i in range(40)]


def test_a_worker_that_dies_ends_the_command(capfd):
    with refuses("data.worker_died", "--workers"):
        list(run_tasks(die, [1, 2], workers=2, progress=lambda _: None))
    assert "Traceback" not in capfd.readouterr().err


def test_a_worker_that_dies_while_another_is_started_ends_the_command(monkeypatch):
    submit = ProcessPoolExecutor.submit

    def breaks_meanwhile(pool, function, task):
        if task == 2:
            raise OSError("handle is closed")  # the error of a pool that closes its queue in another thread
        return submit(pool, function, task)

    monkeypatch.setattr(ProcessPoolExecutor, "submit", breaks_meanwhile)
    with refuses("data.worker_died", "--workers"):
        list(run_tasks(square, [1, 2], workers=2, progress=lambda _: None))
