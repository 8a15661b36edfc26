"""Held-out images with captions, as --val-data names them."""

from pathlib import Path

import numpy as np

from leanclip.data import DataConfig, Shards, Subset, open_source
from leanclip.errors import UserError
from leanclip.evaluation.labelled_sets import read_lines
from leanclip.filesystem import reading

TYPE_FILE = "dataset_type.txt"  # CLIP_benchmark's


class LineCaptions(Shards):
    """Shards in CLIP_benchmark's layout: every line of the .txt is a caption."""

    def captions(self, index: int) -> list[str]:
        lines = (line.strip() for caption in super().captions(index) for line in caption.splitlines())
        return [line for line in lines if line]


def open_held_out(name: str, config: DataConfig) -> Subset:
    """The data that `--val-data` names: as for training, or a directory in CLIP_benchmark's layout."""
    with reading(name):
        path = Path(name)
        if (path / TYPE_FILE).is_file():
            kind = read_lines(str(path / TYPE_FILE))[0].lower()
            if kind != "retrieval":
                raise UserError(
                    f"{path} is a set of type {kind[:40]!r} without captions; give it to --zero-shot",
                    code="data.no_captions",
                )
            source = LineCaptions(str(path / "test"))
        else:
            source = open_source(name, config)
    return Subset(source, np.arange(len(source)))
