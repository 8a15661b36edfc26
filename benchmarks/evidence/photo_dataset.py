"""The image-caption pairs of the experiments, small enough to fit on the device.

    python benchmarks/evidence/photo_dataset.py SETS FOLDER     # once: shrinks large images, copies the rest

SETS holds WebDataset shards (.tar or .tar.gz): coco_64/train-*, flickr8k/{train,val,test}-*, cifar10/test10k-* with
classnames.txt. FOLDER gets the same at 64 x 64 pixels, about 55 MB; `PhotoDataset.load` reads it.
"""

import io
import json
import shutil
import sys
import tarfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from leanclip.data.datasets import BUNDLED
from leanclip.models import create_tokenizer

SIZE = 64
CLASS_PROMPTS = ("a photo of a {}.", "a {}.", "a picture of a {} outside.", "a close up of a {}.")
MODEL = Path(__file__).parent / "small_vit.json"
PHOTO_SHARDS = {
    "train": ("coco-*.tar.gz", "flickr-train-*.tar.gz"),
    "val": ("flickr-val-*.tar.gz",),
    "test": ("flickr-test-*.tar.gz",),
}
EMOJI_SHARDS = {"train": ("train-*.tar",), "val": ("val-*.tar",), "test": ("val-*.tar",)}


def samples(shards: Iterable[Path]) -> Iterator[dict[str, bytes]]:
    """The members of each sample, by file ending."""
    for shard in shards:
        sample: dict[str, bytes] = {}
        key = None
        with tarfile.open(shard) as archive:
            for member in archive:
                stem, _, ending = member.name.partition(".")
                if stem != key and sample:
                    yield sample
                    sample = {}
                key, file = stem, archive.extractfile(member)
                assert file is not None
                sample[ending] = file.read()
        if sample:
            yield sample


def captions(sample: dict[str, bytes]) -> list[str]:
    listed = json.loads(sample["json"]).get("captions") if "json" in sample else None
    return listed or [sample["txt"].decode()]


def pixels(jpeg: bytes) -> np.ndarray:
    image = Image.open(io.BytesIO(jpeg)).convert("RGB")
    if image.size != (SIZE, SIZE):
        image = image.resize((SIZE, SIZE), Image.Resampling.BICUBIC)
    return np.asarray(image).transpose(2, 0, 1)


@dataclass(frozen=True)
class CaptionedImages:
    images: Tensor  # (n, 3, 64, 64) uint8
    tokens: Tensor  # (m, 77) int32
    lengths: Tensor  # (m,) end token included; on the host
    first: Tensor  # (n + 1,) position of each image's first caption; on the host

    @property
    def image_of_text(self) -> Tensor:
        return torch.repeat_interleave(torch.arange(len(self.images)), self.first.diff())

    def last(self, count: int) -> "CaptionedImages":
        """The last images, with their captions."""
        first = self.first[-min(count, len(self.images)) - 1 :]
        begin = int(first[0])
        return CaptionedImages(
            self.images[1 - len(first) :], self.tokens[begin:], self.lengths[begin:], first - begin
        )


@dataclass(frozen=True)
class PhotoDataset:
    train: CaptionedImages
    val: CaptionedImages
    test: CaptionedImages
    class_images: Tensor
    labels: Tensor
    prompts: Tensor  # (classes, prompts, 77) tokens

    @classmethod
    def load(cls, folder: Path, device: torch.device | str = "cpu") -> "PhotoDataset":
        """Decodes the shards once into a file beside them. The bundled emoji replace the photos in trials."""
        cache = folder / "decoded.safetensors"
        tensors = load_file(cache) if cache.is_file() else decode(folder)
        if not cache.is_file() and folder != BUNDLED:
            save_file(tensors, cache)

        def captioned(name: str) -> CaptionedImages:
            images, tokens = (tensors[f"{name}.{part}"].to(device) for part in ("images", "tokens"))
            return CaptionedImages(images, tokens, tensors[f"{name}.lengths"], tensors[f"{name}.first"])

        labelled = [tensors[name].to(device) for name in ("labelled", "labels", "prompts")]
        return cls(captioned("train"), captioned("val"), captioned("test"), *labelled)


def decode(folder: Path) -> dict[str, Tensor]:
    tokenizer = create_tokenizer(str(MODEL))
    emoji = folder == BUNDLED
    tensors: dict[str, Tensor] = {}
    class_names: list[str] = []
    for name, patterns in (EMOJI_SHARDS if emoji else PHOTO_SHARDS).items():
        pairs = list(samples(path for pattern in patterns for path in sorted(folder.glob(pattern))))
        if not pairs:
            raise SystemExit(f"{folder} has no shards of {name}; make it with photo_dataset.py")
        texts = [captions(sample) for sample in pairs]
        tokens = tokenizer([caption for image_captions in texts for caption in image_captions]).to(torch.int32)
        tensors[f"{name}.images"] = stacked_images(pairs)
        tensors[f"{name}.tokens"] = tokens
        tensors[f"{name}.lengths"] = tokens.argmax(1) + 1  # the end token has the largest number
        tensors[f"{name}.first"] = torch.tensor([0, *map(len, texts)]).cumsum(0)
        class_names = [image_captions[0] for image_captions in texts[:6]]
    if emoji:
        tensors["labelled"], tensors["labels"] = tensors["val.images"][:6].clone(), torch.arange(6)
    else:
        class_names = (folder / "classnames.txt").read_text().strip().split("\n")
        pairs = list(samples(sorted(folder.glob("cifar10-*.tar.gz"))))
        tensors["labelled"] = stacked_images(pairs)
        tensors["labels"] = torch.tensor([int(sample["cls"]) for sample in pairs])
    prompts = tokenizer([prompt.format(name.strip()) for name in class_names for prompt in CLASS_PROMPTS])
    tensors["prompts"] = prompts.view(len(class_names), len(CLASS_PROMPTS), -1).to(torch.int32)
    return tensors


def stacked_images(pairs: list[dict[str, bytes]]) -> Tensor:
    with ThreadPoolExecutor() as pool:
        return torch.from_numpy(np.stack(list(pool.map(pixels, [sample["jpg"] for sample in pairs])))).contiguous()


def shrink(shard: Path, target: Path) -> None:
    """Copies the samples with their images at 64 x 64."""
    with tarfile.open(shard) as source, tarfile.open(target, "w:gz") as archive:
        for member in source:
            file = source.extractfile(member)
            assert file is not None
            content = file.read()
            if member.name.endswith(".jpg"):
                small = io.BytesIO()
                Image.fromarray(pixels(content).transpose(1, 2, 0)).save(small, "JPEG", quality=80)
                content = small.getvalue()
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    sets, folder = Path(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    for shard in sorted((sets / "coco_64").glob("train-*.tar.gz")):
        shutil.copyfile(shard, folder / f"coco-{shard.name[6:]}")
    for shard in sorted((sets / "flickr8k").glob("*.tar")):
        shrink(shard, folder / f"flickr-{shard.name}.gz")
    for shard in sorted((sets / "cifar10").glob("*.tar.gz")):
        shutil.copyfile(shard, folder / f"cifar10-{shard.name}")
    shutil.copyfile(sets / "cifar10" / "classnames.txt", folder / "classnames.txt")


if __name__ == "__main__":
    main()
