"""Data loading: decoded and augmented samples per second and core against open_clip's webdataset pipeline, and the
index of a large data set against `cat`.

    python benchmarks/bench_data.py              # minutes, and 12 GB of temporary files
    python benchmarks/bench_data.py --quick      # seconds; checks that it runs
    python benchmarks/bench_data.py --skip-index

Both loaders read the same shards of generated, photograph-like JPEGs in one process with one thread, with open_clip's
default augmentation and tokenizer, in batches of 64 at 224 pixels (the smallest images at 64). They alternate after
each epoch. Samples per CPU second do not depend on the load of the machine; samples per second do.

The tars of the index benchmark hold random bytes as images. `cold`: the files are not in the page cache.
"""

import io
import os
import platform
import random
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import open_clip
import torch
import webdataset
from evidence.command_line import Flag, command_line
from evidence.measurements import append
from evidence.measurements import rows as stored_rows
from evidence.photographs import photograph
from PIL import Image
from webdataset.writer import TarWriter

import leanclip
from leanclip.data import Shards, TrainingLoader, index
from leanclip.data.decode import Box, TrainingTransform, open_image, random_crop, resized_crop
from leanclip.models import create_tokenizer

sys.modules.setdefault("pandas", ModuleType("pandas"))  # open_clip_train imports it, only for CSV files
import open_clip_train.data  # noqa: E402

if not hasattr(sys.modules["pandas"], "__version__"):
    del sys.modules["pandas"]  # pyarrow looks at what is there

# The stage that its comment names; its own version fails on the shard separators of webdataset 1.0.
open_clip_train.data.tarfile_to_samples_nothrow = getattr(webdataset, "tarfile_to_samples")(  # noqa: B009
    handler=open_clip_train.data.log_and_continue
)

RESULTS = Path(__file__).parent / "results" / "data.csv"
SIZES = {
    "64 px": (64, 64),
    "256 px": (341, 256),
    "500 px": (500, 375),
    "500 px, square": (500, 500),
    "1200 px": (1200, 900),
}
BATCH, MODEL = 64, "ViT-B-32"
WORDS = [
    "a", "photograph", "of", "some", "red", "green", "blue", "large", "small", "old", "new", "house", "tree", "dog",
    "cat", "car", "street", "sky", "sea",
]  # fmt: skip
SAMPLES_PER_TAR = 10_000


def target(name: str) -> tuple[int, int]:
    """The input size of the model for images of this size."""
    side = min(224, *SIZES[name])
    return side, side


def write_photographs(directory: Path, size: tuple[int, int], samples: int, distinct: int) -> str:
    """Shards of photographs with captions, half of them upright. Returns their pattern."""
    images = [photograph(*(size if number % 2 else size[::-1]), seed=number) for number in range(distinct)]
    for shard in range(4):
        with TarWriter(str(directory / f"{shard:05d}.tar")) as tar:
            for number in range(shard, samples, 4):
                caption = " ".join(random.Random(number).choices(WORDS, k=12))
                tar.write({"__key__": f"{number:09d}", "jpg": images[number % distinct], "txt": caption})
    return str(directory / "{00000..00003}.tar")


def leanclip_images(pattern: str, size: tuple[int, int], tokenizer: Callable[..., torch.Tensor]) -> Iterable[Any]:
    source = Shards(pattern)
    loader = TrainingLoader(
        source, batch=BATCH, transform=TrainingTransform(size=size),
        tokenizer=tokenizer, seed=0, workers=0, pin_memory=False,
    )  # fmt: skip
    for batch in loader.epoch(0):
        yield batch.images


def open_clip_images(
    pattern: str, size: tuple[int, int], tokenizer: Callable[..., torch.Tensor], samples: int
) -> Iterable[Any]:
    arguments = SimpleNamespace(
        train_data=pattern, train_num_samples=samples, train_data_upsampling_factors=None, batch_size=BATCH,
        workers=0, world_size=1, seed=0,
    )  # fmt: skip
    transform = open_clip.image_transform(size, is_train=True)
    data = open_clip_train.data.get_wds_dataset(arguments, transform, is_train=True, floor=True, tokenizer=tokenizer)
    for images, _ in data.dataloader:
        yield images


def rates(batches: Iterable[Any]) -> tuple[float, float]:
    """Samples per second and per CPU second of one epoch."""
    wall, cpu, samples = time.perf_counter(), time.process_time(), 0
    for images in batches:
        samples += len(images)
    return samples / (time.perf_counter() - wall), samples / (time.process_time() - cpu)


def difference(contents: Iterable[bytes], size: tuple[int, int]) -> tuple[float, float]:
    """Mean absolute difference from open_clip's pixels for the same crop, in levels of 255: mean and maximum."""
    differences = []
    for seed, content in enumerate(contents):
        image = open_image(content)
        full_size = image.size
        box = random_crop(full_size, (0.9, 1.0), random.Random(seed))
        pixels = resized_crop(image, box, size).permute(1, 2, 0).numpy().astype(float)
        scale = round(full_size[0] / image.size[0])  # the crop of a reduced JPEG is on the reduced grid
        grid = Box(*(min(round(edge / scale) * scale, limit) for edge, limit in zip(box, full_size * 2, strict=True)))
        expected = Image.open(io.BytesIO(content)).convert("RGB").crop(grid)
        differences.append(np.abs(pixels - np.asarray(expected.resize(size, Image.Resampling.BICUBIC))).mean())
    return float(np.mean(differences)), float(np.max(differences))


def bench_decoding(samples: int, distinct: int, repeats: int, sizes: Iterable[str]) -> list[dict[str, Any]]:
    rows, tokenizer, fast_tokenizer = [], open_clip.get_tokenizer(MODEL), create_tokenizer(MODEL)
    print(f"{'images':<16}{'loader':<12}{'samples/s':>11}{'per CPU s':>11}{'ratio':>8}   difference to open_clip")
    for name in sizes:
        size = target(name)
        with tempfile.TemporaryDirectory() as directory:
            pattern = write_photographs(Path(directory), SIZES[name], samples, distinct)
            measured: dict[str, list[tuple[float, float]]] = {"open_clip": [], "leanclip": []}
            for _ in range(repeats):
                measured["open_clip"].append(rates(open_clip_images(pattern, size, tokenizer, samples)))
                measured["leanclip"].append(rates(leanclip_images(pattern, size, fast_tokenizer)))
            source = Shards(pattern)
            mean, largest = difference((source.image_bytes(i) for i in range(min(distinct, 64))), size)
        base = statistics.median(cpu for _, cpu in measured["open_clip"])
        for loader, both in measured.items():
            wall, cpu = (statistics.median(column) for column in zip(*both, strict=True))
            row = {"what": f"decode {name}", "loader": loader, "per_second": round(wall, 1),
                   "per_cpu_second": round(cpu, 1), "ratio": round(cpu / base, 2)}  # fmt: skip
            if loader == "leanclip":
                row |= {"difference_mean": round(mean, 3), "difference_max": round(largest, 3)}
            rows.append(row)
            shown = f"   mean {mean:.2f}/255, max {largest:.2f}/255" if loader == "leanclip" else ""
            print(f"{name:<16}{loader:<12}{wall:>11.1f}{cpu:>11.1f}{row['ratio']:>8.2f}{shown}", flush=True)
    return rows


def write_tars(directory: Path, samples: int, image_size: int) -> int:
    """Samples with different names and the same content, padded to blocks. Returns the bytes written."""
    caption = b"a caption of an ordinary length, which a tar pads to 512 bytes"
    contents = {"jpg": os.urandom(image_size), "txt": caption}
    written = 0
    for start in range(0, samples, SAMPLES_PER_TAR):
        with (directory / f"{start // SAMPLES_PER_TAR:05d}.tar").open("wb") as file:
            for number in range(start, min(start + SAMPLES_PER_TAR, samples)):
                for ending, content in contents.items():
                    entry = tarfile.TarInfo(f"{number:09d}.{ending}")
                    entry.size = len(content)
                    file.write(entry.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-len(content) % 512))
            written += file.write(bytes(1024)) + file.tell() - 1024
            file.flush()
            os.fsync(file.fileno())
    return written


def drop_from_page_cache(directory: Path) -> None:
    for path in directory.glob("*.tar"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def timed(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def bench_index(samples: int, image_size: int) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        size = write_tars(directory, samples, image_size)
        shell = ["sh", "-c", f"cat {name}/*.tar > /dev/null"]
        index_file = directory / index.INDEX_NAME

        def build() -> None:
            index_file.unlink(missing_ok=True)
            assert len(Shards(name)) == samples

        for state in ("cold", "warm"):
            for what, action in (("cat", lambda: subprocess.run(shell, check=True)), ("index", build)):
                if state == "cold":
                    drop_from_page_cache(directory)
                else:
                    subprocess.run(shell, check=True)
                seconds = timed(action)
                rows.append({"what": f"{what} {samples} samples, {state}", "seconds": round(seconds, 3),
                             "megabytes_per_second": round(size / 1e6 / seconds)})  # fmt: skip
                print(f"{what:<6} {state}: {seconds:7.2f} s, {size / 1e6 / seconds:7.0f} MB/s of {size / 1e9:.2f} GB",
                      flush=True)  # fmt: skip
        if index_file.is_file():
            loaded = timed(lambda: Shards(name))
            per_sample = index_file.stat().st_size / samples
            print(f"load: {loaded:.3f} s for {samples:,} samples, {per_sample:.1f} bytes per sample")
            rows.append({"what": f"load {samples} samples", "seconds": round(loaded, 4),
                         "bytes_per_sample": round(per_sample, 2)})  # fmt: skip
    return rows


def main() -> None:
    arguments = command_line(
        __doc__, samples=Flag(1024, "samples per epoch for each image size"),
        sizes=Flag(list(SIZES), choices=list(SIZES)),
        repeats=Flag(3, "epochs of each loader; the median is reported"), index_samples=1_000_000,
        index_payload=Flag(8192, "bytes per image of the index benchmark"), skip_index=False,
    )  # fmt: skip
    torch.set_num_threads(1)
    if arguments.quick:
        index.MIN_KEPT_BYTES = 0
        bench_decoding(128, 8, 1, ["256 px"])
        bench_index(2000, 512)
        return
    rows = bench_decoding(arguments.samples, 64, arguments.repeats, arguments.sizes)
    if not arguments.skip_index:
        rows += bench_index(arguments.index_samples, arguments.index_payload)
    facts = {
        "version": leanclip.__version__,
        "torch": torch.__version__,
        "open_clip": open_clip.__version__,
        "hardware": f"{platform.machine()} cpu, {os.cpu_count()} cores",
        "date": time.strftime("%Y-%m-%d"),
    }
    rows = [row | facts for row in rows]
    measured = {row["what"] for row in rows}
    rows += [row for row in stored_rows(RESULTS) if row["what"] not in measured]
    names = [key for key in dict.fromkeys(key for row in rows for key in row) if key not in facts]
    RESULTS.unlink()
    append(RESULTS, *({name: row.get(name, "") for name in (*names, *facts)} for row in rows))
    print(f"written: {RESULTS}")


if __name__ == "__main__":
    main()
