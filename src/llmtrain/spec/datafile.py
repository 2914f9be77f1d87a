"""Data files as numbered records: which file can be read, and its bytes turned into one dict per example.

``containers`` chooses by the file's suffix, ``tables`` reads what does not lie in lines. Files are streamed, so memory
is bounded by the largest example. What the records mean is the business of ``dataset``.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from llmtrain.errors import InputFileError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Record = dict[str, Any]


class RecordError(Exception):
    """What is wrong with one record; whoever reads the file adds the line."""

    def __init__(self, error: str, fix: str | None = None) -> None:
        super().__init__(error)
        self.error = error
        self.fix = fix

    def at(self, path: Path, line: int) -> InputFileError:
        """The same fault for the user."""
        return InputFileError(self.error, where=f"{path}:{line}", fix=self.fix)


@dataclass(kw_only=True)
class Tally:
    """Bytes that went by while a file was read."""

    size: int = 0
    """Number of bytes."""
    sha256: Any = field(default_factory=hashlib.sha256)
    """A running hash of them."""

    def add(self, chunk: bytes) -> None:
        """Count one more piece."""
        self.size += len(chunk)
        self.sha256.update(chunk)


def kind_of(value: object) -> str:
    """The JSON word for a value's type."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def show(text: object) -> str:
    """A user's word, quoted, on one line and short."""
    shown = repr(text)
    return shown if len(shown) <= 40 else f"{shown[:36]}...{shown[0]}"


def show_keys(record: Record) -> str:
    """The first keys of an object, quoted."""
    shown = [show(key) for key in list(record)[:8]]
    return ", ".join(shown + ["..."] * (len(record) > 8)) or "none"


def reason_of(error: OSError | ValueError) -> str:
    """What the system says."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def read_jsonl(path: Path, limit: int, tally: Tally) -> Iterator[tuple[int, Record]]:
    """One record per non-blank line."""
    for number, line in read_lines(path, limit, tally):
        if not line.strip():
            continue
        try:
            record = _parse_json(line)
        except RecordError as error:
            raise error.at(path, number) from None
        yield number, record


def read_paragraphs(path: Path, limit: int, tally: Tally) -> Iterator[tuple[int, Record]]:
    """One record per run of non-blank lines, numbered by its first line; line ends become single newlines."""
    paragraph: list[str] = []
    start, size = 1, 0
    for number, line in read_lines(path, limit, tally):
        if line.strip():
            if not paragraph:
                start = number
                _refuse_json_lines(path, number, line)
            size += len(line)
            paragraph.append(line.rstrip("\r\n"))
            if size > limit:
                raise _too_long(limit, "put blank lines between documents").at(path, start)
        elif paragraph:
            yield start, {"text": "\n".join(paragraph)}
            paragraph, size = [], 0
    if paragraph:
        yield start, {"text": "\n".join(paragraph)}


def _refuse_json_lines(path: Path, number: int, line: str) -> None:
    """Keep JSON lines under a wrong name from being trained on as prose."""
    if line.lstrip().startswith("{"):
        try:
            _parse_json(line)
        except RecordError:
            return
        fix = f"name it {path.with_suffix('.jsonl').name}"
        raise RecordError("a JSON object in a .txt file, which would be trained on as prose", fix).at(path, number)


def read_lines(path: Path, limit: int, tally: Tally) -> Iterator[tuple[int, str]]:
    """Numbered lines of UTF-8 text, line ends included."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(limit + 1), b""), start=1):
                tally.add(line)
                try:
                    yield number, _decode_line(line, limit, first=number == 1)
                except RecordError as error:
                    raise error.at(path, number) from None
    except OSError as error:
        raise InputFileError(f"cannot read the data: {reason_of(error)}", where=str(path)) from error


def _decode_line(line: bytes, limit: int, *, first: bool) -> str:
    if first:
        _check_magic(line)
    if len(line) > limit:
        raise _too_long(limit, "put one example on each line")
    if b"\0" in line:
        raise RecordError(
            f"NUL byte at byte {line.index(0) + 1} of the line: binary data, or UTF-16 text",
            "if it is UTF-16: iconv -f UTF-16 -t UTF-8 OLD > NEW",
        )
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise RecordError(
            f"not UTF-8: byte 0x{line[error.start]:02x} at byte {error.start + 1} of the line",
            "convert it, e.g. from Latin-1: iconv -f LATIN1 -t UTF-8 OLD > NEW",
        ) from None


_MAGIC = (
    (b"\xff\xfe\0\0", "UTF-32 text", "iconv -f UTF-32 -t UTF-8 OLD > NEW"),
    (b"\xff\xfe", "UTF-16 text", "iconv -f UTF-16 -t UTF-8 OLD > NEW"),
    (b"\xfe\xff", "UTF-16 text", "iconv -f UTF-16 -t UTF-8 OLD > NEW"),
    (b"\x1f\x8b", "gzip data", "gunzip -c OLD > NEW"),
    (b"\x28\xb5\x2f\xfd", "zstd data", "zstd -dc OLD > NEW"),
    (b"PK\3\4", "a zip archive", "unpack it"),
    (b"PAR1", "a parquet file", "name it .parquet"),
)


def _check_magic(line: bytes) -> None:
    """Name a file that is something else than its suffix says."""
    if line.startswith(b"\xef\xbb\xbf"):
        raise RecordError("starts with a UTF-8 byte order mark (BOM)", "tail -c +4 OLD > NEW")
    for magic, name, fix in _MAGIC:
        if line.startswith(magic):
            raise RecordError(f"this is {name}, not UTF-8 text", fix)


def _too_long(limit: int, fix: str) -> RecordError:
    return RecordError(f"an example of more than {limit} bytes", fix)


def _parse_json(line: str) -> Record:
    """One JSON object, strictly: no duplicate keys, no NaN, no single quotes."""
    try:
        record = json.loads(line.rstrip("\r\n"), object_pairs_hook=unique_keys, parse_constant=refuse_constant)
    except json.JSONDecodeError as error:
        raise RecordError(f"not JSON: {error.msg} at column {error.pos + 1}", _json_fix(line)) from None
    except RecursionError:
        raise RecordError("not usable JSON: nested too deeply") from None
    except ValueError:
        raise RecordError("not usable JSON: a number with thousands of digits") from None
    if not isinstance(record, dict):
        raise RecordError(f"expected an object, found {kind_of(record)}", "write one JSON object ({...}) on each line")
    return record


def _json_fix(line: str) -> str:
    if line.strip() in ("{", "[", "[{"):
        return "this looks like one JSON document over many lines: write one object on each line"
    if not line.endswith("\n"):
        return "the last line has no end: was the file cut off? Copy it again, or remove that line"
    return "write each line with a JSON library (json.dumps)"


def unique_keys(pairs: list[tuple[str, Any]]) -> Record:
    """An object without duplicate keys; for JSON decoders."""
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for at, key in enumerate(keys) if key in keys[:at])
        raise RecordError(f"key {show(twice)} is there twice in one object", "keep one of them")
    return record


def refuse_constant(name: str) -> NoReturn:
    """No NaN and no Infinity; for JSON decoders."""
    raise RecordError(f"not JSON: {name} is not a JSON value", "use null or a number")
