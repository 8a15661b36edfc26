"""WebDataset tar shards, indexed: every sample has a stable id and is read by position, without a scan."""

import glob
import json
import os
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import braceexpand

from leanclip.data.source import BrokenSample, Source
from leanclip.errors import UserError

IMAGE_ENDINGS = ("jpg", "jpeg", "png", "webp")
TEXT_ENDINGS = ("txt", "json")


@dataclass(frozen=True)
class Member:
    """Where one file of a sample lies inside its shard."""

    offset: int
    size: int


@dataclass(frozen=True)
class Sample:
    shard: int
    key: str
    members: dict[str, Member]  # by ending


class Shards(Source):
    """The samples of some tar files; the id of a sample is its position."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.paths = expand(pattern)
        self.samples: list[Sample] = []
        self.incomplete = 0
        for number, path in enumerate(self.paths):
            self._index(number, path)
        if not self.samples:
            raise UserError(
                f"no samples in {pattern}: a sample is an image ({', '.join(IMAGE_ENDINGS)}) and a caption"
                " (txt, or json with captions) of one name"
            )
        self._files: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.samples)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": {}}  # each worker process opens its own

    def image_bytes(self, index: int) -> bytes:
        sample = self.samples[index]
        ending = next(ending for ending in IMAGE_ENDINGS if ending in sample.members)
        return self._read(sample, ending)

    def captions(self, index: int) -> list[str]:
        """All captions of a sample: the list in .json under "captions" if there is one, else the .txt."""
        sample = self.samples[index]
        if "json" in sample.members:
            try:
                found = json.loads(self._read(sample, "json"))
            except ValueError as error:
                raise BrokenSample(
                    "caption", f"the .json of sample {self.name(index)} is broken ({error})"
                ) from error
            captions = found.get("captions") if isinstance(found, dict) else None
            if captions:
                return [captions] if isinstance(captions, str) else [str(caption) for caption in captions]
        if "txt" not in sample.members:
            raise BrokenSample("caption", f"sample {self.name(index)} has no caption")
        try:
            return [self._read(sample, "txt").decode("utf-8").strip()]
        except UnicodeDecodeError as error:
            raise BrokenSample("encoding", f"the caption of sample {self.name(index)} is not UTF-8") from error

    def name(self, index: int) -> str:
        sample = self.samples[index]
        return f"{sample.key} of {self.paths[sample.shard]}"

    def _index(self, number: int, path: Path) -> None:
        found: dict[str, dict[str, Member]] = {}
        try:
            with tarfile.open(path, "r:") as archive:
                for entry in archive:
                    key, _, ending = entry.name.rpartition("/")[2].partition(".")
                    if entry.isfile() and ending.lower() in IMAGE_ENDINGS + TEXT_ENDINGS:
                        key = entry.name[: len(entry.name) - len(ending) - 1]
                        found.setdefault(key, {})[ending.lower()] = Member(entry.offset_data, entry.size)
        except tarfile.TarError as error:
            hint = f"; unpack it first: gunzip {path}" if path.suffix in (".gz", ".tgz") else ""
            raise UserError(f"{path} is not a plain tar file ({error}){hint}") from error
        for key, members in found.items():
            if set(members) & set(IMAGE_ENDINGS) and set(members) & set(TEXT_ENDINGS):
                self.samples.append(Sample(number, key, members))
            else:
                self.incomplete += 1

    def _read(self, sample: Sample, ending: str) -> bytes:
        if sample.shard not in self._files:
            self._files[sample.shard] = os.open(self.paths[sample.shard], os.O_RDONLY)
        member = sample.members[ending]
        return os.pread(self._files[sample.shard], member.size, member.offset)


def expand(pattern: str) -> list[Path]:
    """The files of a path, glob or brace pattern, in a stable order."""
    paths: list[Path] = []
    try:
        parts = list(braceexpand.braceexpand(pattern))
    except ValueError as error:
        raise UserError(f"the braces of {pattern!r} do not match: {error}") from error
    for part in parts:
        if Path(part).is_dir():
            part = str(Path(part) / "*.tar")
        matches = sorted(glob.glob(part)) if glob.has_magic(part) else [part]
        paths += [Path(match) for match in matches]
    missing = [path for path in paths if not path.is_file()]
    if missing or not paths:
        raise UserError(f"no such file: {missing[0] if missing else pattern} (from {pattern!r}); give tar shards")
    return paths
