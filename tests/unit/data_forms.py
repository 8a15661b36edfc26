"""The bundled images in every form that leanclip reads or packs."""

import csv
import json
from pathlib import Path

import pyarrow
from pyarrow import parquet

from leanclip.data import Shards
from leanclip.data.datasets import BUNDLED


def bundled(count: int) -> list[tuple[bytes, str]]:
    """Images and captions."""
    shards = Shards(str(BUNDLED / "val-*.tar"))
    return [(shards.image_bytes(index), shards.captions(index)[0]) for index in range(count)]


def write_images(folder: Path, count: int) -> list[tuple[str, str]]:
    """Image files, and their names with captions."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs = []
    for number, (image, caption) in enumerate(bundled(count)):
        (folder / f"{number:03d}.jpg").write_bytes(image)
        pairs.append((f"{number:03d}.jpg", caption))
    return pairs


def write_table(path: Path, rows: list[tuple[str, str]], header=("filepath", "title"), separator=",") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=separator).writerows([header, *rows])
    return path


def make_csv(folder: Path, count: int) -> Path:
    pairs = write_images(folder / "images", count)
    return write_table(folder / "pairs.csv", [(f"images/{name}", caption) for name, caption in pairs])


def make_tsv(folder: Path, count: int) -> Path:
    rows = [(str(folder / name), caption) for name, caption in write_images(folder, count)]
    return write_table(folder / "pairs.tsv", rows, separator="\t")


def make_parquet_bytes(folder: Path, count: int) -> Path:
    images, captions = zip(*bundled(count), strict=True)
    folder.mkdir(parents=True, exist_ok=True)
    half = count // 2
    for number, part in enumerate((slice(0, half), slice(half, count))):
        rows = pyarrow.table({"jpg": images[part], "caption": captions[part]})
        parquet.write_table(rows, folder / f"{number}.parquet", row_group_size=5)
    return folder


def make_parquet_hugging_face(folder: Path, count: int) -> Path:
    """The layout of a `datasets` image feature; some images in the file, some beside it."""
    names = write_images(folder, count)
    rows = []
    for number, ((image, caption), (name, _)) in enumerate(zip(bundled(count), names, strict=True)):
        held = {"bytes": image, "path": None} if number % 2 else {"bytes": None, "path": name}
        rows.append({"image": held, "text": [caption, f"{caption} again"]})
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train.parquet")
    return folder / "train.parquet"


def make_parquet_paths(folder: Path, count: int) -> Path:
    names, captions = zip(*write_images(folder / "images", count), strict=True)
    rows = pyarrow.table({"filepath": [f"images/{name}" for name in names], "title": captions})
    parquet.write_table(rows, folder / "pairs.parquet")
    return folder / "pairs.parquet"


def make_folder(folder: Path, count: int) -> Path:
    for number, (name, caption) in enumerate(write_images(folder / "deep" / "er", count)):
        path = folder / "deep" / "er" / name
        path.with_suffix(".txt").write_text(caption, encoding="utf-8")
        if number % 2:
            for file in (path, path.with_suffix(".txt")):
                file.rename(folder / file.name)
    return folder


def make_listed_folder(folder: Path, count: int) -> Path:
    pairs = write_images(folder / "images", count)
    lines = [json.dumps({"file_name": f"images/{name}", "text": caption}) for name, caption in pairs]
    (folder / "metadata.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


def make_flickr_folder(folder: Path, count: int) -> Path:
    """One row for each of several captions."""
    pairs = write_images(folder / "images", count)
    rows = [(name, f"{caption}, {number}") for name, caption in pairs for number in range(3)]
    write_table(folder / "images" / "captions.txt", rows, header=("image", "caption"))
    return folder


def make_coco(folder: Path, count: int) -> Path:
    pairs = write_images(folder / "val2017", count)
    path = folder / "annotations" / "captions_val2017.json"
    path.parent.mkdir()
    annotations = [
        {"id": 2 * number + again, "image_id": number, "caption": f"{caption}, {again}"}
        for again in (0, 1)
        for number, (_, caption) in enumerate(pairs)
    ]
    images = [{"id": number, "file_name": name} for number, (name, _) in enumerate(pairs)]
    path.write_text(json.dumps({"images": images, "annotations": annotations, "info": {}}), encoding="utf-8")
    return path


PACKABLE = {
    "csv": make_csv,
    "tsv": make_tsv,
    "parquet bytes": make_parquet_bytes,
    "parquet of Hugging Face": make_parquet_hugging_face,
    "parquet paths": make_parquet_paths,
    "folder": make_folder,
    "folder with metadata.jsonl": make_listed_folder,
    "folder with captions.txt": make_flickr_folder,
    "coco": make_coco,
}
