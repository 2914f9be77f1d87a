"""Containers that are not read line by line: JSON documents, CSV, Parquet, saved Hugging Face datasets.

Parquet and saved datasets need pyarrow, which every rank has beside ``datasets``.
"""

from __future__ import annotations

import csv
import io
import json
from typing import TYPE_CHECKING, Any

from llmtrain.errors import InputFileError
from llmtrain.spec.datafile import (
    Record,
    RecordError,
    Tally,
    kind_of,
    read_jsonl,
    read_lines,
    refuse_constant,
    unique_keys,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

ROWS = 256
STATE = "state.json"
"""In a folder that ``Dataset.save_to_disk`` wrote."""
SPLITS = "dataset_dict.json"
"""In a folder that ``DatasetDict.save_to_disk`` wrote."""


def read_json(path: Path, limit: int, tally: Tally) -> Iterator[tuple[int, Record]]:
    """A list of objects in one document; a file of that name with one object a line is read as lines."""
    with path.open("rb") as file:
        start = file.read(4096).lstrip()
    if not start.startswith(b"["):
        yield from read_jsonl(path, limit, tally)
        return
    text = "".join(line for _, line in read_lines(path, max(limit, path.stat().st_size), tally))
    decoder = json.JSONDecoder(object_pairs_hook=unique_keys, parse_constant=refuse_constant)
    at, line = text.index("[") + 1, 1 + text.count("\n", 0, text.index("["))
    while True:
        begun = at
        at = _skip(text, at)
        line += text.count("\n", begun, at)
        if text[at : at + 1] == "]":
            return
        record, end = _decode(decoder, text, at, path, line)
        yield line, record
        line += text.count("\n", at, end)
        at = _skip(text, end)
        line += text.count("\n", end, at)
        if text[at : at + 1] not in {",", "]"}:
            raise RecordError("not JSON: expected a comma or the end of the list", "was it cut off?").at(path, line)
        at += text[at : at + 1] == ","


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _decode(decoder: json.JSONDecoder, text: str, at: int, path: Path, line: int) -> tuple[Record, int]:
    try:
        record, end = decoder.raw_decode(text, at)
    except json.JSONDecodeError as error:
        line += text.count("\n", at, error.pos)
        raise RecordError(f"not JSON: {error.msg}", "write it with a JSON library").at(path, line) from None
    except RecordError as error:
        raise error.at(path, line) from None
    except (RecursionError, ValueError):
        raise RecordError("not usable JSON").at(path, line) from None
    if not isinstance(record, dict):
        raise RecordError(f"expected an object, found {kind_of(record)}", "write a list of objects").at(path, line)
    return record, end


def read_csv(path: Path, limit: int, tally: Tally) -> Iterator[tuple[int, Record]]:
    """A table with names in its first row; quoted cells may hold line ends."""
    csv.field_size_limit(min(limit, 2**31 - 1))
    rows = csv.reader((line for _, line in read_lines(path, limit, tally)), strict=True)
    try:
        names = next(rows, [])
        if len(set(names)) < len(names):
            raise RecordError("a column name is there twice", "rename one of them").at(path, 1)
        number = rows.line_num + 1
        for row in rows:
            if len(row) not in {0, len(names)}:
                problem = f"{len(row)} cells, and {len(names)} columns are named in the first row"
                raise RecordError(problem, "quote cells that hold commas or line ends").at(path, number)
            if row:
                yield number, {name: _cell(value) for name, value in zip(names, row, strict=True)}
            number = rows.line_num + 1
    except csv.Error as error:
        raise RecordError(f"not CSV: {error}", "write it with a CSV library").at(path, rows.line_num) from None


def _cell(value: str) -> Any:
    """A cell, or the list that it holds as JSON text."""
    if value.lstrip().startswith("[{") or value.lstrip().startswith("[["):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def read_parquet(path: Path, limit: int, tally: Tally) -> Iterator[tuple[int, Record]]:
    """Rows of a Parquet file, numbered from 1."""
    del limit  # a row group is bounded by who wrote the file
    _count(path, tally)
    parquet = _import_pyarrow(path, "pyarrow.parquet")
    try:
        batches = parquet.ParquetFile(path).iter_batches(batch_size=ROWS)
        yield from _number(batches)
    except (OSError, ValueError) as error:
        raise InputFileError(f"not a Parquet file that can be read: {error}", where=str(path)) from None


def read_saved(path: Path, limit: int, tally: Tally) -> Iterator[tuple[int, Record]]:
    """Rows of a folder written by ``save_to_disk``, numbered from 1; of several splits, ``train``."""
    del limit
    if (path / SPLITS).is_file():
        splits = json.loads((path / SPLITS).read_text(encoding="utf-8"))["splits"]
        if "train" not in splits:
            fix = f"name one of its splits: {path}/{splits[0] if splits else 'NAME'}"
            raise InputFileError("a dataset of several splits without one called train", where=str(path), fix=fix)
        path /= "train"
    state = json.loads((path / STATE).read_text(encoding="utf-8"))
    files = [path / item["filename"] for item in state["_data_files"]]
    ipc = _import_pyarrow(path, "pyarrow").ipc
    batches = _saved_batches(files, ipc, tally)
    yield from _number(batches)


def _saved_batches(files: Iterable[Path], ipc: Any, tally: Tally) -> Iterator[Any]:
    for file in files:
        _count(file, tally)
        with file.open("rb") as stream:
            yield from ipc.open_stream(stream)


def _number(batches: Iterable[Any]) -> Iterator[tuple[int, Record]]:
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield number, _without_nulls(row)


def _without_nulls(value: Any) -> Any:
    """Tables have every column in every row; what a row does not have is null there, and absent in JSON."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _count(path: Path, tally: Tally) -> None:
    with path.open("rb") as file:
        while block := file.read(io.DEFAULT_BUFFER_SIZE * 16):
            tally.add(block)


def _import_pyarrow(path: Path, name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        raise InputFileError(
            "reading it needs pyarrow, which is not installed beside llmtrain",
            where=str(path),
            fix="pip install 'llmtrain[data]', or write it as .jsonl",
        ) from None
