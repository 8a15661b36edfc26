import io
import json
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from leanclip.data import (
    DataConfig,
    Shards,
    TrainingLoader,
    open_datasets,
    open_validation,
    training_transform,
)
from leanclip.data.datasets import BUNDLED
from leanclip.data.files import expand
from leanclip.errors import UserError
from leanclip.models import ModelConfig, create_model


def write_shard(path, samples):
    """A tar of {name: bytes}."""
    with tarfile.open(path, "w") as archive:
        for name, content in samples.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path


def jpeg(colour):
    file = io.BytesIO()
    Image.new("RGB", (8, 8), colour).save(file, "JPEG")
    return file.getvalue()


def test_the_bundled_data_are_whole():
    data = open_datasets(DataConfig(), seed=0)
    assert len(data.train) == 1830
    assert data.val is not None and len(data.val) == 200
    assert data.note is not None and "unseen renders of known concepts" in data.note
    assert data.train.source.captions(0) == ["spider web"]


def test_licence_notices_are_bundled():
    notices = (BUNDLED / "LICENSES.md").read_text()
    for name in ("Fluent", "MIT License", "Noto", "Apache License", "Unicode"):
        assert name in notices


def test_captions_come_from_json_or_text(tmp_path):
    several = {"captions": ["one", "two"]}
    path = write_shard(
        tmp_path / "a.tar",
        {
            "a/1.jpg": jpeg("red"), "a/1.txt": b"one", "a/1.json": json.dumps(several).encode(),
            "a/2.jpg": jpeg("blue"), "a/2.txt": " ünï ".encode(),
            "a/2b.jpg": jpeg("blue"), "a/2b.json": b'{"captions": "just one"}',
            "a/3.jpg": jpeg("blue"),
            "a/4.txt": b"no image",
        },
    )  # fmt: skip
    shards = Shards(str(path))
    assert [shards.captions(i) for i in range(len(shards))] == [["one", "two"], ["ünï"], ["just one"]]
    assert shards.broken == {"no caption": 1, "no image": 1}


def test_patterns_expand_in_a_stable_order(tmp_path):
    for number in range(3):
        write_shard(tmp_path / f"s-{number:02d}.tar", {"1.jpg": jpeg("red"), "1.txt": b"x"})
    expected = [str(tmp_path / f"s-{number:02d}.tar") for number in range(3)]
    for pattern in ("s-{00..02}.tar", "s-*.tar", ""):
        assert expand(str(tmp_path / pattern)) == expected
    with pytest.raises(UserError, match=r"no such file or folder: .*s-03\.tar \(from .*s-\{00\.\.03\}\.tar\)$"):
        Shards(str(tmp_path / "s-{00..03}.tar"))


@pytest.fixture(scope="module")
def tiny():
    return create_model(ModelConfig(model="leanclip-tiny"))


def loader(tiny, workers):
    shards = Shards(str(BUNDLED / "val-*.tar"))
    return TrainingLoader(
        shards, batch=64, transform=training_transform(tiny.preprocess, scale=(0.4, 1.0)),
        tokenizer=tiny.tokenizer, seed=3, workers=workers, pin_memory=False,
    )  # fmt: skip


def test_batches_do_not_depend_on_workers_or_on_where_the_loader_starts(tiny):
    plain = [batch for epoch in (0, 1) for batch in loader(tiny, 0).epoch(epoch)]
    parallel = loader(tiny, 2)
    torch.manual_seed(99)  # the global random state must not matter
    with_workers = [batch for epoch in (0, 1) for batch in parallel.epoch(epoch)]
    assert len(plain) == len(with_workers) == 6
    for one, two in zip(plain, with_workers, strict=True):
        for name in ("images", "tokens", "sample_ids"):
            assert torch.equal(getattr(one, name), getattr(two, name))
    late = next(loader(tiny, 0).epoch(1, start=2))
    assert torch.equal(late.images, plain[5].images)
    assert not torch.equal(plain[0].images, plain[3].images)


def test_val_split_holds_out_without_overlap():
    data = open_datasets(DataConfig(val_split=0.1), seed=4)
    assert data.val is not None
    assert len(data.val) == 183 and len(data.train) == 1647
    kept, _ = data.train.visits.at(np.arange(1647), seed=4, epoch=0)
    assert len({*data.val.ids, *kept}) == 1830
    alone, note = open_validation(DataConfig(val_split=0.1), seed=4)
    assert alone is not None and (alone.ids == data.val.ids).all() and note == data.note is not None


@pytest.mark.parametrize(
    ("samples", "message"),
    [({}, "no samples"), ({"1.txt": b"x"}, "no samples"), ({"1.jpg": b"x", "1.txt": b"x"}, "cannot decode.*1 of")],
)
def test_bad_shards_are_named(tmp_path, tiny, samples, message):
    path = write_shard(tmp_path / "bad.tar", samples)
    with pytest.raises(UserError, match=message):
        first_batch(path, tiny)


def first_batch(path, tiny):
    loader = TrainingLoader(
        Shards(str(path)), batch=1, transform=training_transform(tiny.preprocess), tokenizer=tiny.tokenizer,
        seed=0, workers=0, pin_memory=False,
    )  # fmt: skip
    return next(loader.epoch(0))


def test_a_compressed_shard_is_refused_with_the_command(tmp_path):
    path = tmp_path / "a.tar.gz"
    with tarfile.open(path, "w:gz"):
        pass
    with pytest.raises(UserError, match=r"gunzip .*a\.tar\.gz"):
        Shards(str(path))
