"""leanclip data: pack a data set into shards, or check one."""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from leanclip.cli import suspects
from leanclip.cli.parse import parse
from leanclip.errors import UserError
from leanclip.filesystem import write_atomically, writing
from leanclip.progress import printable
from leanclip.worker_pool import MOST_WORKERS

if TYPE_CHECKING:  # importing torch takes seconds, and --help does not need it
    from leanclip.data.source import Packable
    from leanclip.packing.pack import PackSummary

DESCRIPTION = """usage: leanclip data pack SOURCE OUT [options]
       leanclip data check DATA [options]
       leanclip data suspects RUN [options]

  pack      write WebDataset tar shards from a CSV or TSV file, parquet files, a folder of images, or COCO captions
  check     count and measure samples, find broken ones, empty captions and duplicates
  suspects  list the pairs of a run whose caption looks wrong

Each has its own --help. Example:

  leanclip data pack cc3m.tsv shards/ --resize 256
  leanclip data check shards/
  leanclip train --train-data shards/ --val-split 0.02"""

PACK_DESCRIPTION = """Write WebDataset tar shards, OUT/00000.tar and so on, from images and captions.

SOURCE is one of:
  pairs.csv, pairs.tsv      with a header line, a column of image paths (filepath) and one of captions (title)
  data.parquet              or a folder or quoted pattern of such files: image bytes or paths, and captions
  images/                   kite.jpg with kite.txt beside it, or a list: metadata.jsonl, captions.csv, captions.txt
  captions_val2017.json     COCO captions, with the images beside it or in --images

Every image is decoded as a check and then copied unchanged; formats other than JPEG, PNG and WebP become PNG. The
same input gives the same bytes. Run the same command again to resume after an interruption.
The exit code is 1 if more than --max-broken of the samples were left out.

Example: leanclip data pack pairs.csv shards/ --caption-key text --resize 256
"""

CHECK_DESCRIPTION = """Read every sample and report on the data.

The report has counts, image sizes and formats, caption lengths in tokens, broken samples by kind, empty captions, and
exact duplicates of images and captions.

The exit code is 1 if more than --threshold of the samples are broken.

Example: leanclip data check 'shards/{00000..00331}.tar' --json check.json
         leanclip data check pairs.csv --csv-caption-key text --sample 10000
"""

MIN_PARALLEL_SAMPLES = 5000  # fewer are done before worker processes have started
MAX_DEFAULT_WORKERS = 16
NAME_WIDTH = 25  # characters

MAX_DUPLICATE_SHARE = 0.05  # of images; more of them probably have several captions each

Format = Literal["auto", "csv", "parquet", "folder", "coco", "synthetic"]


@dataclass(frozen=True, kw_only=True)
class PackCommand:
    source: str
    """A .csv, .tsv, .parquet or COCO .json file, a pattern of parquet files, or a folder."""
    out: str
    """The folder for the shards."""
    format: Format = "auto"
    """The format of SOURCE. Default: detected from its name."""
    image_key: str | None = None
    """The column of the images. Default: filepath in a CSV; image, jpg, ... in parquet."""
    caption_key: str | None = None
    """The column of the captions. Default: title in a CSV; caption, text, ... in parquet."""
    separator: str | None = None
    """The column separator of a CSV. Default: detected from the header."""
    images: str | None = None
    """The folder of the images of a COCO file. Default: searched around the file."""
    samples_per_shard: int = 10_000
    """Samples in each tar file."""
    resize: int | None = None
    """Scale down and encode again every image whose shorter side has more pixels than this."""
    quality: int = 90
    """Of the JPEG and WebP images that --resize encodes again, from 1 to 100."""
    max_broken: float = 0.01
    """The share of broken samples, which are left out and counted, before the exit code is 1."""
    workers: int | None = None
    """Processes that read and write. Default: one per core, at most 16."""


@dataclass(frozen=True, kw_only=True)
class CheckCommand:
    data: str
    """As for --train-data: tar shards (a path, a folder, a pattern), a .csv or .tsv, or synthetic:N."""
    threshold: float = 0.01
    """The share of samples that may be broken before the exit code is 1."""
    json: str | None = None
    """Also write the report to this file, as JSON."""
    sample: int | None = None
    """Check this many samples, drawn at random. Default: all."""
    model: str = "ViT-B-32"
    """The model whose tokenizer counts the tokens."""
    workers: int | None = None
    """Processes that read. Default: one per core, at most 16."""
    caption_key: str = "captions"
    """The key of the captions in the .json of a sample."""
    csv_img_key: str = "filepath"
    """The column of a .csv or .tsv that holds image paths."""
    csv_caption_key: str = "title"
    """The column that holds captions."""
    csv_separator: str | None = None
    """The column separator. Default: detected from the header."""


def run(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(DESCRIPTION)
    elif arguments[0] == "pack":
        _pack(parse(PackCommand, arguments[1:], command="data pack", description=PACK_DESCRIPTION))
    elif arguments[0] == "check":
        _check(parse(CheckCommand, arguments[1:], command="data check", description=CHECK_DESCRIPTION))
    elif arguments[0] == "suspects":
        suspects.run(arguments[1:])
    else:
        raise UserError(
            f"unknown command data {arguments[0]!r}; give data pack, data check or data suspects",
            code="data.unknown_command",
        )


def _pack(command: PackCommand) -> None:
    from leanclip.packing.pack import PackConfig, pack
    from leanclip.progress import progress_bar

    config = PackConfig(samples_per_shard=command.samples_per_shard, resize=command.resize, quality=command.quality)
    source = open_packable(command)
    workers = _workers(command.workers, len(source))
    with progress_bar("packing", len(source)) as progress:
        summary = pack(source, Path(command.out), config, workers=workers, progress=progress)
    _show_pack(command, source, summary)
    too_many = summary.broken_share > command.max_broken or not summary.samples
    _exit_if(too_many, summary.broken_share, command.max_broken, "--max-broken")


def open_packable(command: PackCommand) -> "Packable":
    """The source of a pack command, by its format or, for auto, by its name."""
    data_format = _detect_format(command.source) if command.format == "auto" else command.format
    keys: dict[str, Any] = {"image_key": command.image_key, "caption_key": command.caption_key}
    keys = {name: value for name, value in keys.items() if value is not None}
    if data_format == "csv":
        from leanclip.data.csv_table import Table

        flags = "--image-key, --caption-key, --separator"
        return Table(command.source, separator=command.separator, flags=flags, **keys)
    if data_format == "parquet":
        from leanclip.packing.parquet import Parquet

        return Parquet(command.source, **keys)
    if keys or command.separator:
        raise UserError(
            f"--image-key, --caption-key and --separator are for csv and parquet, not for {data_format}",
            code="pack.flag_of_other_format",
        )
    if data_format == "coco":
        from leanclip.packing.coco import Coco

        return Coco(command.source, images=command.images)
    if data_format == "synthetic":
        from leanclip.data.synthetic import open_synthetic

        return open_synthetic(command.source)
    from leanclip.packing.folder import Folder

    return Folder(command.source)


def _detect_format(source: str) -> Format:
    from leanclip.data.files import is_file, is_folder

    path = Path(source)
    by_suffix: dict[str, Format] = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".json": "coco"}
    if path.suffix.lower() in by_suffix:
        return by_suffix[path.suffix.lower()]
    if source.startswith("synthetic:"):
        return "synthetic"
    if is_folder(path):
        return "parquet" if any(path.glob("*.parquet")) else "folder"
    if not is_file(path):
        raise UserError(f"no such file or folder: {source}", code="data.not_found")
    raise UserError(
        f"{source} has an unsupported format; give --format csv, parquet, folder or coco if it is one of these",
        code="data.unsupported_format",
    )


def _show_pack(command: PackCommand, source: "Packable", summary: "PackSummary") -> None:
    before = f" ({summary.finished_before:,} from an earlier run)" if summary.finished_before else ""
    rows = {
        "samples": f"{summary.samples:,}",
        "shards": f"{summary.shards:,}{before}",
        "size": f"{summary.bytes / 1e6:,.1f} MB",
    }
    for kind, count in summary.skipped.items():
        rows[f"left out: {kind}"] = f"{count:,}, such as {summary.examples[kind]}"
    for number, note in enumerate(source.notes, 1):
        rows[f"note {number}"] = note
    _show(f"{command.source} -> {command.out}", rows)


def _check(command: CheckCommand) -> None:
    from leanclip.data import DataConfig, check_fields, open_source
    from leanclip.models import TokenCounter
    from leanclip.packing.check import check
    from leanclip.progress import progress_bar

    if command.sample is not None and command.sample < 1:
        raise UserError(f"--sample is {command.sample}; it must be at least 1", code="data.bad_value")
    config = DataConfig(
        caption_key=command.caption_key,
        csv_img_key=command.csv_img_key,
        csv_caption_key=command.csv_caption_key,
        csv_separator=command.csv_separator,
    )
    count_tokens = TokenCounter(command.model)
    source = open_source(command.data, config)
    check_fields(config, source)
    size = min(len(source), command.sample or len(source))
    workers = _workers(command.workers, size)
    report = {"data": command.data, "model": command.model, "threshold": command.threshold}
    with progress_bar("checking", size) as progress:
        report |= check(
            source,
            count_tokens=count_tokens,
            context_length=count_tokens.context_length,
            sample=command.sample,
            workers=workers,
            progress=progress,
        )
    if command.json is not None:
        with writing(Path(command.json), code="data.cannot_write"):
            write_atomically(Path(command.json), json.dumps(report, indent=1))
    _show_check(report)
    too_many = report["broken_share"] > command.threshold
    _exit_if(too_many, report["broken_share"], command.threshold, "--threshold")


def _show_check(report: dict[str, Any]) -> None:
    def spread(name: str, unit: str = "") -> str:
        values = report[name]
        return f"{values['min']:,} / {values['median']:,.0f} / {values['max']:,}{unit}" if values else "none"

    subset = "" if report["checked"] == report["samples"] else f", {report['checked']:,} of them checked"
    longer = f"{report['longer_than_context']:,} ({report['longer_than_context_share']:.1%})"
    rows = {
        "samples": f"{report['samples']:,}{subset}",
        "image formats": ", ".join(f"{name} {count:,}" for name, count in report["image_formats"].items()) or "none",
        "width, min / median / max": spread("image_width", " pixels"),
        "height": spread("image_height", " pixels"),
        "size": spread("image_bytes", " bytes"),
        f"larger than {report['resizing']['size']} pixels": _resizing(report["resizing"]),
        "captions": f"{report['captions']:,}",
        "captions per image": spread("captions_per_image"),
        "caption length": spread("tokens", f" tokens of {report['model']}"),
        f"longer than {report['context_length']} tokens": f"{longer}, truncated in training",
        "empty captions": f"{report['empty_captions']:,}",
    }
    if lines := report["captions_of_several_lines"]:
        rows["of several lines"] = f"{lines:,}, one caption each; several captions belong into a .json"
    for name in ("duplicate_images", "duplicate_captions"):
        example = f", such as {report[name]['examples'][0]}" if report[name]["examples"] else ""
        rows[name.replace("_", " ")] = f"{report[name]['count']:,} ({report[name]['share']:.1%}){example}"
    if report["duplicate_images"]["share"] > MAX_DUPLICATE_SHARE:
        rows["advice"] = (
            "give each image once, with all its captions: captions of one image are negatives of each other otherwise"
        )
    for kind, count in report["left_out_on_opening"].items():
        rows[f"left out: {kind}"] = f"{count:,}"
    for kind, count in report["broken"].items():
        rows[f"broken: {kind}"] = f"{count:,}, such as {report['broken_examples'][kind][0]}"
    rows["broken in all"] = f"{report['broken_share']:.2%}"
    _show(report["data"], rows)


def _resizing(scan: dict[str, Any]) -> str:
    larger = f"{scan['larger']:,} ({scan['larger_share']:.1%})"
    if not scan["encoded"]:
        return larger
    sizes = f"{scan['bytes'] / 1e6:,.1f} to {scan['bytes_resized'] / 1e6:,.1f} MB"
    return (
        f"{larger}; data pack --resize {scan['size']} takes the images from {sizes} (from {scan['encoded']:,} of"
        f" them) and the pixels to decode to {scan['pixels_left']:.0%}"
    )


def _show(title: str, rows: dict[str, str]) -> None:
    lines = [title, *(f"  {name:<{NAME_WIDTH}}  {value}" for name, value in rows.items())]
    for line in lines:  # names of files may contain anything
        print(printable(line))


def _exit_if(too_many: bool, share: float, limit: float, flag: str) -> None:
    if too_many:
        print(f"leanclip: {share:.1%} of the samples are broken, more than {flag} {limit:.1%}", file=sys.stderr)
        sys.exit(1)


def _workers(workers: int | None, samples: int) -> int:
    if workers is None:
        return 1 if samples < MIN_PARALLEL_SAMPLES else min(MAX_DEFAULT_WORKERS, os.cpu_count() or 1)
    if not 0 <= workers <= MOST_WORKERS:
        raise UserError(f"--workers is {workers}; it must be from 0 to {MOST_WORKERS}", code="data.bad_value")
    return workers
