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
from typing import TYPE_CHECKING, Any

from llmtrain.errors import InputFileError
from llmtrain.spec.datafile import Record, RecordError, Tally, choose_container, kind_of, show, show_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Example = dict[str, Any]

AUTO = "auto"
ROLES = ("system", "user", "assistant", "tool")
MAX_EXAMPLE_BYTES = 64 << 20
MAX_IGNORED = 20  # distinct ignored keys that are remembered; a file with a new key on every line must not fill memory


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """What one pass over a data file found; its existence means that every line is valid."""

    path: str
    """The file, as it was named."""
    container: str
    """How the examples lie in the file: ``jsonl`` or ``txt``."""
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


@dataclass(frozen=True, kw_only=True)
class Format:
    """One way to write an example as a record."""

    name: str
    """What ``data.format`` and run.json call it."""
    columns: tuple[str, ...]
    """Top-level keys it uses; the first one must be there and recognises the format."""
    sample: str
    """One short valid line, shown to the user."""
    parse: Callable[[Record], tuple[Example, set[str]]]
    """Record to (example, ignored inner keys); raises ``RecordError`` at the first fault."""

    def recognises(self, record: Record) -> bool:
        """Whether the record looks like this format (it may still be invalid)."""
        return self.columns[0] in record


# --- formats: record -> example ----------------------------------------------------------------------------------

_MESSAGE = 'each message is {"role": "user", "content": "..."}'
_ROLE_ALIASES = {
    "human": "user", "prompter": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant",
    "ai": "assistant", "chatbot": "assistant", "developer": "system", "function": "tool", "observation": "tool",
}  # fmt: skip
# Keys that change what should be learned: dropping them silently would train something else than the file says.
_UNSUPPORTED = frozenset({"tool_calls", "function_call", "weight", "train", "tools", "functions"})
_SAYS_NOTHING: tuple[object, ...] = (
    None,
    [],
    "",
    1,
)  # exporters fill such columns in every message; 1 also equals 1.0 and true


def _parse_messages(record: Record) -> tuple[Example, set[str]]:
    messages = record["messages"]
    if not isinstance(messages, list):
        raise RecordError(f"messages: expected a list, found {kind_of(messages)}", _MESSAGE)
    if not messages:
        raise RecordError("messages: the list is empty", "remove the line, or give it a question and an answer")
    _refuse_unsupported(record, "")
    parsed = [_parse_message(message, f"messages[{at}]") for at, message in enumerate(messages)]
    _check_turns([message["role"] for message in parsed])
    extras = {f"messages[].{key}" for message in messages for key in message if key not in ("role", "content")}
    return {"messages": parsed}, extras


def _parse_message(message: object, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise RecordError(f"{where}: expected an object, found {kind_of(message)}", _MESSAGE)
    _refuse_unsupported(message, f"{where}.")
    for key in ("role", "content"):
        if key not in message:
            raise RecordError(f"{where}.{key}: missing (keys found: {show_keys(message)})", _MESSAGE)
    role = message["role"]
    if not isinstance(role, str):
        raise RecordError(f"{where}.role: expected a string, found {kind_of(role)}", f"roles are {', '.join(ROLES)}")
    if role not in ROLES:
        raise RecordError(f"{where}.role: {show(role)} is not a role", _nearest_role(role))
    return {"role": role, "content": _parse_text(message["content"], f"{where}.content")}


def _parse_plain_text(record: Record) -> tuple[Example, set[str]]:
    return {"text": _parse_text(record["text"], "text")}, set()


def _parse_text(value: object, where: str) -> str:
    """A string that says something and that a tokenizer can encode."""
    if isinstance(value, list):
        raise RecordError(f"{where}: expected a string, found a list", "join its text parts into one string")
    if not isinstance(value, str):
        raise RecordError(f"{where}: expected a string, found {kind_of(value)}")
    if not value.strip():
        raise RecordError(f"{where}: empty", "fill it in, or remove this message or line")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        shown = f"\\u{ord(value[error.start]):04x}"
        raise RecordError(f"{where}: half of a surrogate pair ({shown}) at character {error.start + 1}") from None
    return value


def _check_turns(roles: list[str]) -> None:
    """The order of roles must leave something to learn and a prompt before each answer."""
    if "assistant" not in roles:
        raise RecordError("messages: no assistant message, so there is nothing to learn", "add the answer")
    first = next(at for at, role in enumerate(roles) if role != "system")
    if roles[first] != "user":
        raise RecordError(
            f"messages[{first}].role: the conversation starts with {roles[first]!r}, not with 'user'",
            "put the user message first: chat templates need a prompt before an answer",
        )
    for at in range(1, len(roles)):
        if roles[at - 1] == roles[at] == "assistant":
            raise RecordError(f"messages[{at}].role: two assistant messages in a row", "join them into one message")


def _refuse_unsupported(keys: Record, prefix: str) -> None:
    for key, value in keys.items():
        if key in _UNSUPPORTED and value not in _SAYS_NOTHING:
            raise RecordError(
                f"{prefix}{key}: not supported, and leaving it out would change what is learned",
                "write it out in the message contents, or remove it",
            )


def _nearest_role(role: str) -> str:
    word = role[:40].strip().lower()
    alias = [_ROLE_ALIASES[word]] if word in _ROLE_ALIASES else []
    near = alias or difflib.get_close_matches(word, ROLES, n=1, cutoff=0.5)
    meant = f"did you mean {near[0]!r}? " if near else ""
    return f"{meant}roles are {', '.join(ROLES)}"


FORMATS: tuple[Format, ...] = (
    Format(
        name="messages",
        columns=("messages",),
        sample='{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}',
        parse=_parse_messages,
    ),
    Format(name="text", columns=("text",), sample='{"text": "..."}', parse=_parse_plain_text),
)
"""In the order in which they are tried."""

_NOT_YET_RECORDS = (
    ("conversations", "ShareGPT", "rename conversations to messages, from to role, value to content"),
    ("instruction", "Alpaca", "make instruction and input the user message and output the assistant message"),
    ("prompt", "prompt/completion", "make prompt the user message and completion the assistant message"),
    ("role", "one message a line", "put all messages of a conversation into one line, as a list under messages"),
)
"""(key, name, how to turn it into messages) of formats that people have and that are not read yet."""


def recognise(record: Record) -> str | None:
    """Name of the first format that recognises the record, or None."""
    return next((known.name for known in FORMATS if known.recognises(record)), None)


# --- the way through a file --------------------------------------------------------------------------------------


def read_dataset(
    path: str | Path,
    format: str = AUTO,  # noqa: A002 - the user's word
    *,
    max_example_bytes: int = MAX_EXAMPLE_BYTES,
) -> DataReport:
    """Read the whole file once and say what it holds.

    Args:
        path: a ``.jsonl`` or ``.txt`` file.
        format: the name of a format, or ``auto`` to go by the first record.
        max_example_bytes: a longer line or paragraph is an error, which bounds memory.

    Raises:
        InputFileError: at the first fault, with ``path:line`` and the field.
    """
    tally = Tally()
    examples, ignored, found = 0, set[str](), FORMATS[0]
    for found, _, extras in _iter_parsed(Path(path), format, max_example_bytes, tally):  # noqa: B007 - the last stays
        examples += 1
        if len(ignored) < MAX_IGNORED:
            ignored |= extras
    return DataReport(
        path=str(path),
        container=Path(path).suffix.lower().lstrip("."),
        format=found.name,
        examples=examples,
        bytes=tally.size,
        digest_sha256=tally.sha256.hexdigest(),
        columns=found.columns,
        ignored=tuple(sorted(ignored)[:MAX_IGNORED]),
    )


def iter_examples(
    path: str | Path,
    format: str = AUTO,  # noqa: A002 - the user's word
    *,
    max_example_bytes: int = MAX_EXAMPLE_BYTES,
) -> Iterator[Example]:
    """Yield each example, with the columns of its format and nothing else.

    ``messages`` gives ``{"messages": [{"role": str, "content": str}, ...]}``, ``text`` gives ``{"text": str}``.
    Arguments and errors are those of ``read_dataset``.
    """
    for _, example, _ in _iter_parsed(Path(path), format, max_example_bytes, Tally()):
        yield example


def _iter_parsed(path: Path, wanted: str, limit: int, tally: Tally) -> Iterator[tuple[Format, Example, set[str]]]:
    known = _find_format(wanted)
    seen = False
    for number, record in choose_container(path)(path, limit, tally):
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
