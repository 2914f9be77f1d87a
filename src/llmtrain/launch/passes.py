"""What passed a moment ago: a restart need not wait for it again.

Only passes are kept, and only of checks between hosts; a reboot, another address or another program forgets them.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain import __version__
from llmtrain.process import write_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmtrain.cluster.network import Link
    from llmtrain.cluster.probes import Facts

KEPT_S = 600.0


def cluster_key(facts: Mapping[str, Facts], links: Mapping[str, Link], more: tuple[object, ...] = ()) -> str:
    """A name for these hosts as they run now."""
    parts = [[name, item.boot_id, item.node_dir, str(links.get(name))] for name, item in facts.items()]
    text = json.dumps([__version__, parts, [str(part) for part in more]])
    return hashlib.sha256(text.encode()).hexdigest()


def read_pass(key: str, *, now: float | None = None) -> bool:
    """Whether these hosts passed within the last minutes."""
    then = _read().get(key)
    age = (time.time() if now is None else now) - then if isinstance(then, (int, float)) else KEPT_S + 1
    return 0 <= age <= KEPT_S


def write_pass(key: str, *, passed: bool, now: float | None = None) -> None:
    """Remember a pass, or forget an earlier one; a cache that cannot be written is none."""
    now = time.time() if now is None else now
    kept = {name: then for name, then in _read().items() if isinstance(then, (int, float)) and now - then <= KEPT_S}
    kept.pop(key, None)
    if passed:
        kept[key] = now
    path = _path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, kept)
    except OSError:
        return


def _path() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "llmtrain" / "passes.json"


def _read() -> dict[str, Any]:
    try:
        content = json.loads(_path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
