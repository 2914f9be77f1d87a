"""The chain while it runs: who pulls from whom, who fell behind, who comes back."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

from llmtrain.sync.request import SOURCE
from llmtrain.sync.topology import choose_slow, is_behind
from llmtrain.sync.ways import STAR_AT_ONCE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmtrain.cluster.tunnel import Tunnel
    from llmtrain.sync.links import AgentLink
    from llmtrain.sync.request import SyncRequest
    from llmtrain.sync.topology import ChunkPlan
    from llmtrain.sync.ways import Ways

TEND_S = 0.5
PAUSE_S = 5.0
WINDOW_S = 3.0
WORTH_S = 15.0
"""Seconds of transfer that must be left to try another first host."""
FASTER = 1.3


class Chain:
    """Hosts in a row, the source before the first."""

    def __init__(
        self, request: SyncRequest, links: Mapping[str, AgentLink], names: Mapping[str, str], plan: ChunkPlan
    ) -> None:
        self.request = request
        self.links = links
        self.names = names
        self.plan = plan
        self.order: list[str] = []
        self.have: dict[str, int] = {}
        self.last: dict[str, dict[str, Any]] = {}
        self.slow: list[str] = []
        self.begun = time.monotonic()
        self._tunnels: Mapping[str, Tunnel] = {}
        self._queue: list[str] = []
        self._fed: set[str] = set()
        self._where: dict[str, dict[str, Any]] = {}
        self._sent: dict[str, list[str]] = {}
        self._samples: dict[str, deque[tuple[float, int]]] = {}
        self._behind_since: dict[str, float] = {}
        self._tended = 0.0
        self._moved = 0.0
        self._tried: tuple[str, float] | None = None

    def place(self, listening: Mapping[str, dict[str, Any]]) -> None:
        """Take the addresses of all agents."""
        self._where = dict(listening)

    def begin(self, ways: Ways, tunnels: Mapping[str, Tunnel]) -> None:
        """Everybody starts to pull; of those fed through the head only a few at once."""
        self.begun = time.monotonic()
        self.order = list(ways.chain)
        self._tunnels = tunnels
        self._queue = list(ways.star)
        self._connect()
        for name in ways.direct:
            self.links[name].send("pull", peers=[self.peer(SOURCE)])
        self._feed()

    def _feed(self) -> None:
        while self._queue and len(self._fed) < STAR_AT_ONCE:
            name = self._queue.pop(0)
            self._fed.add(name)
            peer = {**self.peer(SOURCE), "address": "127.0.0.1", "port": self._tunnels[name].port}
            self.links[name].send("pull", peers=[peer])

    def drop(self, name: str) -> None:
        """Close the gap a failed host leaves."""
        if name in self.order:
            self.order.remove(name)
            self._connect()
        self._leave(name)

    def _leave(self, name: str) -> None:
        if name in self._queue:
            self._queue.remove(name)
        if name in self._fed:
            self._fed.remove(name)
            self._feed()

    def peers(self, name: str) -> list[str]:
        """Predecessors, the nearest first, the source last."""
        return [*reversed(self.order[: self.order.index(name)]), SOURCE]

    def _connect(self) -> None:
        for name in self.order:
            peers = self.peers(name)
            if self._sent.get(name) != peers:
                self._sent[name] = peers
                self.links[name].send("pull", peers=[self.peer(one) for one in peers])

    def peer(self, name: str) -> dict[str, Any]:
        """Where a member listens."""
        where = self._where[name]
        return {"host": name, "name": self.names[name], "address": where["address"], "port": where["port"]}

    def note(self, name: str, message: dict[str, Any]) -> None:
        """Take a host's report about itself."""
        now = time.monotonic()
        self.have[name] = message["have"]
        self.last[name] = message
        if message["left"] == 0:
            self._leave(name)
        samples = self._samples.setdefault(name, deque())
        samples.append((now, message["have"]))
        while len(samples) > 2 and samples[0][0] < now - WINDOW_S:
            samples.popleft()

    def progress(self, name: str) -> dict[str, Any]:
        """What to show of a host."""
        total = max(1, len(self.plan.chunks))
        before = self.peers(name)[0] if name in self.order else SOURCE
        lag = (self.have.get(before, 0) if before != SOURCE else total) - self.have.get(name, 0)
        got = self.last.get(name, {}).get("received", 0)
        return {
            "share": self.have.get(name, 0) / total,
            "received": got,
            "rate": got / max(0.001, time.monotonic() - self.begun),
            "lag": lag,
            "peer": self.last.get(name, {}).get("peer", ""),
        }

    def tend(self) -> None:
        """Move a host that holds the others up to the tail, at most one in a while."""
        now = time.monotonic()
        if now - self._tended < TEND_S:
            return
        self._tended = now
        total = len(self.plan.chunks)
        for before, host in zip(self.order, self.order[1:], strict=False):
            if is_behind(self.have.get(before, 0), self.have.get(host, 0), total):
                self._behind_since.setdefault(host, now)
            else:
                self._behind_since.pop(host, None)
        if now - self._moved < PAUSE_S:
            return
        have = {name: self.have.get(name, 0) for name in self.order}
        behind = {name: now - self._behind_since.get(name, now) for name in self.order}
        if self._try_first(now):
            return
        slow = choose_slow(self.order, have, {name: self._rate(name, now) for name in self.order}, behind, total)
        if slow is not None:
            self._move(slow, now)
            self.slow.append(slow)

    def _move(self, name: str, now: float) -> None:
        self._moved = now
        self.order.remove(name)
        self.order.append(name)
        self._behind_since.clear()
        self._connect()

    def _try_first(self, now: float) -> bool:
        """Whether the first host is slow cannot be seen, because nobody is before it: see how fast the next one is.

        Any order is as good as another for equal hosts, so the try costs a reconnection; it is made once, and only
        if much is left to do.
        """
        first = self.order[0] if self.order else ""
        if self._tried is not None:
            name, rate = self._tried
            if name and first != name and now - self._moved > PAUSE_S:
                self._tried = ("", 0.0)
                if self._rate(first, now) > FASTER * rate and name in self.order:
                    self.slow.append(name)
            return False
        rate = self._rate(first, now) if len(self.order) > 1 else 0.0
        left = len(self.plan.chunks) - self.have.get(first, 0)
        if now - self.begun < PAUSE_S or rate <= 0 or left / rate < WORTH_S:
            return False
        self._tried = (first, rate)
        self._move(first, now)
        return True

    def _rate(self, name: str, now: float) -> float:
        samples = self._samples.get(name)
        if not samples or len(samples) < 2:
            return 0.0
        if self.have[name] == len(self.plan.chunks):
            return self.have[name] / max(0.1, samples[-1][0] - self.begun)
        return (samples[-1][1] - samples[0][1]) / max(0.1, now - samples[0][0])
