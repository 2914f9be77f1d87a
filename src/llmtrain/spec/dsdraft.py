"""DeepSpeed keys of two layers laid over each other, while they are being filled."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from llmtrain.errors import InputFileError
from llmtrain.spec.choice import Choice
from llmtrain.spec.dskeys import lookup

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmtrain.spec.dskeys import Where
    from llmtrain.spec.presets import Layer
    from llmtrain.spec.yamlfile import KeyPath


class Draft:
    """The merged tree while it is being filled, with the place each key came from.

    Attributes:
        tree: the keys; no nulls, numbers with an exponent are numbers.
        choices: what was put or dropped so far.
    """

    def __init__(self, preset: Layer, overrides: Layer) -> None:
        self._layers = (overrides, preset)
        self.choices: list[Choice] = []
        self.tree: dict[str, Any] = _merge(_merge({}, preset.keys, preset.where), overrides.keys, overrides.where)

    def where(self, path: KeyPath) -> str:
        """The place that wrote the value at ``path``: the upper layer's if it has one."""
        layer = next((layer for layer in self._layers if layer.has(path)), self._layers[-1])
        return layer.where(path)

    def get(self, *path: str) -> Any:
        """The value at a path, None where it is missing."""
        return lookup(self.tree, path)

    def given(self, *path: str) -> Any:
        """The value at a path, None where it is missing or "auto"."""
        value = self.get(*path)
        return None if value == "auto" else value

    def put(self, path: KeyPath, value: Any, reason: str) -> None:
        """Set a value and note why."""
        node = self.tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
        self.choices.append(Choice(key=".".join(path), value=value, reason=reason))

    def drop(self, path: KeyPath, reason: str) -> None:
        """Leave a key out and note why."""
        del lookup(self.tree, path[:-1])[path[-1]]
        self.choices.append(Choice(key=".".join(path), value=None, reason=reason))


def _merge(base: dict[str, Any], over: Mapping[str, Any], where: Where, path: KeyPath = ()) -> dict[str, Any]:
    """Lay one tree of keys over another: null removes a key, blocks are merged, all else replaces."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            result[key] = _merge(below if isinstance(below, dict) else {}, value, where, (*path, key))
        else:
            result[key] = _plain(value, where, (*path, key))
    return result


def _plain(value: Any, where: Where, path: KeyPath) -> Any:
    if isinstance(value, list):
        return [_plain(item, where, path) for item in value]
    if isinstance(value, dict):
        return _merge({}, value, where, path)
    if isinstance(value, str) and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+", value):
        # YAML 1.1 reads 1e9 as text; DeepSpeed and every other tool in this field mean a number.
        value = float(value)
        if value.is_integer():
            return int(value)
    if isinstance(value, (str, bool, int)) or value is None or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise InputFileError(
        f"{'.'.join(path)} is {value}, which JSON cannot hold", where=where(path), fix="write a number or quoted text"
    )
