"""A checkpoint counts when every file of every host is on disk, hashed, and listed in a manifest written last."""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from llmtrain.errors import InputFileError
from llmtrain.process import write_json
from llmtrain.train.records import SCHEMA

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

MANIFEST = "manifest.json"
THREADS = 4
"""Files hashed at once; hashing leaves the interpreter's lock to others."""


def write_through(folder: Path) -> dict[str, list[Any]]:
    """Bring all files of a folder to the disk; returns relative path -> [bytes, SHA-256].

    Raises:
        OSError: the disk did not take them.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    with ThreadPoolExecutor(THREADS) as pool:
        found = dict(
            zip((str(path.relative_to(folder)) for path in paths), pool.map(_sync_and_hash, paths), strict=True)
        )
    for directory in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sync_folder(directory)
    return found


def _sync_and_hash(path: Path) -> list[Any]:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256") if hasattr(hashlib, "file_digest") else _digest(file)
        return [os.fstat(file.fileno()).st_size, digest.hexdigest()]


def _digest(file: Any) -> Any:  # Python 3.10
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest


def sync_folder(folder: Path) -> None:
    """Bring a folder's entries to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_manifest(folder: Path, step: int, hosts: Sequence[Mapping[str, Any]]) -> None:
    """Commit a checkpoint: list the files of all hosts, on each of them.

    Args:
        folder: the checkpoint on this host.
        step: its optimizer step.
        hosts: per host ``host``, ``first_rank`` and ``files`` as of ``write_through``.
    """
    write_json(folder / MANIFEST, {"schema": SCHEMA, "step": step, "hosts": list(hosts)})
    sync_folder(folder)


def examine_seal(folder: Path, first_rank: int) -> str | None:
    """What is wrong with this host's part of a checkpoint, in a few words; None if it is intact."""
    try:
        hosts = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["hosts"]
        files = {entry["first_rank"]: entry["files"] for entry in hosts}.get(first_rank)
    except FileNotFoundError:
        return f"{MANIFEST} is missing" if folder.is_dir() else "it is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is broken"
    if files is None:
        return f"no host that begins with rank {first_rank} wrote it"
    return next(filter(None, (_examine_file(folder, name, *known) for name, known in files.items())), None)


def _examine_file(folder: Path, name: str, size: int, digest: str) -> str | None:
    path = folder / name
    if not path.is_file():
        return f"{name} is missing"
    if path.stat().st_size != size:
        return f"{name} has {path.stat().st_size} of {size} bytes"
    return None if _sync_and_hash(path)[1] == digest else f"{name} is not what was written"


def examine_candidates(named: Path, first_rank: int) -> dict[str, str | None]:
    """What is wrong on this host, by name, with the named checkpoint and those before it.

    Older ones are all examined: which one every host has intact is known only when all hosts have answered.
    """
    older = [path.name for path in named.parent.glob("step-*") if path.name < named.name]
    return {name: examine_seal(named.parent / name, first_rank) for name in (named.name, *older)}


def choose_intact(named: Path, seen: Mapping[str, Mapping[str, str | None]]) -> tuple[Path, list[str]]:
    """The newest checkpoint, up to the named one, that is intact on every host; and what is wrong with newer ones.

    Args:
        named: the one that was asked for.
        seen: host -> what ``examine_candidates`` found there.

    Raises:
        InputFileError: none is.
    """
    problems: list[str] = []
    names = {name for found in seen.values() for name in found}
    for name in sorted(names, reverse=True):
        wrong = {host: found.get(name, "it is missing") for host, found in seen.items()}
        said = [f"{name} on {host}: {problem}" for host, problem in wrong.items() if problem]
        if not said:
            return named.parent / name, problems
        problems += said
    raise InputFileError(
        "training.resume: no checkpoint is intact on every host; " + "; ".join(problems),
        where=str(named),
        fix="resume on the hosts that wrote it, or start from the model's weights",
    )
