"""Processes named so that no other can be meant: by pid and start time, by a run's mark in the environment.

Linux only, standard library only; used on every host.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

RUN_MARK = "LLMTRAIN_RUN_ID"
"""Environment variable every process of a run carries."""

_PR_SET_PDEATHSIG = 1


def start_time(pid: int) -> int | None:
    """Field 22 of ``/proc/PID/stat``, clock ticks after boot; None if there is no such process (or it is a zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in {"Z", "X"} else int(fields[19])


def find_marked(run_id: str) -> dict[int, int]:
    """Pid -> start time of every process of this run on this host that we may look at."""
    mark = f"{RUN_MARK}={run_id}".encode()
    found = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208  names, not paths
        if not entry.isdigit():
            continue
        try:
            variables = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        started = start_time(int(entry)) if mark in variables else None
        if started is not None:
            found[int(entry)] = started
    return found


def send(pid: int, started: int, number: int) -> None:
    """Signal a process if it is still the one that started then."""
    if start_time(pid) == started:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def end_marked(run_id: str, *, grace_s: float, limit_s: float = 10.0) -> dict[int, int]:
    """End every process of a run on this host: TERM, then KILL after ``grace_s``.

    Returns:
        Pid -> start time of what is still there ``limit_s`` after the KILL (blocked in the kernel).
    """
    me = os.getpid()
    deadline = time.monotonic() + grace_s
    termed: set[int] = set()
    while time.monotonic() < deadline:
        left = {pid: begun for pid, begun in find_marked(run_id).items() if pid != me}
        if not left:
            return {}
        for pid, begun in left.items():
            if pid not in termed:
                send(pid, begun, signal.SIGTERM)
                termed.add(pid)
        time.sleep(0.1)
    deadline = time.monotonic() + limit_s
    while True:
        left = {pid: begun for pid, begun in find_marked(run_id).items() if pid != me}
        if not left or time.monotonic() > deadline:
            return left
        for pid, begun in left.items():
            send(pid, begun, signal.SIGKILL)
        time.sleep(0.1)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends; for use between fork and exec."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a small JSON file that is either absent, old or complete, after any end of this process."""
    temp = path.with_name(f".{path.name}.{os.getpid()}")
    with temp.open("w", encoding="utf-8") as stream:
        json.dump(value, stream)
        stream.flush()
        os.fsync(stream.fileno())
    temp.replace(path)
