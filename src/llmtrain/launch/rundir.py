"""Every path of a run, on the head and on a host; one class each."""

from __future__ import annotations

import json
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from llmtrain.errors import DiskError

SCHEMA = 1


@dataclass(frozen=True)
class RunDir:
    """The run's folder on the head."""

    path: Path

    @property
    def link(self) -> Path:
        """The run's entry in the user's state folder, which leads here."""
        return state_dir() / "runs" / self.path.name

    @property
    def run_file(self) -> Path:
        """The resolved run."""
        return self.path / "run.json"

    @property
    def ds_config(self) -> Path:
        """DeepSpeed's configuration as rendered."""
        return self.path / "ds_config.json"

    @property
    def hostfile(self) -> Path:
        """The hostfile DeepSpeed is given."""
        return self.path / "hostfile"

    @property
    def ssh_config(self) -> Path:
        """The ssh configuration pdsh is given."""
        return self.path / "ssh_config"

    @property
    def ds_env(self) -> Path:
        """An empty file, so that DeepSpeed reads no ``.deepspeed_env`` of a cloned repository."""
        return self.path / "ds_env"

    @property
    def versions(self) -> Path:
        """Software on every host."""
        return self.path / "versions.json"

    @property
    def logs(self) -> Path:
        """``<host>-<rank>.log``, and the launcher's own."""
        return self.path / "logs"

    @property
    def launcher_log(self) -> Path:
        """What DeepSpeed's runner and pdsh printed."""
        return self.logs / "launcher.log"

    @property
    def metrics(self) -> Path:
        """One object a line, from rank 0."""
        return self.path / "metrics.jsonl"

    @property
    def outcome(self) -> Path:
        """How the run ended; absent while it runs."""
        return self.path / "outcome.json"

    @property
    def events(self) -> Path:
        """What happened, one object a line."""
        return self.path / "events.jsonl"

    @property
    def state(self) -> Path:
        """How the run is, written anew every second or so while it runs."""
        return self.path / "state.json"

    @property
    def supervisor(self) -> Path:
        """Which process supervises the run."""
        return self.path / "supervisor.json"

    @property
    def request(self) -> Path:
        """Left by somebody who wants the run to stop, and taken by its supervisor."""
        return self.path / "request.json"

    @property
    def order(self) -> Path:
        """What was asked for, without values of variables: a resumed run is made from it."""
        return self.path / "order.json"

    @property
    def model(self) -> Path:
        """The tuned model where the user named no output."""
        return self.path / "model"


@dataclass(frozen=True, kw_only=True)
class HostDir:
    """The run's folder on a host."""

    path: PurePosixPath
    """The same absolute path on every host."""

    def __str__(self) -> str:
        return str(self.path)

    def __truediv__(self, name: str) -> str:
        return str(self.path / name)


def new_run_id(name: str) -> str:
    """``<name>-<time>-<random>``: sorts by time, and is never given twice."""
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def create_run_dir(run_id: str, base: Path) -> RunDir:
    """Make the run's folder under ``base/runs`` and register it in the user's state folder.

    Raises:
        DiskError: it cannot be made.
    """
    run_dir = RunDir((base / "runs" / run_id).resolve())
    try:
        run_dir.path.mkdir(parents=True, mode=0o700)
        run_dir.logs.mkdir()
        run_dir.link.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        run_dir.link.symlink_to(run_dir.path)
    except OSError as error:
        raise DiskError(
            f"the run folder cannot be made: {error.strerror}",
            where=error.filename or str(run_dir.path),
            fix="run from a folder you can write to",
        ) from None
    return run_dir


def state_dir() -> Path:
    """Where later commands find runs by their id."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "llmtrain"


def write_private(path: Path, text: str) -> None:
    """Write a file only its owner can read, complete or not at all."""
    temp = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temp.replace(path)


def write_record(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON record with its schema number."""
    write_private(path, json.dumps({"schema": SCHEMA, **value}, indent=2, default=str) + "\n")
