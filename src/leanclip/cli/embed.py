"""leanclip embed: the embeddings of a data set, in files that NumPy maps."""

import os
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Literal

from leanclip.cli.parse import parse
from leanclip.data import DataConfig
from leanclip.device import autocast_of, device_of
from leanclip.distributed import Ranks, detect_launch, device_for, process_group
from leanclip.evaluation import EvaluationSettings
from leanclip.progress import make_console
from leanclip.search.embed import BLOCK, embed_data
from leanclip.search.store import COLUMNS
from leanclip.settings import between, check_limits, setting
from leanclip.worker_pool import MOST_WORKERS

DESCRIPTION = """Embed images and captions with a trained model: unit vectors in float16, in .npy files that NumPy
maps, with the key of every sample. A command that was killed continues when it is given again.

  leanclip embed logs/mine 'shards/{00000..00099}.tar' embeddings
  leanclip embed ViT-B-32:laion2b_s34b_b79k photos/ embeddings --of images
  torchrun --nproc-per-node 4 -m leanclip embed logs/mine shards/ embeddings --precision amp_bf16     (4 GPUs)

Then leanclip search embeddings opens a page to look at them.
"""
TIMEOUT = 1800.0  # seconds that one process waits for another


@dataclass(frozen=True, kw_only=True)
class EmbedCommand:
    model: str
    """A run (its last checkpoint), a checkpoint directory, an exported file, or an open_clip MODEL:TAG or
    MODEL:FILE."""
    data: str
    """Tar shards as for training, or with .cls files; a .csv or .tsv; a folder of images, with or without captions;
    synthetic:N; or emoji, the bundled held-out ones."""
    out: str
    """The directory to write, or to continue."""
    of: Literal["both", "images", "captions"] = "both"
    """What to embed; of data without captions, both is the images."""
    csv_img_key: str = "filepath"
    """The column of a .csv or .tsv that holds image paths."""
    csv_caption_key: str = "title"
    """The column that holds captions."""
    csv_separator: str | None = None
    """What separates the columns, such as ',' or '\\t'. Default: what splits the header."""
    caption_key: str = "captions"
    """The key of the caption or list of captions in a sample's .json."""
    precision: Literal["fp32", "amp_bf16", "amp"] = "fp32"
    """amp_bf16 and amp (fp16) are faster on a GPU."""
    batch_size: int = setting(BLOCK, limits=between(1, BLOCK))
    """Images or captions embedded at a time, up to 256."""
    workers: int | None = setting(None, limits=between(0, MOST_WORKERS))
    """Processes that decode images, for each process on data with more than 2,000 samples. Default: up to 4."""
    device: str | None = None
    """cpu or cuda. Default: a GPU if there is one."""

    def __post_init__(self) -> None:
        check_limits(self)


def run(arguments: list[str]) -> None:
    command = parse(EmbedCommand, arguments, command="embed", description=DESCRIPTION)
    launch = detect_launch()
    device = device_of(device_for(launch, command.device))
    with process_group(launch, device, timeout=TIMEOUT):
        console = make_console(quiet=not Ranks.current().first)
        settings = EvaluationSettings(
            device=device,
            autocast=autocast_of(command.precision, device),
            batch=command.batch_size,
            workers=min(4, os.cpu_count() or 1) if command.workers is None else command.workers,
            progress=Ranks.current().first,
        )
        store = embed_data(
            command.model,
            command.data,
            Path(command.out),
            of=command.of,
            config=DataConfig(**{name: getattr(command, name) for name in COLUMNS}),
            precision=command.precision,
            settings=settings,
            notify=console.print,
        )
        for side, table in store.tables.items():
            left_out = store.samples - int(store.usable(side).sum())
            without = f" ({left_out:,} of {store.samples:,} samples have none)" if left_out else ""
            path = table.directory / "features.npy"
            console.print(f"{side}: {len(table.features):,} vectors of {store.dim} in {path}{without}")
        console.print(f"look at them: leanclip search {quote(command.out)}")
