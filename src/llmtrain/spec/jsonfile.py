"""Strict JSON: no duplicate keys, no NaN, and the line of every key kept for error messages.

The twin of :mod:`llmtrain.spec.yamlfile`.
"""

from __future__ import annotations

import bisect
import json
import re
from typing import TYPE_CHECKING, Any, NoReturn

from llmtrain.errors import InputFileError
from llmtrain.spec.yamlfile import read_text

if TYPE_CHECKING:
    from pathlib import Path

    from llmtrain.spec.yamlfile import KeyPath

_SPACE = re.compile(r"[ \t\r\n]*")


def parse_json(text: str, *, name: str) -> tuple[Any, dict[KeyPath, int]]:
    """Parse one JSON document.

    Args:
        text: the document.
        name: what to call it in errors, usually its path.

    Returns:
        The value, and the 1-based line of every key and list item, by key path (list items as their
        index written as text).

    Raises:
        InputFileError: not JSON (comments included), a duplicate key, NaN or Infinity.
    """
    try:
        return _Reader(text, name).read()
    except json.JSONDecodeError as error:
        problem = error.msg[0].lower() + error.msg[1:]
        raise InputFileError(
            f"not valid JSON: {problem}", where=f"{name}:{error.lineno}", fix="correct the syntax at that line"
        ) from None
    except RecursionError:
        raise InputFileError("nested too deeply", where=name, fix="flatten it") from None


def read_json(path: str | Path, *, what: str = "file") -> tuple[Any, dict[KeyPath, int]]:
    """Read and parse a JSON file; see :func:`parse_json`."""
    return parse_json(read_text(path, what=what), name=str(path))


def _refuse_constant(literal: str) -> NoReturn:
    raise json.JSONDecodeError(f"the value {literal} is not part of JSON", "", 0)


class _Reader:
    """Walks objects and arrays itself to know their lines; leaves scalars to the standard decoder."""

    def __init__(self, text: str, name: str) -> None:
        self.text = text
        self.name = name
        self.lines: dict[KeyPath, int] = {}
        self._newlines = [match.start() for match in re.finditer("\n", text)]
        self._decoder = json.JSONDecoder(parse_constant=_refuse_constant)

    def read(self) -> tuple[Any, dict[KeyPath, int]]:
        value, end = self._value(self._skip(0), ())
        end = self._skip(end)
        if end != len(self.text):
            self._fail("extra data", end)
        return value, self.lines

    def _line(self, position: int) -> int:
        return bisect.bisect_left(self._newlines, position) + 1

    def _skip(self, position: int) -> int:
        match = _SPACE.match(self.text, position)
        return match.end() if match else position

    def _fail(self, message: str, position: int) -> NoReturn:
        raise json.JSONDecodeError(message, self.text, position)

    def _value(self, position: int, path: KeyPath) -> tuple[Any, int]:
        start = self.text[position : position + 1]
        if start == "{":
            return self._object(position + 1, path)
        if start == "[":
            return self._array(position + 1, path)
        try:
            return self._decoder.raw_decode(self.text, position)
        except json.JSONDecodeError as error:
            # A refused constant does not know where it stands.
            self._fail(error.msg, error.pos if error.doc else position)

    def _object(self, position: int, path: KeyPath) -> tuple[dict[str, Any], int]:
        result: dict[str, Any] = {}
        position = self._skip(position)
        if self.text[position : position + 1] == "}":
            return result, position + 1
        while True:
            key, end = self._key(position, path)
            end = self._skip(end)
            if self.text[end : end + 1] != ":":
                self._fail("expecting ':' delimiter", end)
            result[key], end = self._value(self._skip(end + 1), (*path, key))
            end = self._skip(end)
            if self.text[end : end + 1] == "}":
                return result, end + 1
            if self.text[end : end + 1] != ",":
                self._fail("expecting ',' delimiter", end)
            position = self._skip(end + 1)

    def _key(self, position: int, path: KeyPath) -> tuple[str, int]:
        if self.text[position : position + 1] != '"':
            self._fail("expecting a property name in double quotes", position)
        key, end = self._decoder.raw_decode(self.text, position)
        child = (*path, key)
        line = self._line(position)
        if child in self.lines:
            raise InputFileError(
                f"the key {'.'.join(child)} stands twice (first on line {self.lines[child]})",
                where=f"{self.name}:{line}",
                fix="keep one of the two",
            )
        self.lines[child] = line
        return key, end

    def _array(self, position: int, path: KeyPath) -> tuple[list[Any], int]:
        result: list[Any] = []
        position = self._skip(position)
        if self.text[position : position + 1] == "]":
            return result, position + 1
        while True:
            child = (*path, str(len(result)))
            self.lines[child] = self._line(position)
            item, end = self._value(position, child)
            result.append(item)
            end = self._skip(end)
            if self.text[end : end + 1] == "]":
                return result, end + 1
            if self.text[end : end + 1] != ",":
                self._fail("expecting ',' delimiter", end)
            position = self._skip(end + 1)
