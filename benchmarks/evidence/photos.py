"""The photographs of the experiments, small enough to lie on the device.

    python benchmarks/evidence/photos.py SETS FOLDER     # once: shrinks what is too large, copies the rest

SETS holds WebDataset shards (.tar or .tar.gz): coco_64/train-*, flickr8k/{train,val,test}-*, cifar10/test10k-* with
classnames.txt. FOLDER gets the same at 64 x 64 pixels, about 55 MB; `Photos.of` reads it.
"""

import io
import json
import shutil
import sys
import tarfile
from collections.abc import Iterator
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
MODEL = Path(__file__).parent / "small.json"


def samples(shards: list[Path]) -> Iterator[dict[str, bytes]]:
    """The members of each sample, by their ending."""
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
    if "json" in sample and (found := json.loads(sample["json"]).get("captions")):
        return found
    return [sample["txt"].decode()]


def pixels(jpeg: bytes) -> np.ndarray:
    image = Image.open(io.BytesIO(jpeg)).convert("RGB")
    if image.size != (SIZE, SIZE):
        image = image.resize((SIZE, SIZE), Image.Resampling.BICUBIC)
    return np.asarray(image).transpose(2, 0, 1)


@dataclass(frozen=True)
class Captioned:
    images: Tensor  # (n, 3, 64, 64) uint8
    tokens: Tensor  # (m, 77) int32
    lengths: Tensor  # (m,) end token included; on the host
    first: Tensor  # (n + 1,) where each image's captions begin; on the host

    @property
    def image_of_text(self) -> Tensor:
        return torch.repeat_interleave(torch.arange(len(self.images)), self.first.diff())

    def last(self, count: int) -> "Captioned":
        """The last images, with their captions."""
        count = min(count, len(self.images))
        first = self.first[-count - 1 :]
        begin = int(first[0])
        return Captioned(self.images[-count:], self.tokens[begin:], self.lengths[begin:], first - begin)


@dataclass(frozen=True)
class Photos:
    """Everything an experiment trains and is measured on."""

    train: Captioned
    val: Captioned
    test: Captioned
    labelled: Tensor  # images
    labels: Tensor
    prompts: Tensor  # (classes, prompts, 77) tokens

    @classmethod
    def of(cls, folder: Path, device: torch.device | str = "cpu") -> "Photos":
        """Decoded once into a file beside the shards; the bundled emoji where `folder` is them."""
        kept = folder / "decoded.safetensors"
        found = load_file(kept) if kept.is_file() else decoded(folder)
        if not kept.is_file() and folder != BUNDLED:
            save_file(found, kept)

        def captioned(name: str) -> Captioned:
            images, tokens = (found[f"{name}.{part}"].to(device) for part in ("images", "tokens"))
            return Captioned(images, tokens, found[f"{name}.lengths"], found[f"{name}.first"])

        return cls(
            captioned("train"), captioned("val"), captioned("test"),
            **{name: found[name].to(device) for name in ("labelled", "labels", "prompts")},
        )  # fmt: skip


def decoded(folder: Path) -> dict[str, Tensor]:
    tokenizer = create_tokenizer(str(MODEL))

    def find(pattern: str) -> list[Path]:
        return sorted(folder.glob(pattern))

    emoji = folder == BUNDLED  # stand in for photographs where only the code is tried
    sets = {
        "train": find("train-*.tar") if emoji else find("coco-*.tar.gz") + find("flickr-train-*.tar.gz"),
        "val": find("val-*.tar") if emoji else find("flickr-val-*.tar.gz"),
        "test": find("val-*.tar") if emoji else find("flickr-test-*.tar.gz"),
    }
    found: dict[str, Tensor] = {}
    with ThreadPoolExecutor() as pool:
        for name, shards in sets.items():
            if not shards:
                raise SystemExit(f"{folder} has no shards of {name}; make it with photos.py")
            content = list(samples(shards))
            texts = [captions(sample) for sample in content]
            tokens = tokenizer([text for several in texts for text in several]).to(torch.int32)
            found[f"{name}.images"] = stacked(pool.map(pixels, [s["jpg"] for s in content]))
            found[f"{name}.tokens"] = tokens
            found[f"{name}.lengths"] = tokens.argmax(1) + 1  # the end token has the largest number
            found[f"{name}.first"] = torch.tensor([0, *(len(several) for several in texts)]).cumsum(0)
        if emoji:
            classes = [texts[0] for texts in map(captions, samples(find("val-*.tar")))][:6]
            found["labelled"], found["labels"] = found["val.images"][:6].clone(), torch.arange(6)
        else:
            classes = (folder / "classnames.txt").read_text().split("\n")
            content = list(samples(find("cifar10-*.tar.gz")))
            found["labelled"] = stacked(pool.map(pixels, [s["jpg"] for s in content]))
            found["labels"] = torch.tensor([int(sample["cls"]) for sample in content])
    classes = [name.strip() for name in classes if name.strip()]
    prompts = tokenizer([prompt.format(name) for name in classes for prompt in CLASS_PROMPTS])
    found["prompts"] = prompts.view(len(classes), len(CLASS_PROMPTS), -1).to(torch.int32)
    return found


def stacked(images: Iterator[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(np.stack(list(images))))


def shrunk(shard: Path, target: Path) -> None:
    """The same samples with their images at 64 x 64."""
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
        shrunk(shard, folder / f"flickr-{shard.name}.gz")
    for shard in sorted((sets / "cifar10").glob("*.tar.gz")):
        shutil.copyfile(shard, folder / f"cifar10-{shard.name}")
    shutil.copyfile(sets / "cifar10" / "classnames.txt", folder / "classnames.txt")


if __name__ == "__main__":
    main()
