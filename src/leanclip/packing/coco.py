"""COCO captions, a JSON of images and annotations, as a source to pack."""

import json
from pathlib import Path

from leanclip.data.file_source import Packable, file_identity, read_image, refuse_outside, whole_captions
from leanclip.data.source import BrokenSample
from leanclip.errors import UserError, first_line


class Coco(Packable):
    """The images of the file in its order, each with all its captions."""

    def __init__(self, path: str | Path, *, images: str | Path | None = None) -> None:
        """Without `images`, they are looked for beside the JSON and where COCO's own archives unpack to."""
        self.path = Path(path)
        if not self.path.is_file():
            raise UserError(f"no such file: {self.path}")
        try:
            content = json.loads(self.path.read_bytes())
            entries = [(image["id"], str(image["file_name"])) for image in content["images"]]
            captions = [(entry["image_id"], str(entry["caption"])) for entry in content["annotations"]]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{self.path} is no COCO captions file ({first_line(error)}): expected images with id and"
                " file_name, annotations with image_id and caption"
            ) from error
        if not entries:
            raise UserError(f"{self.path} lists no images")
        self._names = [name for _, name in entries]
        self._captions: list[list[str]] = [[] for _ in entries]
        place: dict[object, int] = {}
        self._repeated: set[int] = set()
        for index, (image, _) in enumerate(entries):
            if place.setdefault(image, index) != index:
                self._repeated.add(index)
        lost = 0
        for image, caption in captions:
            if image in place:
                self._captions[place[image]].append(caption)
            else:
                lost += 1
        self.notes = (f"{lost:,} captions belong to images that the file does not list",) if lost else ()
        self.folder = self._find_images(images)

    def __len__(self) -> int:
        return len(self._names)

    def image_bytes(self, index: int) -> bytes:
        refuse_outside(self._names[index], self.name(index))
        return read_image(self.folder, self._names[index], self.name(index))

    def captions(self, index: int) -> list[str]:
        if index in self._repeated:
            raise BrokenSample("duplicate key", f"{self.name(index)} has the id of an earlier image")
        return whole_captions(self._captions[index], self.name(index))

    def name(self, index: int) -> str:
        return f"{self._names[index]} of {self.path}"

    def identity(self) -> str:
        return f"{file_identity(self.path)} {self.folder.resolve()}"

    def _find_images(self, images: str | Path | None) -> Path:
        if images is not None:
            if not Path(images).is_dir():
                raise UserError(f"no such folder: {images}")
            return Path(images)
        beside = self.path.parent
        split = self.path.stem.removeprefix("captions_")
        candidates = (beside, beside / "images", beside / split, beside.parent / split, beside.parent / "images")
        for candidate in candidates:
            if any((candidate / name).is_file() for name in self._names[:10]):
                return candidate
        raise UserError(
            f"found no images of {self.path} in {', '.join(map(str, candidates))}; say where they are with --images"
        )
