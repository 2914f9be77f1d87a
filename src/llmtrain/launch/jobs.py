"""Runs of this user on this head: found by name, looked at through the files in their folders, asked to stop."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.errors import InputFileError, UsageError
from llmtrain.launch.rundir import RunDir, state_dir, write_record
from llmtrain.launch.supervise import read_boot
from llmtrain.process import start_time

if TYPE_CHECKING:
    from collections.abc import Mapping

FRESH_S = 60.0
"""A picture of the run as young as this was made by a living supervisor, wherever that is."""
NAMED = 5


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """A run as its files show it."""

    run_id: str
    """Its name."""
    path: str
    """Its folder."""
    status: str
    """``running``, ``done``, ``failed``, ``stopped``, ``saved``, or ``orphaned`` where its supervisor is gone."""
    begun: float
    """When it was registered, seconds since 1970."""
    state: Mapping[str, Any]
    """The last picture its supervisor wrote; see ``launch/state.py``."""
    outcome: Mapping[str, Any]
    """How it ended; empty before."""

    def to_json(self) -> dict[str, Any]:
        """The twin of what ``status`` shows."""
        own = {"run_id": self.run_id, "path": self.path, "status": self.status, "begun": self.begun}
        return {**own, **{key: value for key, value in self.state.items() if key != "schema"}, "outcome": self.outcome}


def find_run(name: str) -> RunDir:
    """A run by id, by the beginning of it, by its folder, or ``last``.

    Raises:
        InputFileError: none, or several.
    """
    if "/" in name or (Path(name) / "run.json").is_file():
        return _existing(Path(name), name)
    links = list_links()
    if name == "last" and links:
        return _existing(links[-1], name)
    exact = [link for link in links if link.name == name]
    found = exact or [link for link in links if link.name.startswith(name)]
    if len(found) == 1:
        return _existing(found[0], name)
    if not found:
        raise InputFileError("no such run", where=name, fix="llmtrain jobs lists them")
    some = ", ".join(link.name for link in found[-NAMED:])
    raise InputFileError(f"{len(found)} runs begin so: {some}", where=name, fix="write more of the name")


def _existing(path: Path, name: str) -> RunDir:
    run_dir = RunDir(path.resolve())
    if not run_dir.run_file.is_file():
        raise InputFileError("no such run", where=name, fix="llmtrain jobs lists them")
    return run_dir


def list_links() -> list[Path]:
    """Registered runs that still have a folder, oldest first."""
    try:
        links = [path for path in (state_dir() / "runs").iterdir() if path.is_symlink() and path.exists()]
    except OSError:
        return []
    return sorted(links, key=lambda path: (path.lstat().st_mtime, path.name))


def read_runs() -> list[RunStatus]:
    """Every run, oldest first."""
    return [read_status(RunDir(link.resolve())) for link in list_links()]


def read_status(run_dir: RunDir) -> RunStatus:
    """Look at one."""
    outcome, state = read_document(run_dir.outcome), read_document(run_dir.state)
    try:
        begun = run_dir.link.lstat().st_mtime
    except OSError:
        begun = run_dir.path.stat().st_ctime
    status = judge_status(outcome, alive=is_supervised(run_dir))
    return RunStatus(
        run_id=run_dir.path.name, path=str(run_dir.path), status=status, begun=begun, state=state, outcome=outcome
    )


def judge_status(outcome: Mapping[str, Any], *, alive: bool) -> str:
    """One word. Pure."""
    if not outcome:
        return "running" if alive else "orphaned"
    if outcome.get("ok"):
        return "done"
    if outcome.get("saved"):
        return "saved"
    return "stopped" if outcome.get("exit_code") in {130, 143} else "failed"


def is_supervised(run_dir: RunDir) -> bool:
    """Whether the supervisor of a run is alive; on another machine only its files can tell."""
    document = read_document(run_dir.supervisor)
    if not document:
        return False
    if document["machine"] != socket.gethostname():
        state = read_document(run_dir.state)
        return bool(state) and time.time() - state["time"] < FRESH_S
    same_boot = bool(document["boot"] == read_boot())
    return same_boot and start_time(document["pid"]) == document["start_time"]


def read_document(path: Path) -> dict[str, Any]:
    """A JSON object, empty if there is none (yet)."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def request_stop(run_dir: RunDir, *, now: bool) -> None:
    """Ask the supervisor to save and stop, or to stop at once.

    Raises:
        UsageError: the run is not running.
    """
    status = read_status(run_dir).status
    if status != "running":
        fix = "llmtrain clean" if status == "orphaned" else f"llmtrain resume {run_dir.path.name}"
        raise UsageError(f"the run is not running: {status}", where=run_dir.path.name, fix=fix)
    write_record(run_dir.request, {"now": now, "by": os.getuid()})


def wait_end(run_dir: RunDir, *, pause_s: float = 0.2) -> dict[str, Any]:
    """Wait until a run has ended; its outcome, empty if its supervisor went without one."""
    while not (outcome := read_document(run_dir.outcome)) or is_supervised(run_dir):
        if not outcome and not is_supervised(run_dir):
            break
        time.sleep(pause_s)
    return read_document(run_dir.outcome)


def read_logout_rule(root: Path = Path("/etc/systemd")) -> str | None:
    """A sentence where this system ends a user's processes at logout, which a supervisor would not outlive."""
    value = "no"
    for path in [root / "logind.conf", *sorted((root / "logind.conf.d").glob("*.conf"))]:
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            key, _, found = line.partition("=")
            value = found.strip().lower() if key.strip() == "KillUserProcesses" else value
    if value not in {"yes", "true", "on", "1"}:
        return None
    return "this system ends your processes at logout (KillUserProcesses); run loginctl enable-linger once"
