"""Read what a run writes while it is written: events, metrics, logs."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llmtrain.errors import InputFileError
from llmtrain.launch.jobs import is_supervised, read_document
from llmtrain.launch.verdict import parse_outcome

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from llmtrain.launch.run import Tell
    from llmtrain.launch.rundir import RunDir
    from llmtrain.launch.verdict import Outcome

PAUSE_S = 0.3
LOG = re.compile(r"^(?P<host>.+)-(?P<rank>\d+)\.log$")


@dataclass
class Follower:
    """Whole lines of a file that grows."""

    path: Path
    offset: int = 0
    rest: bytes = b""

    def read(self) -> list[str]:
        """Lines that are new."""
        try:
            with self.path.open("rb") as stream:
                stream.seek(self.offset)
                data = stream.read()
        except OSError:
            return []
        self.offset += len(data)
        *lines, self.rest = (self.rest + data).split(b"\n")
        return [line.decode("utf-8", "replace") for line in lines]

    def skip(self) -> None:
        """Begin at the end."""
        self.read()


@dataclass(frozen=True, kw_only=True)
class LogChoice:
    """Which lines of which logs."""

    host: str | None = None
    """Only of this host."""
    rank: int | None = None
    """Only of this rank."""
    pattern: re.Pattern[str] | None = None
    """Only lines in which it is found."""
    names: frozenset[str] = field(default_factory=frozenset)


def list_logs(run_dir: RunDir, choice: LogChoice) -> list[tuple[str, Path]]:
    """(``host-rank``, file) in the order of ranks; the launcher's own where nothing narrower is asked for.

    Raises:
        InputFileError: there is no such log.
    """
    found = []
    for path in run_dir.logs.glob("*.log"):
        match = LOG.match(path.name)
        if match is None or (choice.host or match["host"]) != match["host"]:
            continue
        if choice.rank is None or choice.rank == int(match["rank"]):
            found.append((int(match["rank"]), path.stem, path))
    if not found:
        raise InputFileError("no such log", where=str(run_dir.logs), fix="llmtrain status names hosts and ranks")
    return [(stem, path) for _, stem, path in sorted(found)]


def read_logs(run_dir: RunDir, choice: LogChoice, *, follow: bool) -> Iterator[tuple[str, str]]:
    """(``host-rank``, line); with ``follow`` until the run has ended."""
    followers = {name: Follower(path) for name, path in list_logs(run_dir, choice)}
    while True:
        ended = not follow or _is_over(run_dir)
        if follow:  # ranks that began later
            for name, path in list_logs(run_dir, choice):
                followers.setdefault(name, Follower(path))
        for name, follower in followers.items():
            for line in follower.read():
                if choice.pattern is None or choice.pattern.search(line):
                    yield name, line
        if ended:
            return
        time.sleep(PAUSE_S)


def _is_over(run_dir: RunDir) -> bool:
    return bool(read_document(run_dir.outcome)) or not is_supervised(run_dir)


def attach(run_dir: RunDir, tell: Tell) -> Outcome | None:
    """Show a run from its files until it ends; None if its supervisor went without an outcome."""
    events, metrics = Follower(run_dir.events), Follower(run_dir.metrics)
    while True:
        ended = _is_over(run_dir)
        for line in events.read():
            values = json.loads(line)
            what = values.pop("event")
            if what not in {"plan", "outcome", "error", "bug", "question"}:
                tell(what, values)
        for line in metrics.read():
            tell("metrics", json.loads(line))
        if ended:
            outcome: dict[str, Any] = read_document(run_dir.outcome)
            return parse_outcome(outcome) if outcome else None
        time.sleep(PAUSE_S)
