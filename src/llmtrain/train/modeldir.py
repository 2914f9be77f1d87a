"""Model directories as we write them: complete or not there, readable by others, loadable anywhere."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from typing import TYPE_CHECKING, Any

from llmtrain.errors import InputFileError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# transformers saves in tokenizer_config.json how the tokenizer was loaded here.
_LOADING_KEYS = ("is_local", "local_files_only")


@contextlib.contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """Give a temporary folder to write a model into; it gets its name when the block ends well.

    Raises:
        InputFileError: *directory* exists.
    """
    if directory.exists():
        raise InputFileError("the output exists already", where=str(directory), fix=f"rm -r {directory}")
    partial = directory.with_name(f".{directory.name}.{os.getpid()}.partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield partial
        tidy(partial)
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def tidy(directory: Path) -> None:
    """Undo what saving leaves behind: files for their owner alone, and settings of this machine."""
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    write_pretty(path, {key: settings[key] for key in settings if key not in _LOADING_KEYS})
    mask = os.umask(0)
    os.umask(mask)
    for path in directory.iterdir():
        path.chmod(0o666 & ~mask)  # safetensors files are born with mode 600


def write_pretty(path: Path, document: dict[str, Any]) -> None:
    """Write JSON as transformers does."""
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")
