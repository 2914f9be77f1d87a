"""A record with a conversation or a text, validated (standard library only: ranks read data with it too)."""

from __future__ import annotations

import difflib
from typing import Any

from llmtrain.spec.datafile import Record, RecordError, kind_of, show, show_keys

Example = dict[str, Any]
ROLES = ("system", "user", "assistant", "tool")

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


def parse_messages(record: Record) -> tuple[Example, set[str]]:
    """A conversation, and the inner keys that were not used."""
    messages = record["messages"]
    if not isinstance(messages, list):
        raise RecordError(f"messages: expected a list, found {kind_of(messages)}", _MESSAGE)
    if not messages:
        raise RecordError("messages: the list is empty", "remove the line, or give it a question and an answer")
    refuse_unsupported(record, "")
    parsed = [_parse_message(message, f"messages[{at}]") for at, message in enumerate(messages)]
    _check_turns([message["role"] for message in parsed])
    extras = {f"messages[].{key}" for message in messages for key in message if key not in ("role", "content")}
    return {"messages": parsed}, extras


def _parse_message(message: object, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise RecordError(f"{where}: expected an object, found {kind_of(message)}", _MESSAGE)
    refuse_unsupported(message, f"{where}.")
    for key in ("role", "content"):
        if key not in message:
            raise RecordError(f"{where}.{key}: missing (keys found: {show_keys(message)})", _MESSAGE)
    role = message["role"]
    if not isinstance(role, str):
        raise RecordError(f"{where}.role: expected a string, found {kind_of(role)}", f"roles are {', '.join(ROLES)}")
    if role not in ROLES:
        raise RecordError(f"{where}.role: {show(role)} is not a role", _nearest_role(role))
    return {"role": role, "content": parse_text(message["content"], f"{where}.content")}


def parse_plain_text(record: Record) -> tuple[Example, set[str]]:
    """A text."""
    return {"text": parse_text(record["text"], "text")}, set()


def parse_text(value: object, where: str) -> str:
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


def refuse_unsupported(keys: Record, prefix: str) -> None:
    """Refuse what would change what is learned."""
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
