"""What ranks are doing now: Python stacks of processes of this host (standard library only).

faulthandler first: it needs no right to look into another process, works in containers, and does not stop it.
py-spy, where it is installed, for ranks whose handler is not there or does not answer.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.process import send, start_time

if TYPE_CHECKING:
    from collections.abc import Mapping

NUMBER = signal.SIGUSR2
"""Makes a rank write its stacks into ``stacks/<rank>.txt``."""
WAIT_S = 2.0
PY_SPY_S = 8.0
MOST = 64 * 1024
"""Bytes kept of one rank's stacks."""


def read_stacks(run_dir: Path, records: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Rank -> state of its process, and its stacks as text.

    Args:
        run_dir: the run's folder here.
        records: start records of the ranks here.
    """
    sizes = {rank: _size(run_dir, rank) for rank in records}
    for record in records.values():
        if _catches(record["pid"]):
            send(record["pid"], record["start_time"], NUMBER)
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline and any(_size(run_dir, rank) == sizes[rank] for rank in records):
        time.sleep(0.1)
    time.sleep(0.1)  # until the last of them has been written
    return {rank: _describe(run_dir, rank, record, sizes[rank]) for rank, record in records.items()}


def _describe(run_dir: Path, rank: int, record: Mapping[str, Any], before: int) -> dict[str, Any]:
    pid, state = record["pid"], None
    if start_time(pid) == record["start_time"]:
        state = _stat(pid)
    text = _read(run_dir, rank, before)
    if not text and state is not None:
        text = _ask_py_spy(pid)
    return {"state": state, "text": text}


def _path(run_dir: Path, rank: int) -> Path:
    return run_dir / "stacks" / f"{rank}.txt"


def _size(run_dir: Path, rank: int) -> int:
    try:
        return _path(run_dir, rank).stat().st_size
    except OSError:
        return 0


def _read(run_dir: Path, rank: int, before: int) -> str:
    try:
        with _path(run_dir, rank).open("rb") as stream:
            stream.seek(before)
            return stream.read(MOST).decode("utf-8", "replace")
    except OSError:
        return ""


def _stat(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


def _catches(pid: int) -> bool:
    """Whether a process handles the signal; it would end one that does not."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return False
    mask = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(mask >> (NUMBER - 1) & 1)


def _ask_py_spy(pid: int) -> str:
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PY_SPY_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace")[:MOST]
