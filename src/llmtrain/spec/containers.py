"""Which reader a data file needs, by what it is and by its suffix. Adding one is an entry in ``CONTAINERS``."""

from __future__ import annotations

import difflib
import stat
from typing import TYPE_CHECKING

from llmtrain.errors import InputFileError
from llmtrain.spec.datafile import Record, Tally, read_jsonl, read_paragraphs, reason_of, show
from llmtrain.spec.tables import SPLITS, STATE, read_csv, read_json, read_parquet, read_saved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

CONTAINERS: dict[str, Callable[[Path, int, Tally], Iterator[tuple[int, Record]]]] = {
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".parquet": read_parquet,
    ".txt": read_paragraphs,
}


def choose_container(path: Path) -> Callable[[Path, int, Tally], Iterator[tuple[int, Record]]]:
    """The reader for this file; everything that can be said without reading it is said here."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        fix = _near_file(path) if isinstance(error, FileNotFoundError) else None
        raise InputFileError(f"cannot open the data: {reason_of(error)}", where=str(path), fix=fix) from None
    if stat.S_ISDIR(mode):
        if (path / STATE).is_file() or (path / SPLITS).is_file():
            return read_saved
        raise InputFileError("the data path is a directory", where=str(path), fix="name one .jsonl or .txt file in it")
    if not stat.S_ISREG(mode):
        raise InputFileError(
            "the data path is not a regular file", where=str(path), fix="write it to a .jsonl file first"
        )
    suffix = path.suffix.lower()
    if suffix in CONTAINERS:
        return CONTAINERS[suffix]
    raise InputFileError(
        f"data file with the ending {show(suffix)}: cannot tell how to read it",
        where=str(path),
        fix="name it .jsonl (one JSON object a line), .txt (documents between blank lines), .json, .csv or .parquet",
    )


def _near_file(path: Path) -> str:
    """The sibling that was probably meant."""
    try:
        near = difflib.get_close_matches(path.name, [sibling.name for sibling in path.parent.iterdir()], n=1)
    except OSError:
        near = []
    return f"did you mean {path.parent / near[0]}?" if near else "data is a local file, not a name on a hub"
