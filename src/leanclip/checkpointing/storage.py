"""Named tensors on disk: torch's distributed checkpointing with safetensors files, which cannot hold code.

Every process writes its part of each tensor, and reads the part it needs, however many processes wrote.
"""

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY, _gen_file_name
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.futures import Future

from leanclip.distributed import local_tensor
from leanclip.errors import UserError, first_line
from leanclip.filesystem import read_json, sync
from leanclip.progress import ACTIVITY

HASHES_FILE = "hashes.json"
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip

# A single process is intended, and a writing thread cannot change the warning filters temporarily.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class DamagedError(UserError):
    """Files differ from what was written."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="checkpoint.damaged")


class Staging:
    """Copies in host memory, which a thread writes while training continues. Buffers are reused by later saves."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._mesh = None if group is None else DeviceMesh.from_group(group, "cpu")
        self._buffers: dict[str, Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocate the buffers: pinning pages takes a second for two gigabytes."""
        for name, tensor in tensors.items():
            self._buffer(name, local_tensor(tensor))

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Start copying, in the order of the GPU's work; `wait` blocks until it is done."""
        staged: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            local = local_tensor(tensor).detach()
            staged[name] = self._buffer(name, local).copy_(local, non_blocking=local.is_cuda)
            if isinstance(tensor, DTensor):
                assert self._mesh is not None
                layout = {"shape": tensor.shape, "stride": tensor.stride()}
                staged[name] = DTensor.from_local(
                    staged[name], self._mesh, tensor.placements, run_check=False, **layout
                )
        if any(tensor.is_cuda for tensor in tensors.values()):
            self._copied = torch.cuda.Event()
            self._copied.record()
        return staged

    def wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != like.shape or buffer.dtype != like.dtype:
            try:
                buffer = torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
            except RuntimeError:  # above the system's limit for pinned memory
                buffer = torch.empty(like.shape, dtype=like.dtype)
            self._buffers[name] = buffer
        return buffer


class _Writer(HuggingFaceStorageWriter):
    """Replaces torch's, which joins all tensors into one byte string first while it blocks all other threads."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        result: Future[list[WriteResult]] = Future()
        name = _gen_file_name(1, 1, plan.storage_data["shard_index"])
        tensors: dict[str, Tensor] = {}
        offsets: dict[str, dict[str, list[int]]] = {}
        written = []
        for item in plan.items:
            tensor, part = planner.resolve_data(item), item.tensor_data
            assert isinstance(tensor, Tensor) and part is not None
            tensors[item.index.fqn] = tensor
            offsets[item.index.fqn] = {SAVED_OFFSETS_KEY: list(part.chunk.offsets)}
            written.append(WriteResult(item.index, tensor.nbytes, _StorageInfo(name, 0, tensor.nbytes)))
        if tensors:
            write_safetensors(Path(self.path) / name, tensors, {CUSTOM_METADATA_KEY: json.dumps(offsets)})
        result.set_result(written)
        return result


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file directly from the tensors' memory, without blocking other threads."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"} | dict(metadata or {})}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)


def write_tensors(directory: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """A collective call: each process writes its parts to one file."""
    writer = _Writer(str(directory), save_distributed=True)
    save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)


@dataclass(frozen=True)
class StoredTensors:
    directory: Path
    shapes: Mapping[str, torch.Size]
    dtypes: Mapping[str, torch.dtype]

    @classmethod
    def open(cls, directory: Path) -> "StoredTensors":
        try:
            metadata = HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
        except Exception as error:  # other files make the reader raise many kinds
            raise DamagedError(f"{directory} holds no tensors of a run ({first_line(error)})") from error
        entries = {name: entry for name, entry in metadata.items() if isinstance(entry, TensorStorageMetadata)}
        return cls(
            directory,
            {name: entry.size for name, entry in entries.items()},
            {name: entry.properties.dtype for name, entry in entries.items()},
        )

    def read_into(self, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
        """Fill tensors, or this process's parts of them. With a group, a collective call."""
        reader = HuggingFaceStorageReader(str(self.directory))
        try:
            with torch.no_grad():
                load(dict(tensors), storage_reader=reader, process_group=group, no_dist=group is None)
        except CheckpointException as error:  # a BaseException
            raise DamagedError(f"{self.directory} cannot be read ({first_reason(error)})") from error

    def read(self, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Full tensors, read by this process alone."""
        names = list(self.shapes) if names is None else names
        tensors = {name: torch.empty(self.shapes[name], dtype=self.dtypes[name]) for name in names}
        self.read_into(tensors, None)
        return tensors


def write_hashes(directory: Path, unlisted: Sequence[str] = ()) -> None:
    """Write the hashes of a directory's files, and flush everything to the disk."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file() and path.name not in unlisted)
    files = {path.relative_to(directory).as_posix(): {"sha256": _hash(path)} for path in paths}
    (directory / HASHES_FILE).write_text(json.dumps({"files": files}, indent=1))
    for path in (*directory.rglob("*"), directory):
        sync(path)


def verify(directory: Path) -> None:
    """Raise unless every listed file has its hash and the directories of tensors hold no other file."""
    try:
        listed = read_json(directory / HASHES_FILE)["files"]
        expected: dict[str, Any] = {str(name): entry["sha256"] for name, entry in listed.items()}
    except (UserError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{directory} is incomplete: its {HASHES_FILE} is missing or unreadable") from error
    try:
        _compare(directory, expected)
    except (OSError, ValueError) as error:  # invalid file names, disk errors
        raise DamagedError(f"{directory} cannot be read ({first_reason(error)})") from error


def _compare(directory: Path, expected: Mapping[str, Any]) -> None:
    for name in expected:
        if ".." in Path(name).parts or Path(name).is_absolute():
            raise DamagedError(f"{directory} is damaged: it lists {name[:80]}, which lies outside")
    folders = {Path(name).parent for name in expected} - {Path()}
    present = {
        path.relative_to(directory).as_posix() for folder in folders for path in (directory / folder).glob("*")
    }
    if extra := sorted(present - set(expected)):
        raise DamagedError(f"{directory} is damaged: {extra[0]} is not in its {HASHES_FILE}")
    for name, digest in expected.items():
        path = directory / name
        if path.is_symlink() or not path.is_file():
            raise DamagedError(f"{directory} is damaged: {name} is missing")
        if _hash(path) != digest:
            raise DamagedError(f"{directory} is damaged: {name} has changed since it was written")


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while part := file.read(1 << 22):
            digest.update(part)
            ACTIVITY.still_working()
    return digest.hexdigest()


def first_reason(error: BaseException) -> str:
    """One line; for torch's checkpointing, which collects the failures of all processes, the first one."""
    return first_line(error.failures[min(error.failures)][0] if isinstance(error, CheckpointException) else error)
