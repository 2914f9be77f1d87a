"""Safetensors files by their headers: what tensors they hold, and whether the file is whole.

A file is 8 bytes (length of the header, little endian), the header (JSON: name -> dtype, shape, offsets), the data.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmtrain.errors import InputFileError
from llmtrain.spec.jsonfile import read_json

if TYPE_CHECKING:
    from pathlib import Path

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
AGAIN = "copy the file again and compare its size with the original"


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One tensor of a file."""

    dtype: str
    """As the format writes it: BF16, F16, F32, I64, ..."""
    shape: tuple[int, ...]
    """Its dimensions."""

    @property
    def numbers(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    @property
    def is_float(self) -> bool:
        """Whether these are floating-point numbers; integer tensors are buffers, not parameters."""
        return self.dtype.startswith(("F", "BF"))


@dataclass(frozen=True, kw_only=True)
class WeightFile:
    """One file of weights."""

    name: str
    """Its name in the model directory."""
    size_bytes: int
    """Its size."""


def read_weights(folder: Path) -> tuple[tuple[WeightFile, ...], dict[str, Tensor]]:
    """Read the headers of all weight files that transformers would load from a model directory.

    Returns:
        The files in order, and the tensors by name.

    Raises:
        InputFileError: no safetensors, a shard that is missing, truncated, too long or not safetensors, a tensor that
            the index promises and its shard lacks.
    """
    if (folder / SINGLE).is_file():
        names, weight_map = [SINGLE], {}
    elif (folder / INDEX).is_file():
        weight_map = _read_index(folder)
        names = sorted(set(weight_map.values()))
    else:
        raise _no_weights(folder)
    files, tensors, home = [], {}, {}
    for name in names:
        if not (folder / name).is_file():
            raise InputFileError(
                f"the index names {name}, which is missing", where=str(folder / INDEX), fix="copy the missing file"
            )
        header = read_header(folder / name)
        files.append(WeightFile(name=name, size_bytes=(folder / name).stat().st_size))
        tensors.update(header)
        home.update(dict.fromkeys(header, name))
    lost = next((tensor for tensor, name in weight_map.items() if home.get(tensor) != name), None)
    if lost is not None:
        raise InputFileError(
            f"the index promises {lost} in {weight_map[lost]}, which does not hold it",
            where=str(folder / INDEX),
            fix="copy index and weights of one and the same model version",
        )
    return tuple(files), tensors


def _no_weights(folder: Path) -> InputFileError:
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        return InputFileError(
            f"the weights are pickles ({pickles[0]}), which can run code when they are loaded",
            where=str(folder),
            fix="use the safetensors version of the model, or convert: load it once with transformers on a machine "
            "you trust and save_pretrained(DIR)",
        )
    fix = f"copy {SINGLE}, or the shards with {INDEX}, into the directory"
    if any(folder.glob("adapter_model.*")):
        fix = "this is a LoRA adapter: merge it into its base model first, or name the base model"
    return InputFileError("the model directory has no safetensors weights", where=str(folder), fix=fix)


def _read_index(folder: Path) -> dict[str, str]:
    index, _ = read_json(folder / INDEX, what="index of the weights")
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputFileError("the index has no weight_map", where=str(folder / INDEX), fix="copy the index again")
    for name in weight_map.values():
        if not isinstance(name, str) or "/" in name or name.startswith("."):
            raise InputFileError(
                f"the index names {name!r}, which is not a file of this directory",
                where=str(folder / INDEX),
                fix="copy the index again",
            )
    return weight_map


def read_header(path: Path) -> dict[str, Tensor]:
    """Read the header of one file and compare the file's size with it.

    Raises:
        InputFileError: truncated, too long, a git-lfs pointer, or not safetensors at all.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            if start == b"version ":
                raise InputFileError(
                    "the weights are a git-lfs pointer, not the weights", where=str(path), fix="git lfs pull"
                )
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= MAX_HEADER_BYTES:
                raise _not_safetensors(path)
            if 8 + length > size:
                raise _wrong_size(path, size, 8 + length)
            header = json.loads(file.read(length))
    except OSError as error:
        raise InputFileError(
            f"the weights cannot be read: {error.strerror}", where=str(path), fix=f"ls -l {path}"
        ) from None
    except ValueError:
        raise _not_safetensors(path) from None
    tensors, data_bytes = _parse_header(header, path)
    if size != 8 + length + data_bytes:
        raise _wrong_size(path, size, 8 + length + data_bytes)
    return tensors


def _not_safetensors(path: Path) -> InputFileError:
    return InputFileError("not a safetensors file", where=str(path), fix=AGAIN)


def _wrong_size(path: Path, size: int, wanted: int) -> InputFileError:
    what = "truncated" if size < wanted else "longer than its header says"
    return InputFileError(f"the weights are {what}: {size} bytes, wanted {wanted}", where=str(path), fix=AGAIN)


def _parse_header(header: Any, path: Path) -> tuple[dict[str, Tensor], int]:
    try:
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        tensors = {
            name: Tensor(dtype=str(entry["dtype"]), shape=tuple(int(size) for size in entry["shape"]))
            for name, entry in entries.items()
        }
        end = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        raise _not_safetensors(path) from None
    return tensors, end
