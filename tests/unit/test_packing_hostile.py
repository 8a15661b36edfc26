"""Packing and checking of files that lie, never end or hold other types; full and read-only disks."""

import errno
import json
import os
import resource
import tarfile
from contextlib import contextmanager
from pathlib import Path

import pyarrow
import pytest
from data_forms import make_csv, write_images, write_table
from pyarrow import parquet
from shard_files import picture, shard_bytes, sound, write_shard

from leanclip.data import Shards
from leanclip.data.csv_table import Table
from leanclip.packing.coco import Coco
from leanclip.packing.folder import Folder
from leanclip.packing.pack import PackConfig, pack
from leanclip.packing.parquet import Parquet
from refusal import assert_refused, exit_code, refusal, refusal_code, refuses

pytestmark = pytest.mark.timeout(20)  # nothing here may wait for a pipe or read a device to its end


def skipped(source, out):
    """The number of samples that were packed, and the others by kind."""
    summary = pack(source, out, PackConfig())
    assert not list(out.glob(".*.tmp"))
    assert b"None" not in b"".join(path.read_bytes() for path in out.glob("*.tar"))
    return summary.samples, summary.skipped


def test_null_captions_are_left_out(tmp_path):
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(picture(number, kind="PNG"))
    rows = [{"caption": None}, {"captions": [None, "a kite"]}, {"caption": None, "text": "a boat"}, {"text": [5]}]
    lines = [json.dumps({"file_name": f"{number}.png"} | row) for number, row in enumerate(rows)]
    (tmp_path / "metadata.jsonl").write_text("\n".join(lines))
    assert skipped(Folder(tmp_path), tmp_path / "out") == (2, {"no caption": 1, "caption": 1})
    packed = Shards(str(tmp_path / "out"))
    assert [packed.captions(0), packed.captions(1)] == [["a kite"], ["a boat"]]


@pytest.mark.parametrize("captions", [[None, "a"], [["a", None], [None]], [[], ["a"]]])
def test_null_captions_in_parquet_are_left_out(tmp_path, captions):
    table = pyarrow.table({"image": [picture(0), picture(1)], "caption": captions})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert skipped(Parquet(tmp_path / "a.parquet"), tmp_path / "out") == (1, {"no caption": 1})


def coco(folder: Path, images, annotations) -> Path:
    path = folder / "captions.json"
    path.write_text(json.dumps({"images": images, "annotations": annotations}))
    return path


def test_coco_with_nulls_and_other_types(tmp_path):
    names = ["a.png", None, 7, "n" * 300 + ".png", "b.png", "c.png"]
    for name in ("a.png", "b.png", "c.png"):
        (tmp_path / name).write_bytes(picture(0, kind="PNG"))
    images = [{"id": number, "file_name": name} for number, name in enumerate(names)]
    texts = ["a", "b", "c", "d", None, ["e"]]
    annotations = [{"image_id": number, "caption": text} for number, text in enumerate(texts)]
    expected = {"no image": 3, "no caption": 1, "caption": 1}
    assert skipped(Coco(coco(tmp_path, images, annotations)), tmp_path / "out") == (1, expected)


@pytest.mark.parametrize("key", [[1], {"a": 1}])
def test_coco_ids_that_cannot_be_compared_are_refused(tmp_path, key):
    good = {"id": 1, "file_name": "a.png"}, {"image_id": 1, "caption": "a"}
    for images, annotations in (([good[0] | {"id": key}], [good[1]]), ([good[0]], [good[1] | {"image_id": key}])):
        with refuses("pack.not_coco"):
            Coco(coco(tmp_path, images, annotations))


def test_json_that_is_nested_too_deeply_is_refused(tmp_path):
    deep = "[" * 100_000 + "]" * 100_000
    (tmp_path / "a.json").write_text(deep)
    with refuses("file.bad_json", "a.json"):
        Coco(tmp_path / "a.json")
    (tmp_path / "metadata.jsonl").write_text(deep)
    with refuses("pack.bad_list", "metadata.jsonl"):
        Folder(tmp_path)


@pytest.mark.parametrize(
    "images",
    [[10**12, 3], [1e300, float("nan")], [[1, 2], []], [True, False], [{"bytes": 10**12}, {"bytes": None}]],
    ids=["integer", "float", "list", "boolean", "struct"],
)
def test_image_columns_of_other_types_are_broken_samples(tmp_path, images):
    parquet.write_table(pyarrow.table({"image": images, "caption": ["a", "b"]}), tmp_path / "a.parquet")
    samples, kinds = skipped(Parquet(tmp_path / "a.parquet"), tmp_path / "out")
    assert samples == 0 and kinds["image"] >= 1 and set(kinds) <= {"image", "no image"}


def test_strings_in_parquet_that_are_not_utf8(tmp_path):
    column = pyarrow.array([b"caf\xe9", b"a kite"]).cast(pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"image": [picture(0), picture(1)], "text": column}), tmp_path / "a.parquet")
    assert skipped(Parquet(tmp_path / "a.parquet"), tmp_path / "out") == (1, {"encoding": 1})


def make_endless(folder: Path, name: str) -> None:
    """A pipe without a writer, a link to a device, to nowhere and to itself."""
    os.mkfifo(folder / f"pipe{name}")
    (folder / f"device{name}").symlink_to("/dev/zero")
    (folder / f"dangling{name}").symlink_to(folder / "gone")
    (folder / f"loop{name}").symlink_to(folder / f"loop{name}")


def test_images_and_captions_that_never_end(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for name in ("pipe", "device", "dangling", "loop"):
        (data / f"{name}.txt").write_text("a caption")
        (data / f"{name}-caption.png").write_bytes(picture(0, kind="PNG"))
    make_endless(data, ".png")
    make_endless(data, "-caption.txt")
    samples, kinds = skipped(Folder(data), tmp_path / "out")
    assert samples == 0 and sum(kinds.values()) == 8 and set(kinds) <= {"no image", "no caption", "escaping path"}


@pytest.mark.parametrize("name", ["pipe", "device", "dangling", "loop"])
def test_lists_that_never_end_are_refused(tmp_path, name):
    (tmp_path / "data").mkdir()
    make_endless(tmp_path / "data", ".csv")
    (tmp_path / "data" / f"{name}.csv").rename(tmp_path / "data" / "captions.csv")
    with pytest.raises(Exception, match=r"captions\.csv") as raised:
        Folder(tmp_path / "data")
    assert getattr(raised.value, "code", None) in ("data.unreadable", "pack.link_outside")


def test_rows_that_name_pipes_devices_and_impossible_names(tmp_path):
    pairs = write_images(tmp_path, 2)
    make_endless(tmp_path, ".png")
    names = ["pipe.png", "device.png", "dangling.png", "loop.png", "/dev/zero", "n" * 300, "a\0b", "\ud800"]
    path = write_table(tmp_path / "pairs.csv", pairs)
    with path.open("ab") as file:
        file.write("".join(f"{name},a\n" for name in names).encode("utf-8", "surrogatepass"))
    samples, kinds = skipped(Table(path), tmp_path / "out")
    assert samples == 2 and kinds == {"no image": 7, "encoding": 1}


def test_files_that_claim_to_be_large_are_not_read(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.png").write_bytes(picture(0, kind="PNG"))
    (tmp_path / "data" / "b.txt").write_text("a kite")
    for name in ("a.txt", "b.png"):
        with (tmp_path / "data" / name).open("wb") as file:
            file.truncate(1 << 40)  # without taking space
    assert skipped(Folder(tmp_path / "data"), tmp_path / "out") == (0, {"no caption": 1, "no image": 1})
    with (tmp_path / "data" / "captions.csv").open("wb") as file:
        file.truncate(1 << 40)
    with refuses("data.unreadable", "captions.csv"):
        Folder(tmp_path / "data")


def test_a_member_that_claims_to_be_large_is_left_out(tmp_path):
    path = tmp_path / "a.tar"
    with path.open("wb") as file:
        for name, size in (("9.jpg", 512), ("9.txt", 1 << 31)):
            entry = tarfile.TarInfo(name)
            entry.size = size
            file.write(entry.tobuf())
            file.seek(size, os.SEEK_CUR)  # without taking space
        file.write(shard_bytes(sound(2)))
    shards = Shards(str(path))
    assert len(shards) == 2 and shards.broken == {"huge": 1}


def test_names_that_are_long_or_not_utf8(tmp_path, capsys):
    data = tmp_path / "data"
    data.mkdir()
    stems = [b"\xff\xe9", "k\u00e9".encode(), b"n" * 250, b"\x1b[31m\nred"]
    for stem in stems:
        Path(os.fsdecode(os.fsencode(data) + b"/" + stem + b".png")).write_bytes(picture(0, kind="PNG"))
        if stem[:1] != b"\xff":
            Path(os.fsdecode(os.fsencode(data) + b"/" + stem + b".txt")).write_text("a caption")
    assert exit_code("data", "pack", data, tmp_path / "out", "--max-broken", "1") == 0
    shown = capsys.readouterr().out
    assert "left out: no caption" in shown and "\x1b" not in shown and len(Shards(str(tmp_path / "out"))) == 3


def test_names_in_shards_that_are_long_or_not_utf8(tmp_path, capsys):
    samples = {"n" * 300 + "/a": b"a", "\udcff\udce9": b"b", "x\x1b[31m": b"no caption"}
    files = {f"{name}.png": picture(0, kind="PNG")[:-40] for name in samples}
    files |= {f"{name}.txt": caption for name, caption in samples.items() if caption != b"no caption"}
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        options = {"format": form, "encoding": "utf-8", "errors": "surrogateescape"}
        (tmp_path / "a.tar").write_bytes(shard_bytes(files, **options))
        assert exit_code("data", "check", tmp_path / "a.tar", "--threshold", "1") == 0
        shown = capsys.readouterr().out
        assert "broken: image" in shown and "left out: no caption" in shown and "\x1b" not in shown


@pytest.mark.parametrize("ending", ["", ".tar", ".csv", ".json", ".parquet", "/"])
def test_a_name_of_300_bytes_is_refused_in_one_line(tmp_path, capsys, ending):
    for arguments in (("pack", "n" * 300 + ending, tmp_path / "out"), ("check", "n" * 300 + ending)):
        code = refusal_code(refusal(["data", *arguments], capsys))
        assert code in ("data.not_found", "data.unreadable", "data.not_packed")


@contextmanager
def disk_of(size: int):
    """Files cannot grow beyond `size` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_packing_onto_a_full_disk_ends_in_one_line(tmp_path, capfd):
    table, out = make_csv(tmp_path / "data", 20), tmp_path / "out"
    arguments = ("data", "pack", table, out, "--workers", "1", "--samples-per-shard", "10")
    with disk_of(8192):
        assert_refused("pack.cannot_write", arguments, capfd)
    assert not list(out.glob("*.tar")) and not list(out.glob(".*.tmp"))
    assert exit_code(*arguments) == 0


def test_the_report_of_a_check_is_whole_or_absent(tmp_path, capfd):
    table, report = make_csv(tmp_path / "data", 3), tmp_path / "check.json"
    arguments = ("data", "check", table, "--json", report)
    with disk_of(300):
        assert_refused("data.cannot_write", arguments, capfd)
    assert not report.exists() and not list(tmp_path.glob(".*"))


def test_packing_onto_a_read_only_disk_ends_in_one_line(tmp_path, capfd, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    table = make_csv(tmp_path / "data", 3)
    monkeypatch.setattr("tempfile.mkstemp", refuse)
    assert_refused("pack.cannot_write", ["data", "pack", table, tmp_path / "out"], capfd, "Read-only")


def test_a_text_of_two_lines_is_one_caption(tmp_path):
    """As img2dataset writes the captions of web pages."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.png").write_bytes(picture(0, kind="PNG"))
    (tmp_path / "data" / "a.txt").write_text("a kite\nover the sea\n")
    pack(Folder(tmp_path / "data"), tmp_path / "out", PackConfig())
    assert (
        Folder(tmp_path / "data").captions(0) == Shards(str(tmp_path / "out")).captions(0) == ["a kite\nover the sea"]
    )


def test_lines_within_captions_are_counted(tmp_path, capsys):
    samples = {"1.png": picture(1), "1.txt": b"a kite\nover the sea", "2.png": picture(2), "2.txt": b"a boat\n"}
    path = write_shard(tmp_path / "a.tar", samples)
    assert exit_code("data", "check", path, "--json", tmp_path / "check.json") == 0
    assert json.loads((tmp_path / "check.json").read_text())["captions_of_several_lines"] == 1
    assert "one caption each; several captions belong into a .json" in capsys.readouterr().out


def test_a_pattern_may_contain_brackets_of_a_folder(tmp_path):
    folder = tmp_path / "set [1]"
    folder.mkdir()
    write_shard(folder / "a.tar", sound(3))
    assert len(Shards(str(folder))) == 3
