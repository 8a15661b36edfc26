"""Model files that others made: read, never run.

A pickle is a program. Of torch's own files only tensors and plain values are taken (`weights_only=True`, always said,
never left to a default); everything else in this project is safetensors, JSON or TOML.
"""

import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from leanclip.errors import UserError, first_line

NUMPY = (".npz", ".npy")  # big_vision's weights, which open_clip converts
# What open_clip's tokenizers take; the rest would go to transformers, which can be told to run a repository's code.
TOKENIZER_OPTIONS = frozenset(
    {"additional_special_tokens", "bpe_path", "clean", "language", "reduction_mask", "strip_sep_token"}
)
# What torch says of an archive without its end, depending on where it is cut.
SIGNS_OF_DAMAGE = ("PytorchStreamReader", "Invalid argument")
REMEDY = "get the weights as .safetensors, or as a plain state_dict from someone you trust"


def read_torch_file(path: Path, *, mapped: bool = False) -> Any:
    """What torch.save wrote, if it is tensors and plain values; anything else is refused, and not run.

    `mapped` leaves the tensors in the file, where its format allows that: for whoever copies them.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of archives that it then refuses
            mmap = mapped and zipfile.is_zipfile(path)
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # whatever a file that is something else makes torch raise
        raise UserError(_refusal(path, error)) from error


def check_weights(path: Path) -> None:
    """Refuse a file of weights that is damaged or holds anything else, before a library with more trust opens it."""
    if path.suffix in NUMPY:
        try:
            found = np.load(path, allow_pickle=False)
            if isinstance(found, np.lib.npyio.NpzFile):
                for name in found.files:
                    found[name]
        except Exception as error:  # zip, header and pickle errors alike
            raise UserError(f"{path} is refused: it is no file of plain arrays ({first_line(error)})") from error
    elif path.suffix == ".safetensors":  # which can hold nothing but tensors
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError as error:
            raise UserError(_damaged(path)) from error
    else:
        read_torch_file(path, mapped=True)


def check_architecture(config: Mapping[str, Any], name: str) -> None:
    """Refuse a model config that asks for somebody's code to be run."""
    text = config.get("text_cfg")
    options = text.get("tokenizer_kwargs") if isinstance(text, Mapping) else None
    if unknown := set(options or ()) - TOKENIZER_OPTIONS:
        raise UserError(
            f"{name} is refused: its tokenizer_kwargs hold {', '.join(sorted(unknown))}, which could let transformers"
            f" run code; allowed are {', '.join(sorted(TOKENIZER_OPTIONS))}"
        )


def without_code(error: Exception) -> str:
    """Why a library could not build a model, in a line; its advice to trust the model's code is not ours."""
    if "trust_remote_code" in str(error):
        return "its tokenizer or text tower comes with code of its own, and that is not run"
    return first_line(error)


def _refusal(path: Path, error: Exception) -> str:
    text = str(error)
    if "TorchScript" in text:
        return f"{path} is refused: it is a TorchScript archive, which is a program; {REMEDY}"
    if "legacy .tar" in text:
        return f"{path} is refused: torch's old tar format cannot be read without trusting it; {REMEDY}"
    if isinstance(error, pickle.UnpicklingError):
        found = re.search(r"GLOBAL (\S+)|(?:class|function|call) [`'<]*([\w.]+)", text)
        what = f", {next(filter(None, found.groups()))}," if found else ""
        return f"{path} is refused: it holds more than weights{what} and loading that could run code; {REMEDY}"
    if isinstance(error, EOFError) or any(sign in text for sign in SIGNS_OF_DAMAGE):
        return _damaged(path)
    return f"{path} holds no weights ({first_line(error)})"


def _damaged(path: Path) -> str:
    return f"{path} cannot be read: it is damaged or incomplete; get it again"
