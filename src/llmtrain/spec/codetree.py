"""The user's code as it travels: the files of a folder without what ``.gitignore`` leaves out."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from llmtrain.errors import InputFileError, UsageError
from llmtrain.spec.ignore import Rule, is_ignored, parse_rules

NEVER = frozenset(
    {".git", ".hg", ".svn", "__pycache__", ".venv", "venv", ".mypy_cache", ".ruff_cache", ".pytest_cache"}
)
"""Folders that are no code, whether somebody ignores them or not."""
MAX_BYTES = 256 << 20
MAX_FILES = 20_000


@dataclass(frozen=True, kw_only=True)
class CodeTree:
    """Files to send along with a run."""

    root: str
    """Absolute path of the folder here."""
    files: tuple[str, ...]
    """Paths relative to it, sorted; links to files are sent as the files."""
    bytes: int
    """Their size together."""

    def __str__(self) -> str:
        size = f"{self.bytes / 1024:.1f} KiB" if self.bytes < 1 << 20 else f"{self.bytes / 2**20:.1f} MiB"
        return f"{len(self.files)} files, {size}, of {self.root}"


def read_code(folder: str) -> CodeTree:
    """List the code under a folder.

    Raises:
        InputFileError: not a folder that can be read.
        UsageError: far more than code.
    """
    root = Path(folder).resolve()
    if not root.is_dir():
        raise InputFileError("the code is not a folder", where=str(root), fix="name a folder: --code DIR")
    found: list[str] = []
    size = 0
    rules: list[tuple[str, tuple[Rule, ...]]] = []
    for here, folders, names in os.walk(root, onerror=_refuse):
        base = Path(here).relative_to(root).as_posix().removeprefix(".").removeprefix("/")
        if ".gitignore" in names:
            text = (Path(here) / ".gitignore").read_text(encoding="utf-8", errors="surrogateescape")
            rules.append((base, parse_rules(text)))
        known = tuple(rules)
        join = f"{base}/" if base else ""
        folders[:] = sorted(
            name for name in folders if name not in NEVER and not is_ignored(join + name, folder=True, rules=known)
        )
        for name in names:
            full = Path(here) / name
            if not full.is_file() or is_ignored(join + name, folder=False, rules=known):
                continue
            found.append(join + name)
            size += full.stat().st_size
            if size > MAX_BYTES or len(found) > MAX_FILES:
                raise UsageError(
                    f"the code folder holds more than {MAX_BYTES >> 20} MiB or {MAX_FILES} files",
                    where=str(root),
                    fix="name a smaller one (--code DIR), or leave out the large ones in .gitignore",
                )
    return CodeTree(root=str(root), files=tuple(sorted(found)), bytes=size)


def _refuse(error: OSError) -> None:
    raise InputFileError(f"the code cannot be read: {error.strerror}", where=error.filename)
