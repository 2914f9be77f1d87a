"""Names like ``gpu[001-008,012]``, written out. Pure."""

from __future__ import annotations

import re

from llmtrain.errors import UsageError

MAX_HOSTS = 4096


def expand(text: str) -> tuple[str, ...]:
    """Every name a pattern stands for, in order; several patterns are separated by commas outside of brackets.

    Raises:
        UsageError: it is malformed, counts downwards, or stands for a name twice or for far too many.
    """
    names = [name for part in re.split(r",(?![^\[]*\])", text) if part.strip() for name in _expand(part.strip())]
    if not names:
        raise UsageError("no host is named", where=text, fix="write for example 'gpu[001-008]'")
    if len(set(names)) < len(names):
        twice = next(name for at, name in enumerate(names) if name in names[:at])
        raise UsageError(f"{twice} is named twice", where=text, fix="name each host once")
    return tuple(names)


def _expand(part: str) -> list[str]:
    match = re.fullmatch(r"([^\[\]]*)\[([^\[\]]*)\](.*)", part)
    if match is None:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", part):
            raise UsageError(f"{part!r} is not the name of a host", where=part, fix="write for example 'gpu[001-008]'")
        return [part]
    numbers = [number for item in match[2].split(",") for number in _numbers(item, part)]
    rests = _expand(match[3]) if "[" in match[3] else [match[3]]
    found = [f"{match[1]}{number}{rest}" for number in numbers for rest in rests]
    for name in found:
        _expand(name)
    return found


def _numbers(item: str, part: str) -> list[str]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", item.strip())
    if match is None:
        raise UsageError(f"{item!r} is neither a number nor a range", where=part, fix="write for example [001-008,012]")
    first, last = match[1], match[2] or match[1]
    count = int(last) - int(first) + 1
    if count < 1 or count > MAX_HOSTS:
        raise UsageError(
            f"the range {item} holds {max(count, 0)} hosts", where=part, fix=f"at most {MAX_HOSTS}, upwards"
        )
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
