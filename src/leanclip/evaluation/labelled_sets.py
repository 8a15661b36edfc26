"""Images with classes: WebDataset shards with .cls files, one folder per class, ImageNet, the bundled emoji; and the
prompts of the classes, such as 'a photo of a {}.'"""

import io
import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from leanclip.data import BrokenSample, Source
from leanclip.data.datasets import BUNDLED
from leanclip.data.files import FileStat, OpenFiles, expand, is_remote, stat_all
from leanclip.data.tar import IMAGE_ENDINGS, files_in, open_tar
from leanclip.errors import UserError
from leanclip.filesystem import reading
from leanclip.models import IMAGENET_CLASSNAMES, TEMPLATES
from leanclip.packing.folder import IMAGE_SUFFIXES
from leanclip.progress import ACTIVITY

CLASSNAMES_FILE = "classnames.txt"
TEMPLATES_FILE = "zeroshot_classification_templates.txt"
BUNDLED_NAME = "emoji"
MAX_TEXT_BYTES, MAX_LINE = 16 << 20, 2000  # of a list of names or templates; a tokenizer takes long for a long line
DESCRIPTIONS = 32  # captions that describe a group of emoji
BUNDLED_NOTE = (
    f"Emoji groups, each described by {DESCRIPTIONS} of its members' names: unseen renders of known concepts."
)

Prompts = tuple[tuple[str, ...], ...]  # the texts of each class


@dataclass(frozen=True)
class LabelledSet:
    """A source in which every sample has one of `classnames`, which is also its caption."""

    name: str
    source: Source
    labels: np.ndarray  # (N,) int64, by the sample's id
    classnames: tuple[str, ...]
    templates: tuple[str, ...] | None = None  # of the set itself
    descriptions: tuple[tuple[str, ...], ...] | None = None  # texts for each class, in place of templates
    note: str | None = None
    skipped: int = 0  # samples without an image or without a usable label

    def __len__(self) -> int:
        return len(self.labels)


def labelled_sets(
    zero_shot: Collection[str],
    *,
    imagenet_val: str | None = None,
    imagenet_v2: str | None = None,
    bundled: bool = False,
    used_names: Collection[str] = (),
) -> list[LabelledSet]:
    """All sets that were named, each once, with distinct names."""
    sets = [open_labelled(name) for name in dict.fromkeys(zero_shot)]
    if imagenet_val is not None:
        sets.append(open_imagenet(imagenet_val))
    if imagenet_v2 is not None:
        sets.append(open_imagenet(imagenet_v2, name="imagenet-v2"))
    if bundled and BUNDLED_NAME not in zero_shot:
        sets.append(bundled_groups())
    names = list(used_names)
    for labelled in sets:
        names.append(unused_name(labelled.name, names))
    return [replace(labelled, name=name) for labelled, name in zip(sets, names[len(used_names) :], strict=True)]


def unused_name(name: str, used: Collection[str]) -> str:
    """The name itself, or with the first free number."""
    candidates = [name, *(f"{name}-{number}" for number in range(2, len(used) + 2))]
    return next(candidate for candidate in candidates if candidate not in used)


def set_name(path: str) -> str:
    return PurePosixPath(path.rstrip("/")).name.removesuffix(".tar")


def open_labelled(name: str) -> LabelledSet:
    """The set that `--zero-shot` names: shards, a directory in CLIP_benchmark's layout, class folders, or `emoji`."""
    if not name.strip():
        raise UserError("--zero-shot is empty; give a folder, shards or emoji", code="zero_shot.not_found")
    with reading(name):
        path = Path(name)
        if name == BUNDLED_NAME and not path.exists():
            return bundled_groups()
        if path.is_dir() and not any(path.glob("*.tar")):
            if not any(path.glob("test/*.tar")):
                return _open_folder(path, set_name(name))
            return _open_shards(str(path / "test"), set_name(name), ())
        return _open_shards(name, set_name(name), ())


def open_imagenet(directory: str, *, name: str = "imagenet") -> LabelledSet:
    """ImageNet's validation images: 1,000 folders named by WordNet id or by number, or shards with .cls files."""
    with reading(directory):
        path, names = Path(directory), IMAGENET_CLASSNAMES  # in the order of the WordNet ids
        if not path.is_dir() or any(path.glob("*.tar")):
            return _open_shards(directory, name, names)
        folders = _class_folders(path)
        if len(folders) != len(names) and (path / "val").is_dir():
            path, folders = path / "val", _class_folders(path / "val")
        if all(folder.name.isdigit() for folder in folders):
            folders.sort(key=lambda folder: int(folder.name))
        known = all(re.fullmatch(r"n\d{8}|\d+", folder.name) for folder in folders)
        if not known or len(folders) != len(names):
            raise UserError(
                f"{path} has {len(folders)} folders{'' if known else ' that are not WordNet ids'}; ImageNet's layout"
                f" is {len(names):,} of them, n01440764 to n15075141 (for other classes: --zero-shot, with a"
                f" {CLASSNAMES_FILE})",
                code="zero_shot.bad_layout",
            )
        return _of_folders(path, folders, name, names)


def bundled_groups() -> LabelledSet:
    """The bundled held-out emoji, classified by their Unicode group.

    The names of the groups do not occur in the thousand training captions, so captions describe each group.
    """
    rows = [json.loads(line) for line in (BUNDLED / "meta.jsonl").read_text().splitlines()]
    groups = sorted({row["group"] for row in rows})
    captions: dict[str, dict[str, None]] = {group: {} for group in groups}
    for row in rows:
        captions[row["group"]][", ".join([row["label"], *row["tags"]])] = None
    labels = {row["key"]: str(groups.index(row["group"])) for row in rows if row["split"] == "val"}
    files = stat_all(expand(str(BUNDLED / "val-*.tar")), "the bundled emoji")
    descriptions = tuple(_spread(list(captions[group])) for group in groups)
    labelled = _of_shards(f"{BUNDLED_NAME} groups", files, tuple(groups), labels_by_key=labels)
    return replace(labelled, descriptions=descriptions, note=BUNDLED_NOTE)


def _spread(texts: list[str]) -> tuple[str, ...]:
    return tuple(texts[len(texts) * number // DESCRIPTIONS] for number in range(DESCRIPTIONS))


def read_lines(path: str) -> list[str]:
    """The lines of a text file, local or by URL, without empty ones; at least one."""
    file = stat_all([path], path)[0]
    try:
        if file.size > MAX_TEXT_BYTES:
            raise ValueError(f"more than {MAX_TEXT_BYTES:,} bytes")
        text = OpenFiles().read(file, 0, file.size).decode("utf-8-sig")
        lines = [line.strip() for line in io.StringIO(text, newline=None) if line.strip()]
        if not lines or max(map(len, lines)) > MAX_LINE:
            raise ValueError(f"a line of more than {MAX_LINE:,} characters" if lines else "it is empty")
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path} as lines of text in UTF-8 ({error})", code="data.bad_text") from error
    return lines


class _Image(NamedTuple):
    """The position of an encoded image: in a shard, or a whole file."""

    file: FileStat
    offset: int
    length: int
    key: str  # of the sample in its shard


class _Images(Source):
    def __init__(self, images: list[_Image], captions: list[str]) -> None:
        self.images, self.texts = images, captions
        self._open = OpenFiles()

    def __len__(self) -> int:
        return len(self.images)

    def image_bytes(self, index: int) -> bytes:
        image = self.images[index]
        try:
            return self._open.read(image.file, image.offset, image.length)
        except OSError as error:
            raise BrokenSample("vanished", f"cannot read {self.name(index)} ({error})") from error

    def captions(self, index: int) -> list[str]:
        return [self.texts[index]]

    def key(self, index: int) -> str:
        return self.images[index].key or self.images[index].file.path

    def name(self, index: int) -> str:
        image = self.images[index]
        return f"{image.key} of {image.file.path}" if image.key else image.file.path


def _open_shards(pattern: str, name: str, classnames: Sequence[str]) -> LabelledSet:
    files = stat_all(expand(pattern), pattern)
    classnames = _lines_beside(files[0], CLASSNAMES_FILE) or tuple(classnames)
    if not classnames:
        raise UserError(
            f"no {CLASSNAMES_FILE} beside {files[0].path} or in the directory above: it holds the name of each class,"
            " one per line, in the order of the numbers in the .cls files",
            code="zero_shot.no_classnames",
        )
    return replace(_of_shards(name, files, classnames), templates=_lines_beside(files[0], TEMPLATES_FILE))


def _of_shards(
    name: str,
    files: list[FileStat],
    classnames: tuple[str, ...],
    *,
    labels_by_key: Mapping[str, str] | None = None,
) -> LabelledSet:
    """The images with a label: by their .cls, or by the key of the sample."""
    numbers = {classname: number for number, classname in enumerate(classnames)}
    images: list[_Image] = []
    labels: list[int] = []
    samples = 0
    for file in files:
        shard_images, texts = _scan(file)
        if labels_by_key is not None:
            texts = {key: labels_by_key[key] for key in shard_images if key in labels_by_key}
        samples += len(set(shard_images) | set(texts))
        for key in [key for key in shard_images if texts.get(key)]:
            text = texts[key]
            number = numbers.get(text, -1)
            if text.isdecimal():
                number = int(text) if len(text) < 10 else len(classnames)
            if number >= len(classnames):
                raise UserError(
                    f"{key}.cls of {file.path} holds class {text[:18]}, and {CLASSNAMES_FILE} has {len(classnames)}"
                    " lines, numbered from 0: is it the right one?",
                    code="zero_shot.bad_class",
                )
            if number >= 0:
                images.append(shard_images[key])
                labels.append(number)
    if not images:
        raise UserError(
            f"no labelled images in {files[0].path}: a sample is an image ({', '.join(IMAGE_ENDINGS)}) and a .cls of"
            f" the same name, with a number or a name of {CLASSNAMES_FILE}",
            code="zero_shot.no_images",
        )
    source = _Images(images, [classnames[number] for number in labels])
    return LabelledSet(name, source, np.array(labels, np.int64), classnames, skipped=samples - len(images))


def _scan(file: FileStat) -> tuple[dict[str, _Image], dict[str, str]]:
    """The images of a shard and the contents of its .cls files, by the key of the sample."""
    images: dict[str, _Image] = {}
    texts: dict[str, str] = {}
    with open_tar(file) as reader:
        for name, offset, length, content in files_in(reader, contents_of=".cls"):
            directory, slash, base = name.rpartition("/")
            stem, _, ending = base.partition(".")
            key = directory + slash + stem
            if ending.lower() in IMAGE_ENDINGS:
                images.setdefault(key, _Image(file, offset, length, key))
            elif ending == "cls":
                texts[key] = content.decode("utf-8", "replace").strip()
    return images, texts


def _lines_beside(file: FileStat, name: str) -> tuple[str, ...] | None:
    """The lines of a file in the directory of a shard or in the one above."""
    above = file.directory.rpartition("/")[0] if is_remote(file.path) else str(Path(file.directory).parent)
    paths = [path for path in (f"{file.directory}/{name}", f"{above}/{name}") if _exists(path)]
    return tuple(read_lines(paths[0])) if paths else None


def _exists(path: str) -> bool:
    with suppress(UserError):
        return bool(stat_all([path], path))
    return False


def _open_folder(path: Path, name: str) -> LabelledSet:
    folders = _class_folders(path)
    if len(folders) < 2:
        raise UserError(
            f"{path} has {len(folders)} folders and no *.tar: give a directory with one folder of images per class,"
            f" or tar shards with .cls files and a {CLASSNAMES_FILE}",
            code="zero_shot.bad_layout",
        )
    names = [folder.name.encode(errors="replace").decode().replace("_", " ") for folder in folders]
    if (path / CLASSNAMES_FILE).is_file():
        names = read_lines(str(path / CLASSNAMES_FILE))
        if len(names) != len(folders):
            raise UserError(
                f"{path / CLASSNAMES_FILE} has {len(names)} lines for {len(folders)} folders; give one line per"
                " folder, in the order of the folders' names",
                code="zero_shot.bad_layout",
            )
    return _of_folders(path, folders, name, names)


def _of_folders(path: Path, folders: list[Path], name: str, classnames: Sequence[str]) -> LabelledSet:
    images: list[_Image] = []
    labels: list[int] = []
    for number, folder in enumerate(folders):
        paths = sorted(file for file in folder.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES and file.is_file())
        images += [_Image(file, 0, file.size, "") for file in stat_all([str(file) for file in paths], str(folder))]
        labels += [number] * len(paths)
        ACTIVITY.still_working()
    if not images:
        raise UserError(
            f"no images in the folders of {path}: looked for {', '.join(IMAGE_SUFFIXES)}", code="zero_shot.no_images"
        )
    templates = path / TEMPLATES_FILE
    return LabelledSet(
        name,
        _Images(images, [classnames[number] for number in labels]),
        np.array(labels, np.int64),
        tuple(classnames),
        tuple(read_lines(str(templates))) if templates.is_file() else None,
    )


def _class_folders(path: Path) -> list[Path]:
    return sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def prompts_for(labelled: LabelledSet, templates: str | None = None) -> Prompts:
    """The prompts of each class: by `templates` (a name or a file), else by the templates of the set.

    A set without any gets OpenAI's templates if it has 1,000 classes, as ImageNet, else the simple ones.
    """
    if templates is None and labelled.descriptions is not None:
        return labelled.descriptions
    if templates is not None:
        chosen = load_templates(templates)
    elif labelled.templates is not None:
        chosen = _with_place(labelled.templates, f"the templates of {labelled.name}")
    else:
        chosen = TEMPLATES["openai" if len(labelled.classnames) == 1000 else "simple"]
    return tuple(
        tuple(template.replace("{}", name).replace("{c}", name) for template in chosen)
        for name in labelled.classnames
    )


def load_templates(name: str) -> tuple[str, ...]:
    if name in TEMPLATES:
        return TEMPLATES[name]
    with reading(name):
        if not Path(name).is_file():
            raise UserError(
                f"--templates {name}: no such file, and none of the sets {', '.join(TEMPLATES)}",
                code="templates.not_found",
            )
    return _with_place(read_lines(name), name)


def _with_place(lines: Sequence[str], origin: str) -> tuple[str, ...]:
    for number, line in enumerate(lines, 1):
        if "{}" not in line and "{c}" not in line:
            raise UserError(
                f"{origin}, template {number}: {line[:80]!r} has no {{}} for the name of the class",
                code="templates.bad_line",
            )
    return tuple(lines)
