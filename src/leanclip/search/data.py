"""The data that `leanclip embed` and `leanclip search` open: what `train` and `evaluate` read, and plain folders."""

from pathlib import Path
from typing import Any, NamedTuple

from leanclip.data import DataConfig, Shards, Source
from leanclip.data.datasets import BUNDLED
from leanclip.data.files import is_folder, is_remote
from leanclip.data.source import Packable
from leanclip.data.synthetic import PREFIX
from leanclip.errors import UserError
from leanclip.evaluation.held_out import TYPE_FILE, open_held_out
from leanclip.evaluation.labelled_sets import BUNDLED_NAME, open_labelled
from leanclip.packing.folder import Folder

WITHOUT_CAPTIONS = ("data.no_samples", "data.no_captions")


class Shard(NamedTuple):
    """A file of the data and the id of its first sample."""

    path: str
    first: int

    @property
    def name(self) -> str:
        return self.path.rstrip("/").rpartition("/")[2]


def open_data(location: str, config: DataConfig) -> Source:
    """Shards with captions or with classes, a .csv or .tsv, a folder of images, synthetic:N, or emoji."""
    path = Path(location)
    if location == BUNDLED_NAME and not path.exists():
        location = str(BUNDLED / "val-*.tar")
    elif is_folder(location) and not any(path.glob("*.tar")) and not (path / TYPE_FILE).is_file():
        return open_labelled(location).source if any(path.glob("test/*.tar")) else Folder(location)
    try:
        return open_held_out(location, config).source
    except UserError as error:
        if error.code not in WITHOUT_CAPTIONS:
            raise
        return open_labelled(location).source


def identity_of(source: Source) -> Any:
    """What fixes the ids of the samples; the same wherever the files lie."""
    manifest = source.manifest()
    if manifest is not None:
        return manifest
    return source.identity() if isinstance(source, Packable) else [type(source).__name__, len(source)]


def shards_of(source: Source, location: str) -> list[Shard]:
    if isinstance(source, Shards):
        paths = (absolute(file.path) for file in source.files)
        return [Shard(path, first) for path, first in zip(paths, source.bases, strict=False)]
    return [Shard(location, 0)]


def absolute(location: str) -> str:
    """A location that does not depend on the working directory; several are separated by ::."""
    parts = [
        part if is_remote(part) or part.startswith(PREFIX) or part == BUNDLED_NAME else str(Path(part).absolute())
        for part in location.split("::")
    ]
    return "::".join(parts)
