"""A dry run: a table of the settings, and one augmented batch with its captions as an image."""

import textwrap
from pathlib import Path

from PIL import Image, ImageDraw
from rich.console import Console
from rich.table import Table
from torch import Tensor

from leanclip.data import Batch
from leanclip.filesystem import atomic_path, writing
from leanclip.runs.run_directory import RunDirectory
from leanclip.training.setup import Job

SHOWN = 16
CELL = 144
CAPTION_WIDTH, CAPTION_LINES = 24, 3  # characters of the default font


def preview(job: Job, directory: RunDirectory, console: Console) -> Path:
    """Print the settings of the run, and write the image beside where the run directory would be."""
    config = job.config
    table = Table(title=f"dry run of {config.run.name}", show_header=False)
    for name, value in _facts(job).items():
        table.add_row(name, value)
    console.print(table)
    batch = next(job.loader.epoch(0))
    path = directory.path.with_name(f"{directory.path.name}.dry_run.png")
    with writing(path, code="run.not_writable", remedy="give another --logs"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path, suffix=".png") as temporary:
            contact_sheet(job, batch).save(temporary)
    console.print(f"one augmented batch with its captions: {path}")
    return path


def _facts(job: Job) -> dict[str, str]:
    config = job.config
    parameters = sum(parameter.numel() for parameter in job.model.parameters())
    trained = sum(parameter.numel() for parameter in job.model.parameters() if parameter.requires_grad)
    state = sum(buffer.numel() * buffer.element_size() for buffer in job.context.loss.buffers())
    return {
        "model": f"{config.model.model}, {parameters:,} parameters, {trained:,} trained",
        "loss": config.run.loss,
        "training samples": f"{len(job.data.train):,}",
        "held-out samples": f"{len(job.data.val):,}" if job.data.val else "none",
        "global batch": f"{config.data.global_batch_size:,} on {job.context.ranks.size} process(es),"
        f" in {job.context.micro_batches} micro-batch(es) each",
        "steps": f"{job.steps:,} ({job.loader.steps_per_epoch:,} an epoch, {config.optim.warmup:,} of warm-up)",
        "peak learning rate": f"{config.optim.lr:g}",
        "precision": f"{config.run.precision} on {job.device}",
        "memory of weights and AdamW": f"{(4 * parameters + 12 * trained) / 2**20:,.1f} MiB",
        "memory of the per-sample state": f"{state / 2**20:,.2f} MiB",
    }


def contact_sheet(job: Job, batch: Batch) -> Image.Image:
    """The first images of a batch as the model gets them, with the captions decoded from their tokens."""
    count = min(SHOWN, len(batch))
    columns = 4
    rows = -(-count // columns)
    sheet = Image.new("RGB", (columns * (CELL + 8), rows * (CELL + 40)), "white")
    draw = ImageDraw.Draw(sheet)
    for number in range(count):
        x, y = number % columns * (CELL + 8) + 4, number // columns * (CELL + 40) + 4
        sheet.paste(_pixels(batch.images[number]), (x, y))
        lines = textwrap.wrap(job.model.decode(batch.tokens[number]), CAPTION_WIDTH)[:CAPTION_LINES]
        draw.multiline_text((x, y + CELL + 2), "\n".join(lines), fill="black", spacing=1)
    return sheet


def _pixels(image: Tensor) -> Image.Image:
    return Image.fromarray(image.permute(1, 2, 0).numpy()).resize((CELL, CELL), Image.Resampling.NEAREST)
