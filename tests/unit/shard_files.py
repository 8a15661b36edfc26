"""Small shards for tests, and the command line that reads them."""

import io
import json
import tarfile

import numpy as np
from PIL import Image


def write_shard(path, samples):
    """A tar of {name: bytes}, or of (name, bytes) pairs if a name is a duplicate."""
    path.write_bytes(shard_bytes(samples))
    return path


def shard_bytes(samples, **options):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", **options) as archive:
        for name, content in samples.items() if isinstance(samples, dict) else samples:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return file.getvalue()


def picture(seed, size=(24, 20), kind="JPEG", mode="RGB", **options):
    """An encoded image of smooth random colours."""
    pixels = np.random.default_rng(seed).integers(0, 256, (3, 3, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC).convert(mode).save(file, kind, **options)
    return file.getvalue()


def sound(count, start=0, **options):
    """The files of valid samples, with one caption or with several weighted ones."""
    files = {}
    for number in range(start, start + count):
        files[f"{number:05d}.jpg"] = picture(number, **options)
        if number % 3:
            files[f"{number:05d}.txt"] = f"picture number {number}".encode()
        else:
            several = {"captions": [f"first of {number}", f"second of {number}"], "weights": [1, 3]}
            files[f"{number:05d}.json"] = json.dumps(several).encode()
    return files


def tokenizer(captions):
    """Tokens that identify the caption."""
    import torch

    return torch.tensor([list(caption.encode()[:24].ljust(24)) for caption in captions])
