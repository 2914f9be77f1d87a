"""Copies of each host's checkpoint files on the next host, made while the training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llmtrain.cluster.fleet import Command, run_on_all
from llmtrain.errors import SyncError
from llmtrain.sync.distribute import run_sync
from llmtrain.sync.request import SOURCE, SyncRequest, refuse_failures

if TYPE_CHECKING:
    from llmtrain.cluster.fleet import Fleet
    from llmtrain.launch.prepare import LaunchPlan

Tell = Callable[[str, dict[str, Any]], None]
COPIES = "copies"
"""Folder beside the checkpoints, as in train/keeping.py."""
AT_ONCE = 16
"""Hosts whose files travel at once."""
END_S = 5.0
"""Given to copies under way when the run ends."""


class Copies:
    """Told of sealed checkpoints; copies the newest that every host has, one checkpoint after the other."""

    def __init__(self, plan: LaunchPlan, fleet: Fleet, tell: Tell, hold: Callable[[list[str]], None]) -> None:
        """Begin with nothing.

        Args:
            plan: the run.
            fleet: its hosts.
            tell: called when a checkpoint has been copied.
            hold: called with the checkpoints that hosts must not remove; it replaces what was held before.
        """
        self._plan = plan
        self._fleet = fleet
        self._tell = tell
        self._hold = hold
        self._safe: list[str] = []
        self._seals: dict[str, dict[str, str]] = {}
        self._wanted: str | None = None
        self._news = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None

    def note(self, host: str, name: str, token: str) -> None:
        """A host has a sealed checkpoint.

        Args:
            host: which.
            name: the checkpoint's folder.
            token: which file its manifest is; the same one on two hosts means that they share a disk.
        """
        seals = self._seals.setdefault(name, {})
        seals[host] = token
        shared = len(set(seals.values())) < len(seals)
        if self._plan.copy_rate is None or shared or len(seals) < len(self._plan.hosts):
            return
        with self._news:
            self._wanted = name
            self._news.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Begin nothing more, and break off what is under way: its agents end, and nothing incomplete stays."""
        with self._news:
            self._closing = True
            self._news.notify()
        if self._thread is not None:
            self._thread.join(END_S)

    def _work(self) -> None:
        while True:
            with self._news:
                while self._wanted is None and not self._closing:
                    self._news.wait()
                name, self._wanted = self._wanted, None
                if self._closing or name is None:
                    return
            self._copy(name)

    def _copy(self, name: str) -> None:
        begun = time.monotonic()
        self._hold([*self._safe, name])
        hosts = [host.name for host in self._plan.hosts]
        following = dict(zip(hosts, [*hosts[1:], *hosts[:1]], strict=True))
        results = run_on_all(hosts, lambda owner: self._copy_one(owner, following[owner], name), fan_out=AT_ONCE)
        if self._closing:
            return
        said = {
            "checkpoint": name,
            "bytes": sum(results.good.values()),
            "seconds": round(time.monotonic() - begun, 1),
            "failed": {host: error.error for host, error in results.failed.items()},
        }
        if not results.failed:
            self._safe = [name]
        self._hold(self._safe)
        self._tell("copied", said)

    def _copy_one(self, owner: str, keeper: str, name: str) -> int:
        """Bring what one host wrote to another; returns the bytes that travelled."""
        folder = str(self._plan.run["checkpoints"])
        own = {host.name: host for host in self._plan.hosts}
        request = SyncRequest(
            path=f"{folder}/{name}",
            dest=f"{folder}/{COPIES}/{owner}/{name}",
            hosts=(keeper,),
            source_host=owner,
            rate=self._plan.copy_rate,
            streams=1,
            ports=self._plan.ports,
            addresses={keeper: own[keeper].address, SOURCE: own[owner].address},
            pythons={keeper: own[keeper].python, SOURCE: own[owner].python},
        )
        return bring(request, self._fleet, self._watch)

    def _watch(self, _what: str, _values: dict[str, Any]) -> None:
        if self._closing:
            raise SyncError("the run has ended")


def bring(request: SyncRequest, fleet: Fleet, tell: Tell) -> int:
    """Bring a checkpoint from one host to another, where it has its name only when it is whole; returns the bytes.

    Raises:
        SyncError: it did not arrive.
    """
    assert request.source_host is not None  # noqa: S101  checkpoints lie on hosts
    report = run_sync(request, fleet, tell, source=fleet[request.source_host])
    refuse_failures(report)
    parent, _, name = request.dest.rpartition("/")
    rest = Command(argv=("rm", "-rf", "--", f"{parent}/.{name}.llmtrain"), timeout_s=60)
    run_on_all(request.hosts, lambda host: fleet[host].run(rest))  # there is nothing to roll back to
    return sum(host.bytes_sent for host in report.hosts)
