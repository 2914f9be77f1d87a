"""Where examples come from: a file, its format, and what its columns are called there.

LLaMA-Factory keeps that in a ``dataset_info.json``; ``data.path: DIR/dataset_info.json#NAME`` names one of its entries.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.errors import InputFileError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmtrain.spec.datafile import Record

INFO = "dataset_info.json"


@dataclass(frozen=True, kw_only=True)
class Source:
    """Examples of one file."""

    path: str
    """Absolute path of the file, or of a saved Hugging Face dataset."""
    format: str = "auto"
    """Name of a format, or ``auto``."""
    rename: Mapping[str, str] = field(default_factory=dict)
    """Column as it is called there -> as the format calls it."""
    turn: Mapping[str, str] = field(default_factory=dict)
    """The same for the keys of one turn of a conversation."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """Word for a speaker there -> ShareGPT's word."""
    weight: float = 1.0
    """Passes over this file in one epoch."""

    def apply(self, record: Record) -> Record:
        """The record under the names that the format knows."""
        if not self.rename and not self.turn and not self.roles:
            return record
        renamed = {self.rename.get(key, key): value for key, value in record.items()}
        turns = renamed.get("conversations")
        if isinstance(turns, list) and (self.turn or self.roles):
            renamed["conversations"] = [self._turn(turn) for turn in turns]
        return renamed

    def _turn(self, turn: Any) -> Any:
        if not isinstance(turn, dict):
            return turn
        named = {self.turn.get(key, key): value for key, value in turn.items()}
        speaker = named.get("from")
        return {**named, "from": self.roles.get(speaker, speaker)} if isinstance(speaker, str) else named

    def to_json(self) -> dict[str, Any]:
        """As run.json holds it."""
        maps = {key: dict(getattr(self, key)) for key in ("rename", "turn", "roles")}
        return {"path": self.path, "format": self.format, "weight": self.weight, **maps}


def parse_source(values: Mapping[str, Any]) -> Source:
    """Read what :meth:`Source.to_json` wrote."""
    return Source(**values)


def resolve_source(name: str, format: str = "auto", weight: float = 1.0) -> Source:  # noqa: A002 - the user's word
    """The source a user named: a path, or an entry of a ``dataset_info.json``.

    Raises:
        InputFileError: that file or entry cannot be used.
    """
    path, mark, entry = name.rpartition("#")
    if not mark or Path(path).name != INFO:
        if Path(name).name == INFO and Path(name).is_file():
            raise InputFileError(
                "which dataset of it?", where=name, fix=f"write {name}#NAME with one of: {', '.join(_read_info(name))}"
            )
        return Source(path=name, format=format, weight=weight)
    known = _read_info(path)
    if entry not in known:
        near = difflib.get_close_matches(entry, known, n=1)
        fix = f"did you mean {near[0]}?" if near else f"it has: {', '.join(known)}"
        raise InputFileError(f"no dataset is called {entry!r}", where=path, fix=fix)
    return _from_entry(path, entry, known[entry], weight)


def _read_info(path: str) -> dict[str, Any]:
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputFileError(f"cannot be read: {error}", where=path) from None
    if not isinstance(found, dict):
        raise InputFileError("not a mapping of datasets", where=path)
    return found


_ALPACA = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "system": "system",
    "history": "history",
}
"""LLaMA-Factory's word -> the column of the format."""
_TURN = {"role_tag": "from", "content_tag": "value"}
_ROLES = {"user_tag": "human", "assistant_tag": "gpt", "system_tag": "system"}


def _from_entry(info: str, name: str, entry: Any, weight: float) -> Source:
    where = f"{info} ({name})"
    if not isinstance(entry, dict) or "file_name" not in entry:
        raise InputFileError(
            "only datasets with a file_name are read; nothing is downloaded", where=where, fix="download it first"
        )
    if entry.get("ranking") or entry.get("subset") or entry.get("images"):
        raise InputFileError("ranking data, subsets and images are not read", where=where)
    sharegpt = entry.get("formatting") == "sharegpt"
    names = {"messages": "conversations", "system": "system"} if sharegpt else _ALPACA
    columns, tags = entry.get("columns") or {}, entry.get("tags") or {}
    rename = {columns[key]: names[key] for key in columns if key in names and columns[key] != names[key]}
    return Source(
        path=str(Path(info).parent / entry["file_name"]),
        format="sharegpt" if sharegpt else "alpaca",
        rename=rename,
        turn={tags[key]: ours for key, ours in _TURN.items() if key in tags},
        roles={tags[key]: ours for key, ours in _ROLES.items() if key in tags},
        weight=weight,
    )
