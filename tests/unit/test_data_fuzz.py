"""A damaged shard gives samples that are skipped and counted, or a UserError: no traceback, no hang."""

import itertools
import random
import tarfile
from collections import Counter

import pytest
import torch
from file_fuzz import BINARY, Target, fuzz
from shard_files import picture, shard_bytes, sound, tokenizer

from leanclip.data import BrokenCount, BrokenSample, Shards, TrainingLoader
from leanclip.data.decode import TrainingTransform
from leanclip.errors import UserError

SAMPLES = 8


def flip_header(content, draw):
    """Inside the used parts of a header, which are a small share of the file."""
    block = draw.randrange(len(content) // 512 + 1)
    start, length = draw.choice(((0, 30), (124, 12), (148, 9), (257, 8), (345, 10)))
    content[(block * 512 + start + draw.randrange(length)) % len(content)] = draw.randrange(256)


def zero(content, draw):
    """In the first half: at its end a tar has zeros."""
    start = draw.randrange(len(content) // 2 + 1)
    stop = min(len(content), start + draw.choice((1, 512, 3000)))
    content[start:stop] = bytes(stop - start)


DAMAGES = (*BINARY, flip_header, zero)


def originals():
    plain = sound(SAMPLES)
    plain["00001.jpg"] = picture(1, kind="PNG")
    plain["00002.jpg"] = picture(2, kind="WEBP")
    long_names = {f"{'directory/' * 12}{name}": content for name, content in plain.items()}
    return shard_bytes(plain), shard_bytes(long_names, format=0), shard_bytes(long_names, format=1)


def damaged_shards(path, cases, seed):
    """Each shard with each kind of damage, as training reads it. One kind at a time: zeros up to a new end are an
    end."""

    def read():
        shards = Shards(str(path), weights_key="weights")
        assert len(shards) == SAMPLES or shards.broken, "samples were lost and not counted"
        counts, batch = BrokenCount(1.0), max(1, len(shards) // 2)
        loader = TrainingLoader(
            shards, batch=batch, transform=TrainingTransform(size=(16, 16)), tokenizer=tokenizer,
            seed=1, workers=0, pin_memory=False,
        )  # fmt: skip
        for samples in loader.epoch(0):
            assert len(samples) == len(set(samples.sample_ids.tolist())) == batch
            counts.add(len(samples), samples.broken, samples.examples)
            assert all("\n" not in example for example in samples.examples)
        return str(counts.kinds), str(shards.broken)

    outcomes = Counter()
    for content, damage in itertools.product(originals(), DAMAGES):
        path.write_bytes(content)
        outcomes += fuzz(Target(path, read, damages=(damage,)), cases=cases, seed=seed)
    return outcomes


def test_damaged_shards_give_counted_samples_or_an_error(tmp_path):
    outcomes = damaged_shards(tmp_path / "damaged.tar", 120, seed=0)
    assert min(outcomes[kind] for kind in ("same", "other", "error")) > 100, outcomes


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_many_more_damaged_shards(part, tmp_path):
    damaged_shards(tmp_path / "damaged.tar", 500, seed=1_000_000 + 500 * part)


def with_lies(path, *, pax_size=None, header_size=None):
    """A shard in which the image of sample 2 has a wrong size in a pax header or in its own."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in sound(6).items():
            entry, lies = tarfile.TarInfo(name), name == "00002.jpg"
            entry.pax_headers = {"size": str(pax_size)} if lies and pax_size else {}
            entry.size = header_size if lies and header_size else len(content)
            archive.fileobj.write(entry.tobuf(tarfile.PAX_FORMAT) + content + bytes(-len(content) % 512))
    return path


@pytest.mark.parametrize("size", [1, 600, 5000, 10**9, 10**15, 10**30])
def test_a_size_that_lies_in_a_pax_header_loses_nothing(tmp_path, size):
    shards = Shards(str(with_lies(tmp_path / "a.tar", pax_size=size)))
    assert [shards.image_bytes(number) for number in range(6)] == [sound(6)[f"{n:05d}.jpg"] for n in range(6)]


@pytest.mark.parametrize("size", [10**5, 10**10, 10**15])
def test_after_a_size_beyond_the_end_the_next_header_is_read(tmp_path, size):
    shards = Shards(str(with_lies(tmp_path / "a.tar", header_size=size)))
    assert len(shards) == 5 and shards.broken == {"header": 1, "no image": 1}
    assert shards.captions(4) == ["picture number 5"]


@pytest.mark.parametrize("content", [b"", b"x", bytes(512), bytes(10240), b"\xff" * 5000, b"hello " * 1000])
def test_a_file_that_is_not_a_tar_is_refused(content, tmp_path):
    (tmp_path / "no.tar").write_bytes(content)
    with pytest.raises(UserError) as raised:
        Shards(str(tmp_path / "no.tar"))
    assert raised.value.code in ("data.no_samples", "data.not_a_tar")


def test_damaged_images_decode_or_are_broken():
    transform = TrainingTransform(size=(16, 16))
    for kind in ("JPEG", "PNG", "WEBP", "GIF"):
        content = picture(3, kind=kind)
        for position in range(0, len(content), 3):
            damaged = bytearray(content)
            damaged[position] ^= 0xFF
            try:
                pixels = transform(bytes(damaged), random.Random(0))
            except BrokenSample:
                continue
            assert pixels.shape == (3, 16, 16) and pixels.dtype == torch.uint8
