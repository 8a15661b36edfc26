"""Held-out images with captions, by name."""

from pathlib import Path

import numpy as np

from leanclip.data import DataConfig, Shards, Subset, open_source
from leanclip.errors import UserError

TYPE_FILE = "dataset_type.txt"  # CLIP_benchmark's


class LineCaptions(Shards):
    """Shards in CLIP_benchmark's form: every line of the .txt is a caption."""

    def captions(self, index: int) -> list[str]:
        lines = (line.strip() for caption in super().captions(index) for line in caption.splitlines())
        return [line for line in lines if line]


def open_held_out(given: str, config: DataConfig) -> Subset:
    """What `--val-data` names: as for training, or a folder in CLIP_benchmark's layout."""
    path = Path(given)
    if (path / TYPE_FILE).is_file():
        kind = (path / TYPE_FILE).read_text().strip().lower()
        if kind != "retrieval":
            raise UserError(f"{path} is a set of type {kind!r} and has no captions; give it to --zero-shot")
        source = LineCaptions(str(path / "test"))
    else:
        source = open_source(given, config)
    return Subset(source, np.arange(len(source)))
