"""The chain while it runs: who pulls from whom, who fell behind, who comes back."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

from llmtrain.sync.request import SOURCE
from llmtrain.sync.topology import choose_slow, is_behind
from llmtrain.sync.ways import STAR_AT_ONCE, Ways

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from llmtrain.cluster.tunnel import Tunnel
    from llmtrain.sync.links import AgentLink
    from llmtrain.sync.request import SyncRequest
    from llmtrain.sync.topology import ChunkPlan

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
        self._ways = Ways(chain=(), direct=(), star=())
        self._tunnel: Callable[[str], Tunnel | None] = lambda _name: None
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

    def where(self, name: str) -> dict[str, Any]:
        """Address and port of a member, and where its sshd is."""
        return self._where[name]

    def begin(self, ways: Ways, tunnel: Callable[[str], Tunnel | None]) -> None:
        """Everybody starts to pull; of those fed through the head only a few at once.

        Args:
            ways: who is fed how.
            tunnel: opens a way from a host back to the source, or fails that host.
        """
        self.begun = time.monotonic()
        self.order = list(ways.chain)
        self._ways, self._tunnel = ways, tunnel
        self._queue = list(ways.star)
        self._connect()
        for name in ways.direct:
            self.links[name].send("pull", peers=[self.peer(SOURCE)])
        self._feed()

    def _feed(self) -> None:
        while self._queue and len(self._fed) < STAR_AT_ONCE:
            name = self._queue.pop(0)
            self._fed.add(name)
            if (peer := self._through_head(name)) is not None:
                self.links[name].send("pull", peers=[peer])

    def _through_head(self, name: str) -> dict[str, Any] | None:
        tunnel = self._tunnel(name)
        return None if tunnel is None else {**self.peer(SOURCE), "address": "127.0.0.1", "port": tunnel.port}

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
        for name in list(self.order):
            if name not in self.order:
                continue  # it failed just now, when a way to it was opened
            peers = self.peers(name)
            if self._sent.get(name) != peers:
                self._sent[name] = peers
                if found := [one for one in (self._way(name, peer) for peer in peers) if one is not None]:
                    self.links[name].send("pull", peers=found)

    def _way(self, name: str, to: str) -> dict[str, Any] | None:
        """How a host gets to a peer; to the source through the head only if nobody else is before it."""
        if to == SOURCE and name in self._ways.away:
            return self._through_head(name) if self.order[0] == name else None
        peer = self.peer(to)
        if to in self._ways.hops.get(name, ()):
            if self._where[to].get("ssh") is None:
                return None
            peer["ssh"] = self._where[to]["ssh"]
        return peer

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
