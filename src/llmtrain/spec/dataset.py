"""Recognise and validate training data: on the head before any host is touched, and again on every rank.

``datafile`` turns the bytes of a file into numbered records; a format, known by the keys of the first record, turns
a record into an example. Adding a format is one entry in ``FORMATS``. Head and ranks call the same code, so they
cannot disagree about what a file holds. Standard library only, because the ranks run a staged copy of this module in
whatever environment they have.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.errors import InputFileError
from llmtrain.spec.containers import choose_container
from llmtrain.spec.datafile import Record, RecordError, Tally, show, show_keys
from llmtrain.spec.formats import FORMATS, Format, recognise
from llmtrain.spec.source import Source, resolve_source

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llmtrain.spec.messages import Example

AUTO = "auto"
MAX_EXAMPLE_BYTES = 64 << 20
MAX_IGNORED = 20  # distinct ignored keys that are remembered; a file with a new key on every line must not fill memory


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """What one pass over a data file found; its existence means that every line is valid."""

    path: str
    """The file, as it was named."""
    container: str
    """How the examples lie in the file: ``jsonl``, ``csv``, ...; ``saved`` for a saved Hugging Face dataset."""
    format: str
    """Name of the format, one of ``FORMATS``."""
    examples: int
    """Number of examples, at least 1."""
    bytes: int
    """Size of the file in bytes."""
    digest_sha256: str
    """SHA-256 of the file's bytes, in hex."""
    columns: tuple[str, ...]
    """Top-level keys that are trained on."""
    ignored: tuple[str, ...]
    """Other keys that were seen and are not used, sorted, e.g. ``id`` or ``messages[].name``; the first 20."""


_NOT_YET_RECORDS = (
    ("role", "one message a line", "put all messages of a conversation into one line, as a list under messages"),
)
"""(key, name, how to turn it into messages) of formats that people have and that are not read."""

# --- the way through a file --------------------------------------------------------------------------------------


def read_dataset(
    path: str | Path | Source,
    format: str = AUTO,  # noqa: A002 - the user's word
    *,
    max_example_bytes: int = MAX_EXAMPLE_BYTES,
) -> DataReport:
    """Read the whole file once and say what it holds.

    Args:
        path: a file with one of the endings in ``containers``, a saved dataset, or a :class:`Source`.
        format: the name of a format, or ``auto`` to go by the first record.
        max_example_bytes: a longer line or paragraph is an error, which bounds memory.

    Raises:
        InputFileError: at the first fault, with ``path:line`` and the field.
    """
    tally = Tally()
    examples, ignored, found = 0, set[str](), FORMATS[0]
    source = _source(path, format)
    for found, _, extras in _iter_parsed(source, max_example_bytes, tally):  # noqa: B007 - the last stays
        examples += 1
        if len(ignored) < MAX_IGNORED:
            ignored |= extras
    return DataReport(
        path=source.path,
        container=Path(source.path).suffix.lower().lstrip(".") or "saved",
        format=found.name,
        examples=examples,
        bytes=tally.size,
        digest_sha256=tally.sha256.hexdigest(),
        columns=found.columns,
        ignored=tuple(sorted(ignored)[:MAX_IGNORED]),
    )


def iter_examples(
    path: str | Path | Source,
    format: str = AUTO,  # noqa: A002 - the user's word
    *,
    max_example_bytes: int = MAX_EXAMPLE_BYTES,
) -> Iterator[Example]:
    """Yield each example, with the columns of its format and nothing else.

    ``messages`` gives ``{"messages": [{"role": str, "content": str}, ...]}``, ``text`` gives ``{"text": str}``.
    Arguments and errors are those of ``read_dataset``.
    """
    for _, example, _ in _iter_parsed(_source(path, format), max_example_bytes, Tally()):
        yield example


def _source(path: str | Path | Source, format: str) -> Source:  # noqa: A002 - the user's word
    return path if isinstance(path, Source) else resolve_source(str(path), format)


def _iter_parsed(source: Source, limit: int, tally: Tally) -> Iterator[tuple[Format, Example, set[str]]]:
    known, path = _find_format(source.format), Path(source.path)
    seen = False
    for number, raw in choose_container(path)(path, limit, tally):
        record = source.apply(raw)
        try:
            if known is None or not known.recognises(record):
                known = _settle_format(record, known, first=not seen)
            example, extras = known.parse(record)
        except RecordError as error:
            raise error.at(path, number) from None
        seen = True
        yield known, example, extras.union(key for key in record if key not in known.columns)
    if not seen:
        raise InputFileError(
            "the data file holds no example", where=str(path), fix="is it the right file? Did the step before fail?"
        )


def _find_format(name: str) -> Format | None:
    """The format of that name; None for ``auto``."""
    if name == AUTO:
        return None
    for known in FORMATS:
        if known.name == name:
            return known
    names = [AUTO, *(known.name for known in FORMATS)]
    near = difflib.get_close_matches(name, names, n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    raise InputFileError(
        f"data.format: {show(name)} is not a data format", fix=f"{meant}formats are {', '.join(names)}"
    )


def _settle_format(record: Record, known: Format | None, *, first: bool) -> Format:
    """The format of a first record when it was not given; otherwise why this record is not what it should be."""
    name = recognise(record)
    if name and known is None:
        return next(found for found in FORMATS if found.name == name)
    if name and known and first:
        raise RecordError(f"this is {name} data, but data.format says {known.name}", f"set data.format to {name}")
    if name and known:
        raise RecordError(f"this line is {name} data, the lines before it are {known.name}", "use one file per format")
    for key, other, fix in _NOT_YET_RECORDS:
        if key in record:
            raise RecordError(f"key {show(key)}: {other} data is not read yet", fix)
    raise _missing_field(record, [known] if known else list(FORMATS))


def _missing_field(record: Record, wanted: list[Format]) -> RecordError:
    fields = [known.columns[0] for known in wanted]
    near = [(key, field) for field in fields for key in difflib.get_close_matches(field, record, n=1)]
    samples = " or ".join(known.sample for known in wanted)
    return RecordError(
        f"no field {' or '.join(map(repr, fields))} (keys found: {show_keys(record)})",
        f"rename {show(near[0][0])} to {near[0][1]!r}" if near else f"write lines like {samples}",
    )
