"""The data's part of the configuration."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data"""

    train_data: str | None = None
    """WebDataset tar shards: a path, a glob, or a brace pattern such as 'cc3m-{00000..00331}.tar'; a .csv or .tsv
    with image paths and captions; or synthetic:N for N made-up samples. Default: the bundled emoji."""
    val_data: str | None = None
    """Held-out shards for retrieval; several captions per image stand in .json under "captions"."""
    csv_img_key: str = "filepath"
    """The column of a .csv or .tsv that holds image paths; relative ones count from the file's folder."""
    csv_caption_key: str = "title"
    """The column that holds captions."""
    csv_separator: str | None = None
    """What separates the columns, such as ',' or '\\t'. Default: whichever splits the header into these columns."""
    val_split: float = 0.0
    """Without --val-data: hold this share of the training data out instead."""
    batch_size: int | None = None
    """Samples per step on each process (as in OpenCLIP). Give this or --global-batch-size."""
    global_batch_size: int | None = None
    """Samples per step over all processes: what a recipe fixes and a resumed run must keep. Default: 128."""
    workers: int = 2
    """Processes that decode and augment. 0 does it in the training process."""

    def __post_init__(self) -> None:
        if self.batch_size is not None and self.global_batch_size is not None:
            raise ValueError(
                "--batch-size (per process) and --global-batch-size (all of them) say the same; give one"
            )
        for name in ("batch_size", "global_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if not 0 <= self.val_split < 1:
            raise ValueError(f"val_split is {self.val_split}; give a share in [0, 1)")
        if self.val_split and self.val_data:
            raise ValueError("--val-split holds out training data, --val-data brings its own; give one")
        if self.workers < 0:
            raise ValueError(f"workers is {self.workers}; it must be 0 or more")
