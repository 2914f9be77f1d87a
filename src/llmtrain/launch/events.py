"""What a run tells: one line each in its events.jsonl, and to the terminal that waits for it if there is one."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
import time
from typing import TYPE_CHECKING, Any

from llmtrain.cluster.fleet import Command
from llmtrain.cluster.local import LocalTransport
from llmtrain.errors import LlmtrainError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

QUEUE = 2000
"""Events kept for a terminal that does not take them (Ctrl-Z); more are dropped, never waited for."""
COPY_EVERY_S = 1.0
ELSEWHERE = {"metrics", "output", "sync", "synced"}
"""Kept in files of their own, or of no use to anybody who comes later."""
LAST_S = 10.0
NOTIFY_S = 30.0


class EventLog:
    """Takes what a launch tells."""

    def __init__(self, terminal: Connection | None, notify: str | None = None) -> None:
        self._terminal = terminal
        self._notify = notify
        self._news: queue.Queue[str | None] = queue.Queue(QUEUE)
        self._waiting: queue.Queue[tuple[str, dict[str, Any]] | None] = queue.Queue(QUEUE)
        self._early: list[str] | None = []
        self._path: Path | None = None
        self._copied: dict[tuple[str, str], float] = {}
        self._sender = threading.Thread(target=self._send, daemon=True)
        self._sender.start()
        self._notifier = threading.Thread(target=self._call, daemon=True)
        self._notifier.start()

    def tell(self, what: str, values: dict[str, Any]) -> None:
        """Write it down, and pass it on as it is."""
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait((what, values))
        if what in ELSEWHERE or (what == "copy" and not self._is_due(values)):
            return
        line = json.dumps({"time": round(time.time(), 3), "event": what, **render_values(what, values)}, default=str)
        if self._notify is not None:
            with contextlib.suppress(queue.Full):
                self._news.put_nowait(line)
        if self._early is not None:
            self._early.append(line)
        elif self._path is not None:
            append_line(self._path, line)

    def open(self, path: Path) -> None:
        """The run has a folder: what came before goes there too."""
        self._path, early, self._early = path, self._early or [], None
        for line in early:
            append_line(path, line)

    def close(self) -> None:
        """Pass on what is left, if somebody takes it."""
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=LAST_S)
            self._sender.join(LAST_S)
            self._news.put(None, timeout=LAST_S)
            self._notifier.join(LAST_S)

    def _is_due(self, values: dict[str, Any]) -> bool:
        key, now = (values["host"], values["path"]), time.monotonic()
        if values["sent"] < values["total"] and now - self._copied.get(key, 0.0) < COPY_EVERY_S:
            return False
        self._copied[key] = now
        return True

    def _call(self) -> None:
        """The user's command, once for each event and one after the other."""
        while (line := self._news.get()) is not None:
            argv = ("/bin/sh", "-c", self._notify or "")
            with contextlib.suppress(LlmtrainError):  # it is told, not asked
                LocalTransport("head").run(Command(argv=argv, stdin=line.encode() + b"\n", timeout_s=NOTIFY_S))

    def _send(self) -> None:
        while (item := self._waiting.get()) is not None:
            if self._terminal is None:
                continue
            try:
                self._terminal.send(item)
            except OSError:  # it has been closed; the run goes on
                self._terminal = None


def append_line(path: Path, line: str) -> None:
    """Append a line in one write, private to its owner."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(handle, line.encode() + b"\n")
    finally:
        os.close(handle)


def render_values(what: str, values: dict[str, Any]) -> dict[str, Any]:
    """Plain values of an event; of a plan only what tells where the ranks are. Pure."""
    if what != "plan":
        return values
    plan = values["plan"]
    hosts = [{"name": host.name, "ranks": list(host.ranks), "address": host.address} for host in plan.hosts]
    warnings = [{"host": item.host, "saw": item.saw, "wanted": item.wanted} for item in values["warnings"]]
    return {
        "world_size": plan.world_size,
        "hosts": hosts,
        "output": values["output"],
        "warnings": warnings,
    }
