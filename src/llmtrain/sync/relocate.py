"""An environment rewritten for another path: what conda does when it installs, done once on the head.

Text files get the new prefix. In binary files conda keeps room for a prefix of up to 255 bytes, and its records say in
which files; the room is used. Binary files pip installed have no such room and are left as they are, and named.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

from llmtrain.errors import InputFileError

CACHE = Path("~/.cache/llmtrain/relocated")
MAX_SHEBANG = 127
"""Bytes of a first line that every Linux kernel reads (newer ones read 255)."""
PYC = ".pyc"


def relocated(prefix: Path, dest: str) -> tuple[Path, list[str]]:
    """A copy of an environment that works at ``dest``.

    Returns:
        Its folder on this machine, and what a person should know.

    Raises:
        InputFileError: the new path does not fit into some binary file.
    """
    name = hashlib.sha256(f"{prefix}\0{dest}".encode()).hexdigest()[:16]
    copy = CACHE.expanduser() / name
    if copy.exists():
        shutil.rmtree(copy)
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(prefix, copy, symlinks=True, copy_function=_link_or_copy)
    rooms = _read_rooms(prefix)
    old, new = os.fsencode(str(prefix)), os.fsencode(dest)
    texts, binaries, left = 0, 0, []
    for folder, _, names in os.walk(copy):
        for entry in [Path(folder, name) for name in [*names, *_links(Path(folder))]]:
            what = _rewrite(entry, str(entry.relative_to(copy)), old, new, rooms)
            texts += what == "text"
            binaries += what == "binary"
            if what == "left":
                left.append(str(entry.relative_to(copy)))
    notes = [f"rewritten for {dest}: {texts} text files, {binaries} binary files"]
    if left:
        notes.append(f"{len(left)} binary files name the old path and have no room for another: {left[0]}")
    return copy, notes


def _links(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir() if entry.is_symlink() and entry.is_dir()]


def _link_or_copy(source: str, target: str) -> str:
    """Unchanged files share their bytes with the original; a rewritten one is replaced, never written to."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target


def _read_rooms(prefix: Path) -> dict[str, int]:
    """Path -> bytes of the placeholder that conda replaced there."""
    rooms = {}
    for record in (prefix / "conda-meta").glob("*.json"):
        for entry in json.loads(record.read_text(encoding="utf-8")).get("paths_data", {}).get("paths", ()):
            if entry.get("file_mode") == "binary":
                rooms[entry["_path"]] = len(entry["prefix_placeholder"].encode())
    return rooms


def _rewrite(path: Path, name: str, old: bytes, new: bytes, rooms: dict[str, int]) -> str | None:
    if path.is_symlink():
        target = os.fsencode(path.readlink())
        if target == old or target.startswith(old + b"/"):
            path.unlink()
            path.symlink_to(os.fsdecode(new + target[len(old) :]))
        return None
    data = path.read_bytes()
    if old not in data:
        return None
    if name in rooms:
        _replace(path, replace_binary(data, old, new, rooms[name], name))
        return "binary"
    if b"\0" in data:
        return "left" if path.suffix != PYC else None
    _replace(path, replace_text(data, old, new))
    return "text"


def replace_text(data: bytes, old: bytes, new: bytes) -> bytes:
    """The text with the new prefix; a first line the kernel would cut goes through ``/bin/sh``. Pure."""
    data = re.sub(re.escape(old) + rb"(?![\w.-])", lambda _match: new, data)
    first, _, rest = data.partition(b"\n")
    if first.startswith(b"#!") and (len(first) > MAX_SHEBANG or b" " in new) and new in first:
        return b"#!/bin/sh\n'''exec' \"" + first[2:].strip() + b'" "$0" "$@"\n\' \'\'\'\n' + rest
    return data


def replace_binary(data: bytes, old: bytes, new: bytes, room: int, name: str) -> bytes:
    """The bytes with the new prefix in the place conda left for it; the length stays. Pure.

    Raises:
        InputFileError: the new prefix is longer than the place.
    """
    if len(new) > room:
        raise InputFileError(
            f"the new path is longer than the {room} bytes conda left for it", where=name, fix="use a shorter --dest"
        )

    pattern = re.compile(re.escape(old) + rb"([^\0]*)(?=(\0+))")
    parts, at = [], 0
    for match in pattern.finditer(data):
        parts.append(data[at : match.start()])
        size = min(room + len(match[1]) + 1, len(match[0]) + len(match[2]))
        text = new + match[1]
        if len(text) >= size:
            raise InputFileError("no room for the new path", where=name, fix="use a shorter --dest")
        parts.append(text + b"\0" * (size - len(text)))
        at = match.start() + size
    return b"".join([*parts, data[at:]])


def _replace(path: Path, data: bytes) -> None:
    info = path.stat()
    temp = path.with_name(path.name + ".llmtrain-new")
    temp.write_bytes(data)
    temp.chmod(info.st_mode & 0o7777)
    os.utime(temp, ns=(info.st_mtime_ns, info.st_mtime_ns))
    temp.replace(path)
    if path.suffix == ".py":
        for cached in (path.parent / "__pycache__").glob(f"{path.stem}.*{PYC}"):
            cached.unlink()
