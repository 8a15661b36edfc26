"""Model files from other people: read, never executed.

A pickle is a program. Of torch's files only tensors and plain values are read (`weights_only=True`, always given
explicitly); everything else in this project is safetensors, JSON or TOML.
"""

import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from leanclip.errors import UserError, first_line

# The arguments of open_clip's own tokenizers; all others are passed to transformers, some of which make it run code.
TOKENIZER_OPTIONS = frozenset(
    {"additional_special_tokens", "bpe_path", "clean", "language", "reduction_mask", "strip_sep_token"}
)
DAMAGED = ("PytorchStreamReader", "Invalid argument")  # torch's messages about a truncated archive
REMEDY = "get the weights as .safetensors, or as a plain state_dict from someone you trust"


def read_torch_file(path: Path, *, mapped: bool = False) -> Any:
    """The tensors and plain values that torch.save wrote; anything else is refused, and not executed.

    `mapped` leaves the tensors in the file, where its format allows that: for a caller that copies them.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of archives that it then refuses
            mmap = mapped and zipfile.is_zipfile(path)
            if mmap and any(e.compress_type and "/data" in e.filename for e in zipfile.ZipFile(path).infolist()):
                raise EOFError("compressed")  # torch compresses no tensor; a small file could fill the memory
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # of many types, depending on the content
        raise _refusal(path, error) from error


def check_weights(path: Path) -> None:
    """Refuse a weights file that is damaged or holds anything else, before a more trusting library opens it."""
    if path.suffix in (".npz", ".npy"):
        raise UserError(f"{path} is refused: numpy's files are not read; {REMEDY}", code="weights.unsafe")
    if path.suffix == ".safetensors":  # a format that holds tensors only
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError as error:
            raise _damaged(path) from error
    else:
        content = read_torch_file(path, mapped=True)
        weights = content.get("state_dict", content) if isinstance(content, dict) else None
        if not isinstance(weights, dict) or not any(isinstance(value, Tensor) for value in weights.values()):
            raise UserError(f"{path} holds no weights", code="weights.not_weights")
        largest = max(value.numel() for value in weights.values() if isinstance(value, Tensor))
        if largest > path.stat().st_size:  # one number repeated, which a library might write out
            raise UserError(f"{path} is refused: a tensor has {largest:,} numbers", code="weights.unsafe")


def check_architecture(config: Mapping[str, Any], name: str) -> None:
    """Refuse a model config with options that could make transformers run code."""
    text = config.get("text_cfg")
    options = text.get("tokenizer_kwargs") if isinstance(text, Mapping) else None
    if unknown := set(options or ()) - TOKENIZER_OPTIONS:
        raise UserError(
            f"{name} is refused: its tokenizer_kwargs contain {', '.join(sorted(unknown))}, which could make"
            f" transformers run code; allowed are {', '.join(sorted(TOKENIZER_OPTIONS))}",
            code="model.unsafe",
        )


def without_code(error: Exception) -> str:
    """Why a library could not build a model, in one line, without its advice to trust the model's code."""
    if "trust_remote_code" in str(error):
        return "its tokenizer or text tower comes with code of its own, which is never run"
    return first_line(error)


def _refusal(path: Path, error: Exception) -> UserError:
    text = str(error)
    if "TorchScript" in text:
        reason = "it is a TorchScript archive, which is a program"
    elif "legacy .tar" in text:
        reason = "torch's old tar format can only be read by running it"
    elif isinstance(error, pickle.UnpicklingError):
        match = re.search(r"GLOBAL (\S+)|(?:class|function|call) [`'<]*([\w.]+)", text)
        content = next(filter(None, match.groups())) if match else ""
        reason = f"it holds more than weights, {content}, and loading that could run code"
        if not content:
            reason = "it is no file of weights that can be read without running code"
    elif isinstance(error, EOFError) or any(sign in text for sign in DAMAGED):
        return _damaged(path)
    else:
        return UserError(f"{path} holds no weights ({first_line(error)})", code="weights.not_weights")
    return UserError(f"{path} is refused: {reason}; {REMEDY}", code="weights.unsafe")


def _damaged(path: Path) -> UserError:
    return UserError(f"{path} is damaged or incomplete; download or copy it again", code="weights.damaged")
