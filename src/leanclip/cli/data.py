"""leanclip data: pack a data set into shards, check one."""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from leanclip.cli.parse import parse
from leanclip.errors import UserError

if TYPE_CHECKING:  # torch takes seconds to import, and --help needs none of it
    from leanclip.data.file_source import Packable
    from leanclip.packing.pack import PackSummary

DESCRIPTION = """usage: leanclip data pack SOURCE OUT [options]
       leanclip data check DATA [options]

  pack    write WebDataset tar shards from a CSV or TSV file, parquet files, a folder of images, or COCO captions
  check   count, measure, find what is broken, empty or there twice

Each has its own --help. An example of both:

  leanclip data pack cc3m.tsv shards/ --max-size 256
  leanclip data check shards/
  leanclip train --train-data shards/ --val-split 0.02"""

PACK_DESCRIPTION = """Write WebDataset tar shards, OUT/00000.tar and so on, from pictures and captions.

What SOURCE can be:
  pairs.csv, pairs.tsv      a header line, a column of image paths (filepath) and one of captions (title)
  data.parquet, a folder    of such files or a quoted pattern: image bytes, paths or Hugging Face images, and captions
  pictures/                 kite.jpg with kite.txt beside it, or a list: metadata.jsonl, captions.csv, captions.txt
  captions_val2017.json     COCO captions, the pictures beside it or in --images

Images are copied as they are, after a look whether they decode; other formats than JPEG, PNG and WebP become PNG. The
same input gives the same bytes. Stopped, it goes on where it was when the same command is given again.
The exit code is 1 if more than --max-broken of the samples had to be left out.

Example: leanclip data pack pairs.csv shards/ --caption-key text --max-size 256
"""

CHECK_DESCRIPTION = """Read every sample and say what the data hold.

Counts, image sizes and formats, caption lengths in tokens, what is broken and why, empty captions, and images and
captions that are there more than once, to the byte.

The exit code is 1 if more than --threshold of the samples are broken.

Example: leanclip data check 'shards/{00000..00331}.tar' --json check.json
         leanclip data check pairs.csv --csv-caption-key text --sample 10000
"""

FEW_SAMPLES = 5000  # done before worker processes have started

Format = Literal["auto", "csv", "parquet", "folder", "coco", "synthetic"]


@dataclass(frozen=True, kw_only=True)
class PackCommand:
    source: str
    """A .csv, .tsv, .parquet or COCO .json file, a pattern of parquet files, or a folder."""
    out: str
    """The folder that gets the shards."""
    format: Format = "auto"
    """What SOURCE is. Default: seen by its name."""
    image_key: str | None = None
    """The column of the images. Default: filepath in a CSV; image, jpg, ... in parquet."""
    caption_key: str | None = None
    """The column of the captions. Default: title in a CSV; caption, text, ... in parquet."""
    separator: str | None = None
    """What separates the columns of a CSV. Default: whichever splits its header into these columns."""
    images: str | None = None
    """The folder of the pictures that a COCO file names. Default: looked for around the file."""
    samples_per_shard: int = 10_000
    """Samples in each tar file."""
    max_size: int | None = None
    """Scale images down whose shorter side has more pixels than this, and encode them again."""
    on_broken: Literal["skip", "stop"] = "skip"
    """Leave out samples that cannot be read, and count them; or stop at the first."""
    max_broken: float = 0.01
    """The share of samples that may be left out before the exit code is 1."""
    workers: int | None = None
    """Processes that read and write. Default: one for each core, 16 at most."""


@dataclass(frozen=True, kw_only=True)
class CheckCommand:
    data: str
    """As for --train-data: tar shards (a path, a folder, a pattern), a .csv or .tsv, or synthetic:N."""
    threshold: float = 0.01
    """The share of samples that may be broken before the exit code is 1."""
    json: str | None = None
    """Also write what was found to this file."""
    sample: int | None = None
    """Look at this many samples only, drawn at random. Default: all."""
    model: str = "ViT-B-32"
    """The model whose tokenizer measures the captions."""
    workers: int | None = None
    """Processes that read. Default: one for each core, 16 at most."""
    caption_key: str = "captions"
    """Where the .json of a sample in a shard has its captions."""
    csv_img_key: str = "filepath"
    """The column of a .csv or .tsv that holds image paths."""
    csv_caption_key: str = "title"
    """The column that holds captions."""
    csv_separator: str | None = None
    """What separates the columns. Default: whichever splits the header into these columns."""


def run(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(DESCRIPTION)
        return
    if arguments[0] == "pack":
        _pack(parse(PackCommand, arguments[1:], command="data pack", description=PACK_DESCRIPTION))
    elif arguments[0] == "check":
        _check(parse(CheckCommand, arguments[1:], command="data check", description=CHECK_DESCRIPTION))
    else:
        raise UserError(f"unknown command data {arguments[0]!r}; give data pack or data check")


def _pack(command: PackCommand) -> None:
    from leanclip.packing.pack import PackConfig, pack
    from leanclip.progress import progress_bar

    try:
        config = PackConfig(
            samples_per_shard=command.samples_per_shard, max_size=command.max_size, on_broken=command.on_broken
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    source = open_packable(command)
    workers = _workers(command.workers, len(source))
    with progress_bar("packing", len(source)) as progress:
        summary = pack(source, Path(command.out), config, workers=workers, progress=progress)
    _show_pack(command, source, summary)
    if summary.broken_share > command.max_broken or not summary.samples:
        print(f"leanclip: {summary.broken_share:.1%} of the samples were left out, more than --max-broken "
              f"{command.max_broken:.1%}", file=sys.stderr)  # fmt: skip
        sys.exit(1)


def open_packable(command: PackCommand) -> "Packable":
    """The source of a pack command, by its format or, for auto, by its name."""
    kind = command.format if command.format != "auto" else _format_of(command.source)
    given = {"image_key": command.image_key, "caption_key": command.caption_key}
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if kind == "csv":
        from leanclip.data.csv_table import Table

        flags = "--image-key, --caption-key, --separator"
        return Table(command.source, separator=command.separator, flags=flags, **chosen)
    if kind == "parquet":
        from leanclip.packing.parquet import Parquet

        return Parquet(command.source, **chosen)
    if chosen or command.separator:
        raise UserError(f"--image-key, --caption-key and --separator are for csv and parquet, not for {kind}")
    if kind == "coco":
        from leanclip.packing.coco import Coco

        return Coco(command.source, images=command.images)
    if kind == "synthetic":
        from leanclip.data.synthetic import open_synthetic

        return open_synthetic(command.source)
    from leanclip.packing.folder import Folder

    return Folder(command.source)


def _format_of(source: str) -> Format:
    path = Path(source)
    by_ending: dict[str, Format] = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".json": "coco"}
    if path.suffix.lower() in by_ending:
        return by_ending[path.suffix.lower()]
    if source.startswith("synthetic:"):
        return "synthetic"
    if path.is_dir():
        return "parquet" if any(path.glob("*.parquet")) else "folder"
    if not path.exists():
        raise UserError(f"no such file or folder: {source}")
    raise UserError(f"cannot see by its name what {source} is; give --format csv, parquet, folder or coco")


def _show_pack(command: PackCommand, source: "Packable", summary: "PackSummary") -> None:
    there = f" ({summary.already_there:,} were there)" if summary.already_there else ""
    rows = {
        "samples": f"{summary.samples:,}",
        "shards": f"{summary.shards:,}{there}",
        "size": f"{summary.bytes / 1e6:,.1f} MB",
    }
    for kind, count in summary.skipped.items():
        rows[f"left out: {kind}"] = f"{count:,}, such as {summary.examples[kind]}"
    for number, note in enumerate(source.notes, 1):
        rows[f"note {number}"] = note
    _show(f"{command.source} -> {command.out}", rows)


def _check(command: CheckCommand) -> None:
    from leanclip.data import DataConfig, open_source
    from leanclip.models import TokenCounter
    from leanclip.packing.check import check
    from leanclip.progress import progress_bar

    if command.sample is not None and command.sample < 1:
        raise UserError(f"--sample is {command.sample}; it must be at least 1")
    config = DataConfig(
        caption_key=command.caption_key,
        csv_img_key=command.csv_img_key,
        csv_caption_key=command.csv_caption_key,
        csv_separator=command.csv_separator,
    )
    count_tokens = TokenCounter(command.model)
    source = open_source(command.data, config)
    size = min(len(source), command.sample or len(source))
    workers = _workers(command.workers, size)
    with progress_bar("checking", size) as progress:
        found = check(
            source,
            count_tokens=count_tokens,
            context_length=count_tokens.context_length,
            sample=command.sample,
            workers=workers,
            progress=progress,
        )
    found = {"data": command.data, "model": command.model, "threshold": command.threshold, **found}
    if command.json is not None:
        try:
            Path(command.json).write_text(json.dumps(found, indent=1), encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {command.json} ({error.strerror})") from error
    _show_check(found)
    if found["broken_share"] > command.threshold:
        print(f"leanclip: {found['broken_share']:.1%} of the samples are broken, more than --threshold "
              f"{command.threshold:.1%}", file=sys.stderr)  # fmt: skip
        sys.exit(1)


def _show_check(found: dict[str, Any]) -> None:
    def spread(name: str, unit: str = "") -> str:
        values = found[name]
        return f"{values['min']:,} / {values['median']:,.0f} / {values['max']:,}{unit}" if values else "none"

    partly = "" if found["checked"] == found["samples"] else f", {found['checked']:,} of them looked at"
    longer = f"{found['longer_than_context']:,} ({found['longer_than_context_share']:.1%})"
    rows = {
        "samples": f"{found['samples']:,}{partly}",
        "image formats": ", ".join(f"{name} {count:,}" for name, count in found["image_formats"].items()) or "none",
        "width, min / median / max": spread("image_width", " pixels"),
        "height": spread("image_height", " pixels"),
        "size": spread("image_bytes", " bytes"),
        "captions": f"{found['captions']:,}",
        "captions per image": spread("captions_per_image"),
        "caption length": spread("tokens", f" tokens of {found['model']}"),
        f"longer than {found['context_length']} tokens": f"{longer}, cut off in training",
        "empty captions": f"{found['empty_captions']:,}",
    }
    for name, title in (("duplicate_images", "images there before"), ("duplicate_captions", "captions there before")):
        first = f", such as {found[name]['examples'][0]}" if found[name]["examples"] else ""
        rows[title] = f"{found[name]['count']:,} ({found[name]['share']:.1%}){first}"
    for kind, count in found["left_out_on_opening"].items():
        rows[f"left out: {kind}"] = f"{count:,}"
    for kind, count in found["broken"].items():
        rows[f"broken: {kind}"] = f"{count:,}, such as {found['broken_examples'][kind][0]}"
    rows["broken in all"] = f"{found['broken_share']:.2%}"
    _show(found["data"], rows)


def _show(title: str, rows: dict[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), show_header=False)
    for name, value in rows.items():
        table.add_row(name, Text(value))  # what comes from the data is no markup
    console = Console(highlight=False)
    console.width = max(console.width, 110)  # wide enough where the terminal's width is unknown
    console.print(table)


def _workers(given: int | None, samples: int) -> int:
    if given is not None and given < 0:
        raise UserError(f"--workers is {given}; it must be 0 or more")
    if given is not None:
        return given
    return 1 if samples < FEW_SAMPLES else min(16, os.cpu_count() or 1)
