"""COCO captions, a JSON of images and annotations, as a source to pack."""

from pathlib import Path
from typing import Any

from leanclip.data.files import is_file, is_folder
from leanclip.data.source import BrokenSample, Packable, file_identity, kept_fields, read_image
from leanclip.errors import UserError, first_line
from leanclip.filesystem import read_json

MAX_BYTES = 1 << 30


class Coco(Packable):
    """The images of the file in its order, each with all its captions."""

    def __init__(self, path: str | Path, *, images: str | Path | None = None) -> None:
        """Without `images`, they are searched beside the JSON and where COCO's archives unpack to."""
        self.path = Path(path)
        if not is_file(path):
            raise UserError(f"no such file: {self.path}", code="data.not_found")
        content = read_json(self.path, max_bytes=MAX_BYTES)
        try:
            entries = [(image["id"], image["file_name"]) for image in content["images"]]
            annotations = [(entry["image_id"], entry["caption"]) for entry in content["annotations"]]
            hash(tuple(key for key, _ in (*entries, *annotations)))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{self.path} is not a COCO captions file ({first_line(error)}): expected images with id and"
                " file_name, annotations with image_id and caption",
                code="pack.not_coco",
            ) from error
        if not entries:
            raise UserError(f"{self.path} lists no images", code="pack.no_images")
        self._names = [name if isinstance(name, str) else "" for _, name in entries]
        self._fields = [kept_fields(image, without=("file_name",)) for image in content["images"]]
        self._captions: list[list[object]] = [[] for _ in entries]
        indices: dict[object, int] = {}
        for index, (image_id, _) in enumerate(entries):
            indices.setdefault(image_id, index)
        self._duplicates = set(range(len(entries))) - set(indices.values())
        for image_id, caption in annotations:
            if image_id in indices:
                self._captions[indices[image_id]].append(caption)
        if unused := sum(image_id not in indices for image_id, _ in annotations):
            self.notes = (f"{unused:,} captions belong to images that the file does not list",)
        self.folder = self._find_images(images)

    def __len__(self) -> int:
        return len(self._names)

    def image_bytes(self, index: int) -> bytes:
        return read_image(self.folder, self._names[index], self.name(index))

    def raw_captions(self, index: int) -> list[object]:
        if index in self._duplicates:
            raise BrokenSample("duplicate key", f"{self.name(index)} has the id of an earlier image")
        return self._captions[index]

    def fields(self, index: int) -> dict[str, Any]:
        return self._fields[index]

    def name(self, index: int) -> str:
        return f"{self._names[index]} of {self.path}"

    def identity(self) -> str:
        return f"{file_identity(self.path)} {self.folder.resolve()}"

    def _find_images(self, images: str | Path | None) -> Path:
        if images is not None:
            if not is_folder(images):
                raise UserError(f"no such folder: {images}", code="data.not_found")
            return Path(images)
        folder = self.path.parent
        split = self.path.stem.removeprefix("captions_")
        candidates = (folder, folder / "images", folder / split, folder.parent / split, folder.parent / "images")
        for candidate in candidates:
            if any(name and is_file(candidate / name) for name in self._names[:10]):
                return candidate
        raise UserError(
            f"no images of {self.path} in {', '.join(map(str, candidates))}; give their folder with --images",
            code="pack.no_images",
        )
