"""Small evaluation sets of the bundled emoji, in common layouts."""

import json
import tarfile
from typing import IO, cast

from shard_files import write_shard

from leanclip.data.datasets import BUNDLED

TEMPLATES = ["{c}", "a small picture of {c}, seen from the front"]


def emoji(count):
    """(key, jpeg bytes, caption, group) of the first held-out emoji."""
    rows = [json.loads(line) for line in (BUNDLED / "meta.jsonl").read_text().splitlines()]
    group_of = {row["key"]: row["group"] for row in rows if row["split"] == "val"}
    with tarfile.open(BUNDLED / "val-000000.tar") as archive:
        files = {name: cast(IO[bytes], archive.extractfile(name)).read() for name in archive.getnames()}
    keys = sorted({name.partition(".")[0] for name in files})[:count]
    return [(key, files[f"{key}.jpg"], files[f"{key}.txt"].decode(), group_of[key]) for key in keys]


def write_classes(folder, samples):
    """CLIP_benchmark's layout for classification, in two shards. Returns the class names."""
    groups = sorted({group for *_, group in samples})
    (folder / "test").mkdir(parents=True)
    (folder / "classnames.txt").write_text("".join(f"{group}\n" for group in groups))
    (folder / "zeroshot_classification_templates.txt").write_text("\n".join(TEMPLATES))
    (folder / "test" / "nshards.txt").write_text("2")
    half = len(samples) // 2
    for number, part in enumerate((samples[:half], samples[half:])):
        files = {}
        for key, image, _, group in part:
            files |= {f"{key}.jpg": image, f"{key}.cls": str(groups.index(group)).encode()}
        write_shard(folder / "test" / f"{number}.tar", files)
    return groups


def write_captions(folder, samples):
    """CLIP_benchmark's layout for retrieval: two captions an image, one per line."""
    (folder / "test").mkdir(parents=True)
    (folder / "dataset_type.txt").write_text("retrieval\n")
    (folder / "test" / "nshards.txt").write_text("1")
    files = {}
    for key, image, caption, group in samples:
        files |= {f"{key}.jpg": image, f"{key}.txt": f"{caption}\n{key[-3:]} of {group}, {caption[:6]}".encode()}
    write_shard(folder / "test" / "0.tar", files)
