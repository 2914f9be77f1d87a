"""What passed a moment ago: a restart need not wait for it again.

Only passes are kept, and only that plain ssh logs in: our own login, which is never left out, sees what changes from
one minute to the next. A reboot, another list of hosts, another version of us and new ssh settings here forget them.
Reachability, ports, disks and free accelerators are never taken from here.
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

    from llmtrain.cluster.probes import Facts

KEPT_S = 600.0
SETTINGS = ("config", "known_hosts")
"""Files of the user's that ssh goes by."""


def cluster_key(facts: Mapping[str, Facts]) -> str:
    """A name for these hosts as they run now, seen with the ssh settings of this machine."""
    parts = [[name, item.boot_id] for name, item in facts.items()]
    text = json.dumps([__version__, parts, [_stamp(Path.home() / ".ssh" / name) for name in SETTINGS]])
    return hashlib.sha256(text.encode()).hexdigest()


def _stamp(path: Path) -> list[int]:
    try:
        found = path.stat()
    except OSError:
        return []
    return [found.st_mtime_ns, found.st_size, found.st_ino]


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
