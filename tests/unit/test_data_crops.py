"""Images that workers decode and another device resizes: the batches are those of workers that do both."""

import gc
import io
import multiprocessing
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from crop_worker import fill_slot
from open_clip.transform import PreprocessCfg
from photographs import photograph
from PIL import Image
from shard_files import tokenizer, write_shard
from test_data_decode import PLAIN, difference
from torchvision.io import decode_jpeg

from leanclip.data import Shards, TrainingLoader, training_transform
from leanclip.data.crops import ring as ring_module
from leanclip.data.crops.ring import PART, CropRing, RingReader, SlotWriter, device_bytes
from leanclip.data.decode import Box, TrainingTransform, decoded_crop, open_image, random_crop, resized
from leanclip.training.setup import _resize_on
from refusal import refuses

CPU = torch.device("cpu")
SIZE = (24, 32)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Photographs of many sizes and formats, three of which do not decode."""
    sizes = [(60, 40), (40, 60), (90, 70), (20, 16), (32, 24), (300, 200), (119, 20), (130, 125)]
    samples = {}
    for number in range(160):
        jpeg = photograph(*sizes[number % len(sizes)], seed=number)
        if number % 13 == 0:
            kind, mode = [("PNG", "RGB"), ("WEBP", "RGB"), ("JPEG", "CMYK"), ("JPEG", "L")][number % 4]
            jpeg = photograph(*sizes[number % len(sizes)], seed=number, kind=kind, mode=mode, quality=80)
        samples[f"{number:04d}.jpg"] = jpeg[:500] if number in (5, 77, 78) else jpeg
        samples[f"{number:04d}.txt"] = str(number).encode()
    path = tmp_path_factory.mktemp("shards") / "0.tar"
    return Shards(str(write_shard(path, samples)))


def batches(source, *, resize_on, workers=0, batch=75, start=0, epochs=(0, 1), **options):
    loader = TrainingLoader(
        source, batch=batch, transform=TrainingTransform(size=SIZE, scale=(0.5, 1.0), **options), tokenizer=tokenizer,
        seed=3, workers=workers, pin_memory=False, resize_on=resize_on, number_captions=True,
    )  # fmt: skip
    assert loader.resizes_on_gpu == (resize_on is not None)
    return [batch for epoch in epochs for batch in loader.epoch(epoch, start=start)]


def assert_equal(ones, others):
    assert len(ones) == len(others) > 0
    for one, other in zip(ones, others, strict=True):
        for name in ("images", "tokens", "sample_ids", "caption_numbers"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name
        assert (one.broken, one.examples) == (other.broken, other.examples)


JITTER: dict[str, Any] = {"color_jitter": (0.4, 0.4, 0.4, 0.1), "color_jitter_prob": 0.5, "gray_scale_prob": 0.3}


@pytest.mark.parametrize("options", [{}, JITTER])
def test_batches_do_not_depend_on_where_images_are_resized(source, options):
    """With several parts in each batch, the last one smaller, and from the middle of an epoch on."""
    assert PART < 75
    there = batches(source, resize_on=None, **options)
    here = batches(source, resize_on=CPU, workers=2, **options)
    assert sum(sum(batch.broken.values()) for batch in here) > 3
    assert_equal(there, here)
    assert_equal(there[1:2], batches(source, resize_on=CPU, start=1, epochs=[0], **options))


def test_shares_of_ranks_are_parts_of_the_batch(source):
    whole = batches(source, resize_on=None, epochs=[0])
    for share in (slice(0, 70), slice(70, 75), slice(75, 75)):
        loader = TrainingLoader(
            source, batch=75, share=share, transform=TrainingTransform(size=SIZE, scale=(0.5, 1.0)), seed=3,
            tokenizer=tokenizer, workers=0, pin_memory=False, resize_on=CPU,
        )  # fmt: skip
        for part, batch in zip(loader.epoch(0), whole, strict=True):
            assert torch.equal(part.images, batch.images[share])


@pytest.mark.parametrize("room", [1, 2])
def test_crops_beyond_a_slots_room_are_resized_by_the_worker(source, room, monkeypatch):
    written = []
    monkeypatch.setattr(ring_module, "CROP_BYTES", room)
    monkeypatch.setattr(ring_module, "resized", lambda crop, size: written.append(size) or resized(crop, size))
    assert_equal(batches(source, resize_on=None), batches(source, resize_on=CPU))
    assert len(written) > 30
    sizes = [tuple(crop[1:]) for crop in _written(source, room)]
    assert (SIZE in sizes) and len(set(sizes)) > (1 if room == 2 else 0)


def _written(source, room):
    ring = CropRing(SIZE, workers=0, samples=16)
    writer, transform = SlotWriter(ring, 0, 16), TrainingTransform(size=SIZE, scale=(0.5, 1.0))
    for index in range(16, 32):
        writer.append(transform.crop(source.image_bytes(index), random.Random(index)))
    assert writer.end <= ring.slot_bytes == 16 * room * 3 * SIZE[0] * SIZE[1]
    return writer.layout


def test_the_memory_has_a_bound():
    """Of a batch of any size, on the host and on the device."""
    ring = CropRing((224, 224), workers=16, samples=PART)
    assert ring.slots * ring.slot_bytes < 2.8e9
    for size, workers in ((512, 16), (1024, 64)):
        ring = CropRing((size, size), workers=workers, samples=PART)
        assert ring.slots * ring.slot_bytes <= max(4 << 30, ring.slots * PART * ring.crop_bytes)
        assert ring.slot_bytes >= PART * ring.crop_bytes
    assert device_bytes(torch.empty(4096, 3, 224, 224, device="meta")) < 110 << 20
    assert device_bytes(torch.empty(8, 3, 224, 224, device="meta")) < 20 << 20


def test_a_slot_is_written_again_only_after_it_was_read(source):
    """The parts that the loader's workers fill, and the one that is read, are in different slots."""
    loader = TrainingLoader(
        source, batch=10, transform=TrainingTransform(size=SIZE), tokenizer=tokenizer, seed=3, workers=2,
        pin_memory=False, resize_on=CPU,
    )  # fmt: skip
    reader, waited, read = loader._parts and loader._parts.reader, [], []
    assert isinstance(reader, RingReader)
    resize = reader.resize
    reader.wait = lambda part=None: waited.append(part)  # pyright: ignore[reportAttributeAccessIssue]
    reader.resize = lambda part, *rest: (read.append(part), resize(part, *rest))  # pyright: ignore
    steps = len(list(loader.epoch(0)))
    assert read == list(range(steps)) and waited == [None, *range(4, steps + 4)]
    assert all((wait - part) % reader.ring.slots for wait, part in zip(waited[1:], read, strict=True))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_memory_is_shared_however_workers_start(method):
    ring = CropRing((2, 2), workers=1, samples=1)
    process = multiprocessing.get_context(method).Process(target=fill_slot, args=(ring, 2, 3))
    process.start()
    process.join()
    assert [set(slot.tolist()) for slot in ring.memory] == [{0}, {0}, {3}]


def test_memory_is_given_back():
    def open_files():
        return len(list(Path("/proc/self/fd").iterdir()))

    gc.collect()  # what other tests left
    before = open_files()
    rings = [CropRing((2, 2), workers=1, samples=1) for _ in range(3)]
    assert sum(int(ring.memory.sum()) for ring in rings) == 0 and open_files() == before + 6
    del rings
    gc.collect()
    assert open_files() == before


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"quality": 30}])
def test_the_fast_decoder_has_pillows_pixels(options, monkeypatch):
    calls = []
    monkeypatch.setattr("leanclip.data.decode.decode_jpeg", lambda *a: calls.append(a) or decode_jpeg(*a))
    for number, size in enumerate([(61, 43), (64, 48), (375, 500)]):
        content = photograph(*size, seed=number, **({"quality": 88} | options))
        box = Box(3, 2, size[0] - 1, size[1] - 5)
        monkeypatch.setattr("leanclip.data.decode.get_worker_info", lambda: None)
        slow = decoded_crop(open_image(content), box, (224, 224))
        monkeypatch.setattr("leanclip.data.decode.get_worker_info", lambda: 1)
        assert torch.equal(slow, decoded_crop(open_image(content), box, (224, 224))) and len(calls) == number + 1
        assert decoded_crop(open_image(content), box, (8, 8)).shape[1] < slow.shape[1]  # reduced by Pillow


def test_damaged_images_are_quiet_and_as_broken_as_before(monkeypatch, capfd):
    monkeypatch.setattr("leanclip.data.decode.get_worker_info", lambda: 1)
    content = photograph(160, 120)
    content = content[:-2] + bytes(range(74)) + content[-2:]  # libjpeg warns of them
    transform = TrainingTransform(size=(96, 128))  # not reduced
    assert transform(content, random.Random(0)).shape == (3, 96, 128)
    os.write(2, b"still here")
    assert capfd.readouterr().err == "still here"


@pytest.mark.parametrize("size", [(500, 375), (341, 256), (640, 480), (200, 150)])
def test_pixels_are_open_clips_given_the_crop(size):
    content, transform = photograph(*size), training_transform(PreprocessCfg(size=224, **PLAIN))
    image = Image.open(io.BytesIO(content)).convert("RGB")
    ring = CropRing((224, 224), workers=0, samples=2)
    writer, out = SlotWriter(ring, 0, 2), torch.empty(2, 3, 224, 224, dtype=torch.uint8)
    for seed in range(2):
        writer.append(transform.crop(content, random.Random(seed)))
    RingReader(ring, CPU).resize(0, torch.tensor(writer.layout), out)
    for seed in range(2):
        box = random_crop(size, (0.9, 1.0), random.Random(seed))
        theirs = np.asarray(image.crop(box).resize((224, 224), Image.Resampling.BICUBIC))
        assert difference(out[seed], torch.from_numpy(theirs / 255).permute(2, 0, 1)) <= 0.6


def test_a_gpu_that_is_not_there_is_refused():
    with refuses("training.decode_needs_gpu", "--decode gpu"):
        _resize_on("gpu", CPU)
    assert _resize_on("auto", CPU) is None and _resize_on("cpu", CPU) is None
