"""One sync from start to end: agents on all hosts, what each lacks, the chain, healing, proof, commit.

Everything happens in one loop over one queue of messages; a host that fails is taken out and the others go on.
"""

from __future__ import annotations

import time
from itertools import compress
from typing import TYPE_CHECKING, Any

from llmtrain.cluster.fleet import run_on_all
from llmtrain.cluster.local import LocalTransport
from llmtrain.cluster.tunnel import Tunnel
from llmtrain.errors import LlmtrainError
from llmtrain.sync.certs import make_hop_key
from llmtrain.sync.chain import Chain
from llmtrain.sync.crew import Crew, SourceError, Tell
from llmtrain.sync.links import encode
from llmtrain.sync.manifest import load
from llmtrain.sync.plain import PlainError, push_plain
from llmtrain.sync.request import SOURCE, SyncReport, SyncRequest
from llmtrain.sync.topology import ChunkPlan, plan_chunks
from llmtrain.sync.ways import LOOK_BACK, STAR_AT_ONCE, Reach, Ways, choose_ways, render_ways

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmtrain.cluster.fleet import Fleet, Transport


def run_sync(request: SyncRequest, fleet: Fleet, tell: Tell, *, source: Transport | None = None) -> SyncReport:
    """Bring a tree to all hosts.

    Args:
        request: what, from where, to where.
        fleet: open transports to the hosts.
        tell: called for everything a person would want to see.
        source: transport to the host that has the tree; this machine if not given.

    Returns:
        A report; hosts that failed are in it.

    Raises:
        SyncError: the source cannot be read, or changed while it was copied.
    """
    sync = Sync(request, tell)
    try:
        sync.start(fleet, source or LocalTransport(SOURCE))
        return sync.run()
    finally:
        sync.close()


def run_rollback(request: SyncRequest, fleet: Fleet, tell: Tell) -> SyncReport:
    """Bring the last generation back on all hosts, or on none.

    Args:
        request: whose destination.
        fleet: open transports to the hosts.
        tell: called for everything a person would want to see.
    """
    sync = Sync(request, tell)
    try:
        sync.start(fleet, None)
        return sync.roll_back()
    finally:
        sync.close()


class Sync(Crew):
    """A sync under way."""

    def run(self) -> SyncReport:
        """Everything after the start."""
        opened = self._gather("open", [SOURCE, *self.active])
        head = opened.pop(SOURCE)
        self.report.files, self.report.tree_bytes = head["files"], head["bytes"]
        self.report.root = head["root"]
        if head["followed"]:
            self.report.warnings.append(f"{len(head['followed'])} links leave the tree: their content is copied")
        self.tell("scanned", {"files": self.report.files, "bytes": self.report.tree_bytes})
        self._refuse(opened)
        if self.plain:
            self.report.warnings.append(f"no python3 on {', '.join(self.plain)}: the whole tree goes there by tar")
            self.tell("way", {"text": self.report.warnings[-1]})
        followers = self._find_shared()
        self._find_same()
        rows = self._ask("rows", [SOURCE])[SOURCE]["rows"] if self.active else []
        self.entries = load(rows)
        plan = self._plan(rows)
        self.report.total_bytes = plan.total_bytes
        disk = max((one["disk_bytes"] for one in self.report.planned.values()), default=0)
        hosts = {**plan.host_bytes, **dict.fromkeys(self.plain, self.report.tree_bytes)}
        self.tell(
            "planned",
            {
                "bytes": plan.total_bytes,
                "hosts": hosts,
                "files": self.report.files,
                "disk": disk,
                "plain": len(self.plain),
            },
        )
        if self.request.dry_run:
            for name in self.active:
                differs = any(count for count, _ in self.report.changes[name].values())
                self._succeed(name, "would be synced" if differs else "equal already")
        elif self.active:
            self._transfer(plan)
        self._share(followers)
        run_on_all(self.plain, self._push_plain, fan_out=STAR_AT_ONCE)
        return self._conclude()

    def _push_plain(self, name: str) -> None:
        """A host without Python."""
        report = self.reports[name]

        def told(count: int) -> None:
            report.bytes_sent = count
            self.tell("progress", {"host": name, "received": count, "lag": 0, "peer": "head"})

        try:
            sent = push_plain(self.request, self.transports[name], told)
        except (PlainError, LlmtrainError) as error:
            self._fail(name, error.error if isinstance(error, LlmtrainError) else str(error))
            return
        report.bytes_sent = sent.bytes
        report.bytes_reused = 0 if sent.bytes or self.request.dry_run else self.report.tree_bytes
        done = "would be synced by tar" if self.request.dry_run else "by tar" if sent.bytes else "unchanged"
        self._succeed(name, f"{done}; no python3 there")

    def roll_back(self) -> SyncReport:
        """Only if every host has a generation to go back to."""
        opened = self._gather("open", self.active)
        for name in self.plain:
            self._fail(name, "no python3 on this host: nothing was kept there")
        lacking = [name for name, answer in opened.items() if not answer["generations"]]
        for name in lacking:
            self._fail(name, "there is no older tree to go back to")
        if len(self.active) < len(self.request.hosts):
            for name in list(self.active):
                self._fail(name, "left as it is, because another host cannot go back")
        elif not self.request.dry_run:
            for name, answer in self._ask("rollback", self.active).items():
                self._succeed(name, f"back to {answer['root'] or 'the tree before llmtrain'}"[:24])
        else:
            for name in self.active:
                self._succeed(name, "could go back")
        self.report.seconds = time.monotonic() - self.begun
        return self.report

    def _refuse(self, opened: Mapping[str, dict[str, Any]]) -> None:
        for name, answer in opened.items():
            if answer["users"] and not (self.request.force or self.request.dry_run):
                users = ", ".join(answer["users"][:4])
                self._fail(name, f"the environment is in use by {users}; stop it, or --force")
            elif self.request.delete and answer["exists"] and not (answer["made"] or self.request.force):
                self._fail(name, "--delete in a tree that llmtrain did not make; remove it yourself, or --force")

    def _find_shared(self) -> dict[str, str]:
        """Hosts that see one and the same destination: one of them gets the tree, the others share it."""
        owner: dict[str, str] = {}
        by_token = {token: name for name, token in self._tokens.items()}
        seen = self._ask("tokens", [SOURCE, *self.active])
        at_source = seen[SOURCE]["tokens"]
        for name in list(self.active):
            group = [by_token[token] for token in seen[name]["tokens"] if token in by_token]
            first = min((one for one in group if one in self.active), key=self.request.hosts.index, default=name)
            if self._tokens[name] in at_source:
                self.active.remove(name)
                self._succeed(name, "is the source")
            elif first != name:
                self.active.remove(name)
                owner[name] = first
        return owner

    def _share(self, followers: Mapping[str, str]) -> None:
        for name, first in followers.items():
            if self.reports[first].ok:
                self._succeed(name, f"shares its file system with {first}")
            else:
                self.reports[name].error = f"shares its file system with {first}, which failed"

    def _find_same(self) -> None:
        answers = self._ask("lock", self.active, root=self.report.root, delete=self.request.delete)
        self._known = {name for name, answer in answers.items() if answer["known"]}
        for name, answer in answers.items():
            if answer["same"]:
                self.reports[name].bytes_reused = self.report.tree_bytes
                self._succeed(name, "unchanged")
                self.active.remove(name)

    def _plan(self, rows: list[list[Any]]) -> ChunkPlan:
        whole, known = encode("manifest", rows=rows), encode("manifest", rows=None)
        for name in self.active:
            self.links[name].post(known if name in self._known else whole)
        asks = self._gather("manifest", self.active)
        files = sorted({number for answer in asks.values() for number in answer["asks"]})
        blocks: dict[str, str] = {}
        if files:
            blocks = self._ask("ask", [SOURCE], files=files)[SOURCE]["blocks"]
        for name, answer in asks.items():
            if name in self.active:
                mine = {str(number): blocks[str(number)] for number in answer["asks"]}
                self.links[name].send("blocks", blocks=mine)
        answers = self._gather("blocks", self.active)
        needs = {name: {int(file): wanted for file, wanted in answers[name]["needs"].items()} for name in self.active}
        self.report.changes = {name: answer["changes"] for name, answer in answers.items()}
        plan = plan_chunks(self.entries, needs)
        self.report.planned = {
            name: {"bytes": plan.host_bytes.get(name, 0), "disk_bytes": answer["disk_bytes"]}
            for name, answer in answers.items()
        }
        return plan

    def _transfer(self, plan: ChunkPlan) -> None:
        self.chain = Chain(self.request, self.links, self._names, plan)
        self.chain.place(self._ask_listen())
        ways = self._choose_ways()
        for name in self.active:
            self.links[name].send("start", chunks=plan.chunks, needed=plan.needed[name])
        self.links[SOURCE].send("start", chunks=plan.chunks)
        self._gather("start", [SOURCE, *self.active])
        if ways.hopping:
            self._open_hops(ways)
        ways = ways.without(set(self.request.hosts) - set(self.active))
        run_on_all([*ways.star[:STAR_AT_ONCE], *(set(ways.chain[:1]) & ways.away)], self._open_tunnel)
        self.chain.begin(ways, self._open_tunnel)
        begun = time.monotonic()
        waiting = set(self.active)
        while waiting & set(self.active):
            got = self._next()
            self.chain.tend()
            if got is not None:
                self._handle(*got, waiting)
        self.report.slow = list(self.chain.slow)
        if self.finished_at:
            self.report.transfer_seconds = max(self.finished_at.values()) - begun

    def _choose_ways(self) -> Ways:
        reach = self._examine_reach() if self.request.transport != "star" else {}
        ways = choose_ways([name for name in self.active if name in reach or not reach], reach, self.request.transport)
        if ways.star and self.request.transport == "tls":
            for name in ways.star:
                self._fail(
                    name, "cannot be reached for TLS on the ports of the sync; --transport auto goes through SSH"
                )
        elif text := render_ways(ways, self.request.ports, self.report.total_bytes):
            self.report.warnings.append(text)
            self.tell("way", {"text": text})
        return ways

    def _examine_reach(self) -> dict[str, Reach]:
        assert self.chain is not None  # noqa: S101  made just before
        peers: dict[str, list[str]] = {}
        for at, name in enumerate(self.active):
            peers[name] = [SOURCE, *reversed(self.active[max(0, at - LOOK_BACK) : at])]
            where = [self.chain.where(one) for one in peers[name]]
            places = [[one["address"], one["port"]] for one in where]
            places += [[ssh["address"], ssh["port"]] for one in where if (ssh := one.get("ssh"))]
            self.links[name].send("reach", places=places)
        found = {}
        for name, answer in self._gather("reach", self.active).items():
            sshd = [one for one in peers[name] if self.chain.where(one).get("ssh")]
            count = len(peers[name])
            found[name] = Reach(
                tls=tuple(compress(peers[name], answer["open"][:count])),
                ssh=tuple(one for one in compress(sshd, answer["open"][count:]) if one != SOURCE),
            )
        return found

    def _open_hops(self, ways: Ways) -> None:
        """Give the hosts a key for this sync that opens one port of each other, and nothing else."""
        assert self.chain is not None  # noqa: S101  made just before
        private, public = make_hop_key()
        where = [self.chain.where(name) for name in ways.chain]
        sources = {one["address"] for one in where} | {one["ssh"]["address"] for one in where if one.get("ssh")}
        sync = self._names[SOURCE].split(".")[1]
        self._ask("hop", ways.chain, private=private, public=public, sources=sorted(sources), sync=sync)

    def _open_tunnel(self, name: str) -> Tunnel | None:
        """A way for a host back to the source; None if there is none, and the host has failed."""
        if name not in self.tunnels and self.chain is not None:
            where = self.chain.where(SOURCE)
            try:
                self.tunnels[name] = Tunnel(name, where["address"], where["port"])
            except LlmtrainError as error:
                self._fail(name, error.error)
        return self.tunnels.get(name)

    def _ask_listen(self) -> dict[str, dict[str, Any]]:
        request = self.request
        found: dict[str, dict[str, Any]] = {}
        for name in [*self.active, SOURCE]:
            toward = next((one["address"] for one in found.values()), None)
            if name == SOURCE:
                found.update(self._gather("listen", self.active))
                toward = next((one["address"] for one in found.values()), None)
            address = request.addresses.get(name)
            rate = request.rate if name == SOURCE else None
            self.links[name].send(
                "listen", network=request.network, toward=toward, ports=request.ports, address=address, rate=rate
            )
        found.update(self._gather("listen", [SOURCE]))
        return found

    def _handle(self, name: str, message: dict[str, Any], waiting: set[str]) -> None:
        kind = message["kind"]
        if kind in {"beat", "built"}:
            self._note(name, message)
        if kind == "built":
            self.finished_at[name] = time.monotonic() - message["finish_s"]
            self.reports[name].bytes_reused = message["reused"]
            self._built[name] = message["root"]
        elif kind == "check":
            self._commit(message)
        elif kind == "commit":
            self._succeed(name)
            waiting.discard(name)
        self._check()

    def _note(self, name: str, message: dict[str, Any]) -> None:
        if name == SOURCE:
            self.source_sent = message["sent"]
        elif self.chain is not None and "have" in message:
            self.reports[name].bytes_sent = message["received"]
            self.chain.note(name, message)
            for event in message["events"]:
                self.tell("trouble", {"host": name, **event})
            self.tell("progress", {"host": name, **self.chain.progress(name)})

    def _check(self) -> None:
        """Ask the source whether it is still what it was; one question at a time."""
        if self._built and not self._checking:
            self._checking, self._built = self._built, {}
            self.links[SOURCE].send("check")

    def _commit(self, answer: dict[str, Any]) -> None:
        """Compare with the source, which must still be what it was, and swap."""
        if answer["changed"]:
            raise SourceError(
                "the source changed while it was copied; nothing was replaced",
                where=str(answer["changed"]),
                fix="let nothing write to it, and sync again",
            )
        origin = f"{self.request.source_host or 'head'}:{self.request.path}"
        for name, root in self._checking.items():
            if name not in self.active:
                continue
            if not root or root != answer["root"]:
                self._fail(name, "the copy could not be verified: its digest differs from the source's")
                continue
            self.report.root = root
            record = {"root": root, "source": origin}
            self.links[name].send("commit", force=self.request.force, keep=self.request.keep, record=record)
        self._checking = {}

    def _conclude(self) -> SyncReport:
        self.source_sent = self._ask("totals", [SOURCE])[SOURCE]["sent"]
        self.report.seconds = time.monotonic() - self.begun
        self.report.head_bytes_sent = self.source_sent
        return self.report
