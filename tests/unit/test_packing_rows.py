"""Packing: rows of one image are one sample, and its metadata stay with it."""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pytest
from data_forms import bundled
from pyarrow import parquet

from leanclip.data import DataConfig, open_source
from leanclip.data.csv_table import Table
from leanclip.data.source import weight_of
from leanclip.packing.coco import Coco
from leanclip.packing.folder import Folder
from leanclip.packing.pack import PackConfig, pack
from leanclip.packing.parquet import Parquet
from refusal import refuses


def rows_of_two_images(folder: Path) -> dict[str, list[Any]]:
    """Five rows of two images, not adjacent, with metadata."""
    pairs = bundled(2)
    folder.mkdir(parents=True, exist_ok=True)
    for number, (image, _) in enumerate(pairs):
        (folder / f"{number}.png").write_bytes(image)
    order = [0, 1, 0, 1, 0]
    return {
        "filepath": [f"./{number}.png" if row == 4 else f"{number}.png" for row, number in enumerate(order)],
        "bytes": [pairs[number][0] for number in order],
        "title": [f"caption {row} of image {number}" for row, number in enumerate(order)],
        "quality": [0.5, 0.25, 1.0, 1.0, 1.0],
        "page": ["a", "b", "c" * 2000, "", "e"],
    }


@pytest.mark.parametrize("kind", ["paths", "bytes", "hugging face", "csv"])
def test_rows_of_one_image_are_one_sample_with_all_captions_and_fields(tmp_path, kind):
    rows = rows_of_two_images(tmp_path / "in")
    images = {"paths": rows["filepath"], "bytes": rows["bytes"]}
    images |= {
        "hugging face": [{"bytes": content, "path": None} for content in rows["bytes"]],
        "csv": rows["filepath"],
    }
    table = {"image": images[kind], "title": rows["title"], "quality": rows["quality"], "page": rows["page"]}
    if kind == "csv":
        path = tmp_path / "in" / "rows.csv"
        lines = [",".join(table), *(",".join(map(str, row)) for row in zip(*table.values(), strict=True))]
        path.write_text("\n".join(lines))
        source = Table(path, image_key="image")
    else:
        path = tmp_path / "in" / "rows.parquet"
        parquet.write_table(pyarrow.table(table), path, row_group_size=2)
        source = Parquet(path)
    assert "5 rows are 2 images" in source.notes[0]
    summary = pack(source, tmp_path / "out", PackConfig())
    assert (summary.samples, summary.skipped) == (2, {})
    packed = open_source(str(tmp_path / "out"), DataConfig())
    assert packed.captions(0) == [rows["title"][row] for row in (0, 2, 4)]
    assert packed.captions(1) == [rows["title"][row] for row in (1, 3)]
    assert [weight_of(packed, index, "quality") for index in range(2)] == [0.5, 0.25]
    assert [packed.field(index, "page") for index in range(2)] == ["a", "b"]


def test_equal_paths_in_two_folders_are_two_images(tmp_path):
    for name, (image, caption) in zip("ab", bundled(2), strict=True):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.png").write_bytes(image)
        parquet.write_table(pyarrow.table({"image": ["0.png"], "text": [caption]}), tmp_path / name / "x.parquet")
    assert len(Parquet(f"{tmp_path}/*/x.parquet")) == 2


def test_packed_data_keep_the_fields_of_lists_within_bounds(tmp_path):
    (image, _), *_ = bundled(1)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "0.png").write_bytes(image)
    row: dict[str, Any] = {"file_name": "0.png", "text": "a cat", "weight": 0.5, "ok": True, "nested": {"a": 1}}
    row |= {"null": None, "long": "x" * 2000, "captions": None}
    row |= {f"f{number}": number for number in range(100)}
    (tmp_path / "in" / "metadata.jsonl").write_text(json.dumps(row))
    pack(Folder(tmp_path / "in"), tmp_path / "out", PackConfig())
    packed = open_source(str(tmp_path / "out"), DataConfig())
    assert packed.captions(0) == ["a cat"]
    assert (packed.field(0, "weight"), packed.field(0, "ok"), packed.field(0, "f5")) == (0.5, True, 5)
    assert all(packed.field(0, name) is None for name in ("nested", "null", "long", "f99", "text"))


def test_coco_keeps_what_it_says_of_images(tmp_path):
    (image, _), *_ = bundled(1)
    (tmp_path / "0.png").write_bytes(image)
    content = {"images": [{"id": 7, "file_name": "0.png", "license": 3}]}
    content |= {"annotations": [{"image_id": 7, "caption": "a cat"}]}
    (tmp_path / "captions.json").write_text(json.dumps(content))
    pack(Coco(tmp_path / "captions.json"), tmp_path / "out", PackConfig())
    assert open_source(str(tmp_path / "out"), DataConfig()).field(0, "license") == 3


def test_a_footer_that_states_too_many_rows_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"image": [b"x"], "caption": ["y"]}), path)
    metadata = SimpleNamespace(row_group=lambda _: SimpleNamespace(num_rows=10**12))
    stated = SimpleNamespace(metadata=metadata, num_row_groups=1, schema_arrow=parquet.read_schema(path))
    monkeypatch.setattr("leanclip.packing.parquet._open", lambda _: contextlib.nullcontext(stated))
    with refuses("pack.not_parquet", "1,000,000,000,000 rows"):
        Parquet(path)
