"""--val-split never holds out an image that is trained on; rows of one image are one sample."""

import json
import os
import random

import fsspec
import numpy as np
import pyarrow
import pytest
from data_forms import write_table
from pyarrow import parquet
from shard_files import picture, shard_bytes, sound, write_shard

from leanclip.data import DataConfig, Shards, open_validation, split
from leanclip.data import datasets as data_sets
from leanclip.data.csv_table import Table
from leanclip.data.datasets import Subset
from leanclip.data.order import SplitVisits
from leanclip.packing.coco import Coco
from leanclip.packing.pack import PackConfig, pack
from leanclip.packing.parquet import Parquet
from refusal import exit_code, refuses

IMAGES = [picture(number, size=(4, 4), kind="PNG") for number in range(12)]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("LEANCLIP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_set(folder, form, draw):
    """A data set of 6 to 12 images, each as one to four samples: equal files under several names, repeated rows."""
    samples = [image for image in IMAGES[: draw.randint(6, 12)] for _ in range(draw.choice((1, 1, 2, 4)))]
    draw.shuffle(samples)
    rows = []
    for number, image in enumerate(samples):
        (folder / f"{number}.png").write_bytes(image)
        rows += [(f"{number}.png", f"caption {number}.{again}") for again in range(draw.choice((1, 1, 5)))]
    draw.shuffle(rows)
    if form in ("csv", "tsv"):
        return write_table(folder / f"pairs.{form}", rows, separator="," if form == "csv" else "\t")
    if form == "tar":
        files = [
            (f"{i}.{end}", content)
            for i, image in enumerate(samples)
            for end, content in (("png", image), ("txt", b"x"))
        ]
        return write_shard(folder / "a.tar", files)
    if form == "coco":
        images = [{"id": number, "file_name": f"{number}.png"} for number in range(len(samples))]
        annotations = [{"image_id": int(name[:-4]), "caption": caption} for name, caption in rows]
        (folder / "captions.json").write_text(json.dumps({"images": images, "annotations": annotations}))
        source = Coco(folder / "captions.json")
    else:
        table = {"image": [samples[int(name[:-4])] for name, _ in rows], "caption": [caption for _, caption in rows]}
        parquet.write_table(pyarrow.table(table), folder / "a.parquet")
        source = Parquet(folder / "a.parquet")
    pack(source, folder / "shards", PackConfig())
    return folder / "shards"


def open_datasets(config, **options):
    """The data sets, and the held-out one apart."""
    data = data_sets.open_datasets(config, **options)
    assert isinstance(data.val, Subset)
    return data, data.val


def sides(data):
    """The ids and the image bytes of either side."""
    ids, _ = data.train.visits.at(np.arange(len(data.train)), seed=0, epoch=0)
    return ids, [{data.train.source.image_bytes(i) for i in side.tolist()} for side in (ids, data.val.ids)]


def test_no_image_is_on_both_sides(tmp_path):
    """By bytes, over 200 random sets."""
    grouped = 0
    for number in range(200):
        draw = random.Random(number)
        folder = tmp_path / str(number)
        folder.mkdir()
        path = write_set(folder, ("csv", "tsv", "tar", "coco", "parquet")[number % 5], draw)
        config = DataConfig(train_data=str(path), val_split=0.3)
        data, val = open_datasets(config, seed=number)
        ids, (trained, held_out) = sides(data)
        assert trained and held_out and not trained & held_out
        assert sorted([*ids, *val.ids, *val.copies]) == list(range(len(data.train.source)))
        images = [data.train.source.image_bytes(index) for index in val.ids.tolist()]
        assert len(set(images)) == len(images)
        grouped += bool(data.messages)
        copies, evaluated = len(val.copies), len(val)
        said = f"{evaluated + copies} samples are held out; {evaluated} of them are evaluated, and the other {copies}"
        assert (said in " ".join(data.messages)) == (copies > 0)
        again, _ = open_validation(config, seed=number, manifest=data.train.source.manifest())
        assert again is not None and again.ids.tolist() == val.ids.tolist()
    assert grouped > 150


def test_runs_made_before_keep_their_rows_and_their_split(tmp_path):
    rows = [(f"{number % 4}.png", f"caption {number}") for number in range(20)]
    path = write_table(tmp_path / "pairs.csv", rows)
    now = Table(path)
    entry = now.manifest()[0] | {"count": 20}
    manifest = [{key: entry[key] for key in ("name", "size", "count", "base", "stamp")}]
    assert len(now) == 4 and len(Table(path, manifest=manifest)) == 20
    data, val = open_datasets(DataConfig(train_data=str(path), val_split=0.2), seed=3, manifest=manifest)
    expected = SplitVisits(20, 4, 3)
    assert val.ids.tolist() == expected.held_out_ids.tolist()
    assert [side.tolist() for side in data.train.visits.at(np.arange(16), seed=3, epoch=0)] == [
        side.tolist() for side in expected.at(np.arange(16), seed=3, epoch=0)
    ]
    assert data.train.source.captions(7) == ["caption 7"] and not data.messages
    kept = {"version": 1, "held_out": data.train.source.held_out}
    assert data.train.source.manifest() == [manifest[0] | kept]


def test_rows_of_one_image_are_one_sample(tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(IMAGES[number])
    rows = [(f"{number}.png", f"{again} of {number}") for again in range(4) for number in range(3)]
    rows += [("./0.png", "dot"), (str(tmp_path / "1.png"), "absolute"), ("none/../2.png", ""), ("", "a"), ("", "b")]
    table = Table(write_table(tmp_path / "pairs.csv", rows))
    assert len(table) == 5  # rows without a path stay apart
    assert table.captions(0) == ["0 of 0", "1 of 0", "2 of 0", "3 of 0", "dot"]
    assert table.captions(1)[-1] == "absolute" and len(table.captions(2)) == 4
    assert table.image_bytes(1) == IMAGES[1] and table.name(3).startswith("row 16 of ")
    assert "17 rows are 5 images" in table.notes[0]
    assert {table.caption(0, draw / 50)[0] for draw in range(50)} == set(table.captions(0))


def test_an_image_is_packed_once_and_is_no_duplicate(tmp_path, capsys):
    for number in range(6):
        (tmp_path / f"{number}.png").write_bytes(IMAGES[number])
    rows = [(f"{number}.png", f"{again} of {number}") for number in range(6) for again in range(5)]
    path = write_table(tmp_path / "pairs.csv", rows)
    assert exit_code("data", "pack", path, tmp_path / "shards", "--workers", 1) == 0
    assert "30 rows are 6 images" in capsys.readouterr().out
    packed = Shards(str(tmp_path / "shards"))
    assert [packed.captions(number) for number in range(6)] == [
        [f"{again} of {number}" for again in range(5)] for number in range(6)
    ]
    for data in (path, tmp_path / "shards"):
        assert exit_code("data", "check", data, "--workers", 1, "--json", tmp_path / "check.json") == 0
        report = json.loads((tmp_path / "check.json").read_text())
        assert report["duplicate_images"]["count"] == 0 and report["captions"] == 30
    repeated = [(f"{n}.{end}", content) for n in range(9) for end, content in (("png", IMAGES[n % 3]), ("txt", b"x"))]
    capsys.readouterr()
    assert exit_code("data", "check", write_shard(tmp_path / "a.tar", repeated), "--workers", 1) == 0
    assert "give each image once, with all its captions" in " ".join(capsys.readouterr().out.split())


def test_added_rows_extend_images_and_append_new_ones(tmp_path):
    path = write_table(tmp_path / "pairs.csv", [("0.png", "a"), ("1.png", "b"), ("0.png", "c")])
    manifest = Table(path).manifest()
    content = path.read_bytes()
    path.write_bytes(content + b"2.png,d\n1.png,e\n")
    table = Table(path, manifest=manifest)
    assert [table.captions(number) for number in range(3)] == [["a", "c"], ["b", "e"], ["d"]]
    for changed in (content.rstrip() + b" more\n", content[:-3], content.replace(b"b", b"x")):
        path.write_bytes(changed)
        with refuses("data.changed", "pairs.csv"):
            Table(path, manifest=manifest)


def test_whole_shards_of_remote_data_are_held_out():
    files = fsspec.filesystem("memory")
    for number in range(8):
        with files.open(f"/split/{number}.tar", "wb") as file:
            file.write(shard_bytes(sound(5, start=5 * number)))
    config = DataConfig(train_data="memory://split/*.tar", val_split=0.2)
    data, val = open_datasets(config, seed=1)
    assert len(val) == 10 and len(data.train) == 30
    ids, _ = sides(data)
    assert not set((ids // 5).tolist()) & set((val.ids // 5).tolist())
    assert "2 of 8 remote shards" in data.messages[0]
    with refuses("data.empty_split", "--val-data"):
        open_datasets(DataConfig(train_data="memory://split/0.tar", val_split=0.2), seed=1)


def test_images_are_compared_once(tmp_path, monkeypatch, cache):
    monkeypatch.setattr(split, "MIN_KEPT_IMAGES", 0)
    path = write_set(tmp_path, "tar", random.Random(0))
    config, compare, calls = DataConfig(train_data=str(path), val_split=0.3), split._compare, []
    monkeypatch.setattr(split, "_compare", lambda *arguments: (calls.append(1), compare(*arguments))[1])
    held_out = open_datasets(config, seed=0)[1].ids.tolist()
    kept = next(cache.glob("split-*[!k]"))
    content = kept.read_bytes()
    for damaged in (b"", b"damaged", content[:-1], content[:-16], bytes([content[0], *content[1:][::-1]])):
        kept.write_bytes(damaged)
        assert open_datasets(config, seed=0)[1].ids.tolist() == held_out
    assert len(calls) == 6 and kept.read_bytes() == content
    assert open_datasets(config, seed=0)[1].ids.tolist() == held_out and len(calls) == 6


def test_images_that_changed_since_the_run_began_are_noticed_where_they_change_the_split(tmp_path):
    for number in range(10):
        (tmp_path / f"{number}.png").write_bytes(IMAGES[number])
    path = write_table(tmp_path / "pairs.csv", [(f"{number}.png", "x") for number in range(10)])
    config = DataConfig(train_data=str(path), val_split=0.2)
    data, val = open_datasets(config, seed=0)
    manifest = data.train.source.manifest()
    assert open_datasets(config, seed=0, manifest=manifest)[1].ids.tolist() == val.ids.tolist()
    for number in range(10):
        (tmp_path / f"{number}.png").write_bytes(IMAGES[number % 3])
    with refuses("data.split_changed", "--val-split"):
        open_datasets(config, seed=0, manifest=manifest)


def test_other_contents_behind_equal_headers_are_noticed_on_resume(tmp_path):
    """The same size, headers and time stamp."""
    path = write_shard(tmp_path / "a.tar", sound(40))
    manifest, status = Shards(str(path)).manifest(), path.stat()
    assert Shards(str(path), manifest=manifest).manifest() == manifest
    content = path.read_bytes()
    path.write_bytes(content.replace(b"picture number 4", b"another number 4"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with refuses("data.changed", "a.tar"):
        Shards(str(path), manifest=manifest)
    before = [{key: value for key, value in manifest[0].items() if key not in ("sample", "version")}]
    assert len(Shards(str(path), manifest=before)) == 40  # of a run made before
