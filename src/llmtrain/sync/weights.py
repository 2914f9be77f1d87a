"""Model directories before they travel: whole, and without what training never reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmtrain.spec.weights import INDEX, read_header, read_weights
from llmtrain.sync.manifest import excluded

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

LEAN = (
    "*.bin",
    "*.pt",
    "*.pth",
    "*.msgpack",
    "*.h5",
    "*.onnx",
    "*.gguf",
    ".git",
    ".gitattributes",
    ".cache",
    "global_step*",
    "optimizer*",
    "rng_state*",
    "scheduler*",
    "original",
    "*.incomplete",
)
"""``--profile lean``: duplicates of the safetensors weights, version control, leftovers of an optimizer."""

SNAPSHOTS = ("snapshots/*", "models--*/snapshots/*")
"""Where a Hugging Face cache of one model, or of all, keeps what looks like a model directory."""


def check_weights(folder: Path, exclude: Sequence[str] = ()) -> list[str]:
    """Read the headers of all weights that will travel: of a model directory, or of every snapshot of a hub's cache.

    Returns:
        What a person should know.

    Raises:
        InputFileError: a shard is missing, truncated, a git-lfs pointer or not safetensors.
    """
    if not folder.is_dir():
        if folder.suffix == ".safetensors":
            read_header(folder)
        return []
    snapshots = [place for pattern in SNAPSHOTS for place in sorted(folder.glob(pattern)) if place.is_dir()]
    return [note for place in snapshots or [folder] for note in _check_model(place, exclude)]


def _check_model(folder: Path, exclude: Sequence[str]) -> list[str]:
    shards = [path for path in sorted(folder.glob("*.safetensors")) if not excluded(path.name, exclude)]
    notes = []
    if (folder / INDEX).is_file() or (folder / "model.safetensors").is_file():
        files, _ = read_weights(folder)
        notes.append(f"{len(files)} weight files are whole: {sum(one.size_bytes for one in files) / 1e9:.2f} GB")
    for path in shards:
        read_header(path)
    pickles = [path for path in folder.glob("*.bin") if not excluded(path.name, exclude)]
    if shards and pickles:
        size = sum(path.stat().st_size for path in pickles) / 1e9
        notes.append(
            f"{len(pickles)} *.bin files ({size:.1f} GB) double the safetensors: --profile lean leaves them out"
        )
    return notes
