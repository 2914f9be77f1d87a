"""Which checkpoints stay on a host: its own, and the copies it keeps of another host's (standard library only)."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

from llmtrain.train.seal import MANIFEST

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

COPIES = "copies"
"""Folder beside the checkpoints: ``copies/HOST/step-...`` is what HOST wrote of that checkpoint."""

HELD = ".held.json"
"""File beside the checkpoints in which the guardian names those that must stay."""


def make_private(checkpoints: Path) -> None:
    """Make the folder of a run's checkpoints, for its owner alone.

    Raises:
        OSError: it cannot be made.
    """
    checkpoints.mkdir(parents=True, exist_ok=True)
    checkpoints.chmod(0o700)


def place_copies(hosts: Sequence[Mapping[str, Any]], name: str) -> list[dict[str, Any]]:
    """Entries of a manifest that say where the copy of each host's files lies: with the next host. Pure.

    Args:
        hosts: the entries, in the order of ranks.
        name: the checkpoint's.
    """
    following = [*hosts[1:], *hosts[:1]]
    return [
        {**mine, "copy": {"host": other["host"], "path": f"{COPIES}/{mine['host']}/{name}"}}
        for mine, other in zip(hosts, following, strict=True)
    ]


def prune(checkpoints: Path, keep: int) -> None:
    """Remove from this host all sealed checkpoints, and copies of older ones, but the newest and those that are held.

    Held is what is being copied and what was copied last: until a newer one is whole on two hosts, only that is safe.
    """
    sealed = [path.parent for path in sorted(checkpoints.glob(f"step-*/{MANIFEST}"))]
    kept = {path.name for path in sealed[-keep:]} | _read_held(checkpoints)
    copies = [path for path in (checkpoints / COPIES).glob("*/step-*") if sealed and path.name < sealed[-1].name]
    for path in (*sealed, *copies):
        if path.name not in kept:
            shutil.rmtree(path, ignore_errors=True)


def _read_held(checkpoints: Path) -> set[str]:
    try:
        return set(json.loads((checkpoints / HELD).read_text(encoding="utf-8"))["names"])
    except (OSError, ValueError, KeyError, TypeError):
        return set()
