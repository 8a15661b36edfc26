"""Images with classes: WebDataset shards with .cls files, a folder for each class, ImageNet, the bundled emoji."""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from leanclip.data import BrokenSample, Source
from leanclip.data.datasets import BUNDLED
from leanclip.data.files import FileStat, OpenFiles, expand, is_remote, stat_all
from leanclip.data.tar import IMAGE_ENDINGS, files_in, open_tar
from leanclip.errors import UserError
from leanclip.models import imagenet_classnames
from leanclip.packing.folder import IMAGE_SUFFIXES
from leanclip.progress import ACTIVITY

CLASSNAMES_FILE = "classnames.txt"
TEMPLATES_FILE = "zeroshot_classification_templates.txt"
BUNDLED_NAME = "emoji"
DESCRIBED_BY = 32
BUNDLED_NOTE = (
    f"Emoji groups, each described by {DESCRIBED_BY} of its members' names: unseen renders of known concepts."
)


@dataclass(frozen=True)
class LabelledSet:
    """A source whose every sample has one of `classnames`; `source.captions` gives its name."""

    name: str
    source: Source
    labels: np.ndarray  # (N,) int64, by the sample's id
    classnames: tuple[str, ...]
    templates: tuple[str, ...] | None = None  # the set's own, where it brings any
    descriptions: tuple[tuple[str, ...], ...] | None = None  # texts for each class, in place of its name in templates
    note: str | None = None
    left_out: int = 0  # samples without an image or without a usable label

    def __len__(self) -> int:
        return len(self.labels)


def labelled_sets(
    zero_shot: Collection[str],
    *,
    imagenet_val: str | None = None,
    imagenet_v2: str | None = None,
    bundled: bool = False,
) -> list[LabelledSet]:
    """All sets that were named, each once; a second one of the same name is numbered."""
    found = [open_labelled(given) for given in dict.fromkeys(zero_shot)]
    if imagenet_val is not None:
        found.append(open_imagenet(imagenet_val))
    if imagenet_v2 is not None:
        found.append(open_imagenet(imagenet_v2, name="imagenet-v2"))
    if bundled and BUNDLED_NAME not in zero_shot:
        found.append(bundled_groups())
    seen: Counter[str] = Counter()
    for number, each in enumerate(found):
        seen[each.name] += 1
        if seen[each.name] > 1:
            found[number] = replace(each, name=f"{each.name}-{seen[each.name]}")
    return found


def open_labelled(given: str, *, name: str | None = None) -> LabelledSet:
    """What `--zero-shot` names: shards, a folder in CLIP_benchmark's layout, a folder for each class, or `emoji`."""
    path = Path(given)
    if given == BUNDLED_NAME and not path.exists():
        return bundled_groups()
    name = name or PurePosixPath(given.rstrip("/")).name.removesuffix(".tar")
    if not path.is_dir():
        return _open_shards(given, name, ())
    if any(path.glob("*.tar")):
        return _open_shards(given, name, ())
    if (path / "test").is_dir() and any((path / "test").glob("*.tar")):
        return _open_shards(str(path / "test"), name, ())
    return _open_folder(path, name)


def open_imagenet(given: str, *, name: str = "imagenet") -> LabelledSet:
    """ImageNet's validation images: 1,000 folders named by WordNet id or by number, or shards with .cls files."""
    path = Path(given)
    names = imagenet_classnames()
    if not path.exists() or path.is_file() or any(path.glob("*.tar")):
        return _open_shards(given, name, names)
    folders = _class_folders(path)
    if len(folders) != len(names) and (path / "val").is_dir():
        path, folders = path / "val", _class_folders(path / "val")
    if all(folder.name.isdigit() for folder in folders):
        folders.sort(key=lambda folder: int(folder.name))
    known = all(re.fullmatch(r"n\d{8}|\d+", folder.name) for folder in folders)
    if not known or len(folders) != len(names):
        raise UserError(
            f"{path} holds {len(folders)} folders{'' if known else ' that are not WordNet ids'}; ImageNet's layout is"
            f" {len(names):,} of them, n01440764 to n15075141 (for other classes: --zero-shot, with a"
            f" {CLASSNAMES_FILE})"
        )
    return _of_folders(path, folders, name, names)


def bundled_groups() -> LabelledSet:
    """The bundled held-out emoji, each with the group that Unicode puts it into.

    A model trained on a thousand captions has not met the groups' names; so each is described by what is in it.
    """
    rows = [json.loads(line) for line in (BUNDLED / "meta.jsonl").read_text().splitlines()]
    groups = sorted({row["group"] for row in rows})
    members = {group: dict.fromkeys(_caption(row) for row in rows if row["group"] == group) for group in groups}
    numbers = {row["key"]: str(groups.index(row["group"])) for row in rows if row["split"] == "val"}
    files = stat_all(expand(str(BUNDLED / "val-*.tar")), "the bundled emoji")
    found = _of_shards(f"{BUNDLED_NAME} groups", files, _scan(files, numbers), tuple(groups), None)
    descriptions = tuple(_spread(tuple(members[group]), DESCRIBED_BY) for group in groups)
    return replace(found, descriptions=descriptions, note=BUNDLED_NOTE)


def _spread(texts: tuple[str, ...], count: int) -> tuple[str, ...]:
    return tuple(texts[len(texts) * number // count] for number in range(count))


def _caption(row: Mapping[str, Any]) -> str:
    return ", ".join([row["label"], *row["tags"]])


def read_lines(path: str) -> list[str]:
    """The lines of a text file, local or by URL, without those that are empty."""
    file = stat_all([path], path)[0]
    try:
        text = OpenFiles().read(file, 0, file.size).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path} as text in UTF-8 ({error})") from error
    return [line.strip() for line in text.splitlines() if line.strip()]


class _Place(NamedTuple):
    """Where an image lies in which shard."""

    file: int
    offset: int
    length: int
    key: str


class _Found(NamedTuple):
    places: list[_Place]
    labels: list[str]  # as written
    left_out: int


class _ShardImages(Source):
    """Images by position in tar files."""

    def __init__(self, files: list[FileStat], places: list[_Place], captions: list[str]) -> None:
        self.files, self.places, self.texts = files, places, captions
        self._open = OpenFiles()

    def __len__(self) -> int:
        return len(self.places)

    def image_bytes(self, index: int) -> bytes:
        place = self.places[index]
        try:
            return self._open.read(self.files[place.file], place.offset, place.length)
        except OSError as error:
            raise BrokenSample("vanished", f"cannot read {self.name(index)} ({error})") from error

    def captions(self, index: int) -> list[str]:
        return [self.texts[index]]

    def name(self, index: int) -> str:
        return f"{self.places[index].key} of {self.files[self.places[index].file].path}"


class _FolderImages(Source):
    """Images by path."""

    def __init__(self, root: Path, names: list[str], captions: list[str]) -> None:
        self.root, self.names, self.texts = root, names, captions

    def __len__(self) -> int:
        return len(self.names)

    def image_bytes(self, index: int) -> bytes:
        try:
            return (self.root / self.names[index]).read_bytes()
        except OSError as error:
            raise BrokenSample("vanished", f"cannot read {self.name(index)} ({error.strerror})") from error

    def captions(self, index: int) -> list[str]:
        return [self.texts[index]]

    def name(self, index: int) -> str:
        return str(self.root / self.names[index])


def _open_shards(given: str, name: str, classnames: Sequence[str]) -> LabelledSet:
    files = stat_all(expand(given), given)
    own = _beside(files[0], CLASSNAMES_FILE)
    if own is None and not classnames:
        raise UserError(
            f"no {CLASSNAMES_FILE} beside {files[0].path} or in the folder above: it holds the name of each class,"
            " one per line, in the order of the numbers in the .cls files"
        )
    names = tuple(read_lines(own)) if own is not None else tuple(classnames)
    templates = _beside(files[0], TEMPLATES_FILE)
    return _of_shards(name, files, _scan(files), names, None if templates is None else tuple(read_lines(templates)))


def _of_shards(
    name: str,
    files: list[FileStat],
    found: _Found,
    classnames: tuple[str, ...],
    templates: tuple[str, ...] | None,
) -> LabelledSet:
    if not found.places:
        raise UserError(
            f"no labelled images in {files[0].path}: a sample is an image ({', '.join(IMAGE_ENDINGS)}) and a .cls of"
            " one name"
        )
    numbers = {classname: number for number, classname in enumerate(classnames)}
    labels, kept = [], []
    for place, text in zip(found.places, found.labels, strict=True):
        number = int(text) if text.isdecimal() else numbers.get(text, -1)
        if number >= len(classnames):
            raise UserError(
                f"{place.key}.cls of {files[place.file].path} says class {number}, and {CLASSNAMES_FILE} has"
                f" {len(classnames)} lines, numbered from 0: is it the right one?"
            )
        if number >= 0:
            labels.append(number)
            kept.append(place)
    if not kept:
        raise UserError(f"the .cls files of {files[0].path} hold no numbers and no names of {CLASSNAMES_FILE}")
    left_out = found.left_out + len(found.places) - len(kept)
    images = _ShardImages(files, kept, [classnames[number] for number in labels])
    return LabelledSet(name, images, np.array(labels, np.int64), classnames, templates, left_out=left_out)


def _scan(files: list[FileStat], known: Mapping[str, str] | None = None) -> _Found:
    """All images with a label: that of their .cls, or one that is known by the sample's key."""
    places, labels, left_out = [], [], 0
    for number, file in enumerate(files):
        images: dict[str, _Place] = {}
        texts: dict[str, str] = dict(known or {})
        with open_tar(file) as reader:
            for name, offset, length, content in files_in(reader, contents_of=".cls"):
                directory, slash, base = name.rpartition("/")
                stem, _, ending = base.partition(".")
                if ending.lower() in IMAGE_ENDINGS:
                    images.setdefault(
                        directory + slash + stem, _Place(number, offset, length, directory + slash + stem)
                    )
                elif ending == "cls":
                    texts[directory + slash + stem] = content.decode("utf-8", "replace").strip()
        whole = [key for key in images if texts.get(key)]
        places += [images[key] for key in whole]
        labels += [texts[key] for key in whole]
        left_out += len(set(images) | set(texts) if known is None else images) - len(whole)
    return _Found(places, labels, left_out)


def _beside(file: FileStat, name: str) -> str | None:
    """A file in the folder of a shard or in the one above."""
    above = file.directory.rpartition("/")[0] if is_remote(file.path) else str(Path(file.directory).parent)
    for directory in (file.directory, above):
        candidate = f"{directory}/{name}"
        if is_remote(candidate):
            try:
                stat_all([candidate], candidate)
            except UserError:
                continue
            return candidate
        if Path(candidate).is_file():
            return candidate
    return None


def _open_folder(path: Path, name: str) -> LabelledSet:
    folders = _class_folders(path)
    if len(folders) < 2:
        raise UserError(
            f"{path} holds {len(folders)} folders and no *.tar: give a folder with one folder of images per class, or"
            f" tar shards with .cls files and a {CLASSNAMES_FILE}"
        )
    names = [folder.name.replace("_", " ") for folder in folders]
    if (path / CLASSNAMES_FILE).is_file():
        names = read_lines(str(path / CLASSNAMES_FILE))
        if len(names) != len(folders):
            raise UserError(
                f"{path / CLASSNAMES_FILE} has {len(names)} lines for {len(folders)} folders; give one line per"
                " folder, in the order of the folders' names"
            )
    return _of_folders(path, folders, name, names)


def _of_folders(path: Path, folders: list[Path], name: str, classnames: Sequence[str]) -> LabelledSet:
    names: list[str] = []
    labels: list[int] = []
    for number, folder in enumerate(folders):
        below = [str(file.relative_to(path)) for file in sorted(_images_below(folder))]
        names += below
        labels += [number] * len(below)
        ACTIVITY.still_working()
    if not names:
        raise UserError(f"no images in the folders of {path}: looked for {', '.join(IMAGE_SUFFIXES)}")
    templates = path / TEMPLATES_FILE
    return LabelledSet(
        name,
        _FolderImages(path, names, [classnames[number] for number in labels]),
        np.array(labels, np.int64),
        tuple(classnames),
        tuple(read_lines(str(templates))) if templates.is_file() else None,
    )


def _class_folders(path: Path) -> list[Path]:
    return sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _images_below(folder: Path) -> Iterable[Path]:
    return (file for file in folder.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES and file.is_file())
