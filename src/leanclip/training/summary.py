"""What a run is about to do: a few lines that open its log, and for a dry run one augmented batch as an image."""

import contextlib
import random
import textwrap
import time
from dataclasses import asdict
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from leanclip.data import Batch, BrokenSample
from leanclip.filesystem import atomic_path, writing
from leanclip.models.tokenizer import token_count
from leanclip.models.towers.layers import tower_layers
from leanclip.runs.metrics import memory
from leanclip.runs.run_directory import RunDirectory, environment
from leanclip.training.setup import Job, parameter_rates

SHOWN, COLUMNS = 16, 4
CELL, GAP = 224, 12  # pixels
SAMPLED, SAMPLING_SECONDS, HARDLY_ANY = 300, 2.0, 0.01  # samples whose captions are read; a share of these
FONT_SIZE, CAPTION_WIDTH, CAPTION_LINES = 16, 26, 4  # pixels, characters


def summary(job: Job, directory: RunDirectory) -> list[str]:
    """The run in at most 15 lines, for its log and for --dry-run. What is not known has no line."""
    config, context, decoder = job.config, job.context, job.model.untrained_decoder
    evaluated = job.data.val is not None or job.zero_shot
    evaluation = f"evaluation {_every(config.run.eval_every, job.steps)}" if evaluated else "no evaluation"
    sampled = _sampled_captions(job)
    facts = {
        "run": f"{config.run.name}, written to {directory.path}",
        "data": _data(job, sampled),
        "captions": _captions(job, sampled),
        "held out": f"{len(job.data.val):,} samples" if job.data.val else "none",
        "model": config.model.title,
        **{f"{tower.side} tower": str(tower).partition(": ")[2] for tower in job.model.summary()},
        "decoder": f"of CoCa, {decoder:,} parameters: not trained" if decoder else "",
        "loss": _loss(job),
        "batch": f"{context.global_batch:,} on {_count(context.ranks.size, 'process')}, each in"
        f" {_count(context.micro_batches, 'micro-batch')}",
        "steps": f"{job.steps:,}, {job.loader.steps_per_epoch:,} an epoch;"
        f" {evaluation}, checkpoint {_every(config.run.save_every, job.steps)}",
        "optimizer": f"{config.optim.opt}, learning rate {_learning_rates(job)} {config.optim.lr_scheduler} after"
        f" {_count(config.optim.warmup or 0, 'step')} of warm-up, weight decay {config.optim.wd:g}",
        "device": f"{environment(job.device)['device']}, {config.run.precision}"
        + (f", {_count(torch.get_num_threads(), 'thread')}" if job.device.type == "cpu" else "")
        + (", compiled" if job.compiled else "")
        + (", resizes the images" if job.loader.resizes_on_gpu else ""),
        "expected": _expected(job),
    }
    return [f"{name + ':':<12} {fact}" for name, fact in facts.items() if fact]


def _sampled_captions(job: Job) -> list[list[str]]:
    """The captions of a few samples."""
    source, sampled = job.data.train.source, []
    ends = time.monotonic() + SAMPLING_SECONDS
    for index in random.Random(0).sample(range(len(source)), min(len(source), SAMPLED)):
        if time.monotonic() > ends:  # remote data
            break
        with contextlib.suppress(BrokenSample):
            sampled.append(source.captions(index))
    return sampled


def _data(job: Job, sampled: list[list[str]]) -> str:
    """A sample is an image with its captions."""
    train, val, counts = job.data.train, job.data.val, [len(captions) for captions in sampled]
    names, files = job.config.data.train_data or "the bundled emoji", train.source.manifest()
    mean = sum(counts) / max(1, len(counts))
    captions = _count(counts[0], "caption") if len({*counts}) == 1 else f"{mean:.1f} captions on average"
    held_out = len(val) + len(val.copies) if val and val.source is train.source else 0
    held = f", {held_out:,} held out" if held_out else ""
    visits = f", {len(train):,} visits an epoch" if len(train) != len(train.source) - held_out else ""
    within = f" in {_count(len(files), 'file')}" if files else ""
    return f"{names}: {len(train.source):,} samples{within}, each an image with {captions}{held}{visits}"


def _captions(job: Job, sampled: list[list[str]]) -> str:
    """How many of the captions the model truncates, or have several lines; empty if hardly any."""
    context = job.model.tokenizer([""]).shape[1]
    lengths = [token_count(job.model.tokenizer, caption) for captions in sampled for caption in captions]
    several_lines = sum("\n" in caption for captions in sampled for caption in captions)
    longer = sum(length > context for length in lengths)
    facts = {
        f"are longer than the {context} tokens that the model reads (up to {max(lengths, default=0)}): the rest is"
        " cut off (--force-context-length sets another)": longer,
        "have several lines, each as one caption: several captions of an image belong into a .json": several_lines,
    }
    return "; ".join(
        f"{count / len(lengths):.0%} of {len(lengths):,} sampled {fact}"
        for fact, count in facts.items()
        if count > HARDLY_ANY * len(lengths)
    )


def _loss(job: Job) -> str:
    hyper = {name: value for name, value in asdict(job.config.loss).items() if value is not None}
    values = [f"{name} {value:.3g}" if type(value) is float else f"{name} {value}" for name, value in hyper.items()]
    state = sum(buffer.numel() * buffer.element_size() for buffer in job.context.loss.buffers())
    tables = f"; per-sample tables {state / 2**20:,.1f} MiB" if state > 2**20 else ""
    return f"{job.config.run.loss} ({', '.join(values)}){tables}"


def _learning_rates(job: Job) -> str:
    """The peak rates in use, with what is trained at each; a rate alone where everything has it."""
    optim, model = job.config.optim, job.model
    rates, highest = parameter_rates(optim, model), {}
    for side in model.weights:
        layers = tower_layers(model.clip, side)
        names = {
            f"{side} tower": [name for layer in layers.trunk for name in layer],
            "projections": layers.projection,
        }
        trained = [(p, name) for p in names for name in names[p] if model.clip.get_parameter(name).requires_grad]
        for part, name in trained:
            highest[part] = max(highest.get(part, 0.0), rates.get(f"clip.{name}", optim.lr or 0.0))
    parts = {rate: [part for part in sorted(highest) if highest[part] == rate] for rate in sorted(highest.values())}
    decay = "" if optim.layer_decay == 1 else f", layer decay {optim.layer_decay:g},"
    if len(parts) == 1:
        return f"{next(iter(parts)):.3g}{decay}"
    return ", ".join(f"{rate:.3g} ({', '.join(names)})" for rate, names in parts.items()) + (decay or ",")


def _expected(job: Job) -> str:
    """From passes that were measured while the run was set up, without the optimizer and the data."""
    seconds, peak = job.seconds_per_step, job.peak_bytes
    left = job.steps - job.position.step
    hours = "" if seconds is None or not left else _duration(seconds * left)
    held = "" if peak is None else f"{peak / 2**30:,.1f} GiB"
    if job.device.type == "cpu":
        held = "".join(f"{gib:.1f} GiB or more" for gib in memory(job.device).values())
    return ", ".join(text for text in (hours, held) if text)


def _duration(seconds: float) -> str:
    minutes = seconds / 60
    if minutes >= 90:
        return f"{minutes / 60:,.1f} hours or more"
    return f"{round(minutes)} min or more" if minutes >= 1 else f"{max(1, round(seconds))} s or more"


def _every(steps: int | None, of: int) -> str:
    return f"every {steps:,} steps" if steps and steps < of else "at the end"


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith(("s", "ch")) else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def preview(job: Job, directory: RunDirectory) -> Path:
    """The image of a dry run, written beside where the run directory would be."""
    batch = next(job.loader.epoch(0))
    path = directory.path.with_name(f"{directory.path.name}.dry_run.png")
    with writing(path, code="run.not_writable", remedy="give another --logs"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path, suffix=".png") as temporary:
            contact_sheet(job, batch).save(temporary)
    return path


def contact_sheet(job: Job, batch: Batch) -> Image.Image:
    """The first images of a batch as the model gets them, with the captions decoded from their tokens."""
    count, font = min(SHOWN, len(batch)), ImageFont.load_default(FONT_SIZE)
    height = CELL + CAPTION_LINES * (FONT_SIZE + 6) + GAP
    sheet = Image.new("RGB", (COLUMNS * (CELL + GAP) + GAP, -(-count // COLUMNS) * height + GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for number in range(count):
        x, y = number % COLUMNS * (CELL + GAP) + GAP, number // COLUMNS * height + GAP
        sheet.paste(_pixels(batch.images[number]), (x, y))
        caption = job.model.decode(batch.tokens[number])
        lines = textwrap.wrap(caption, CAPTION_WIDTH, max_lines=CAPTION_LINES, placeholder=" …")
        draw.multiline_text((x, y + CELL + 4), "\n".join(lines), fill="black", font=font, spacing=4)
    return sheet


def _pixels(image: Tensor) -> Image.Image:
    return Image.fromarray(image.permute(1, 2, 0).cpu().numpy()).resize((CELL, CELL), Image.Resampling.BILINEAR)
