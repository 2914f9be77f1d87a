"""The agents of one sync: started, spoken to through one queue, and taken out when they fail."""

from __future__ import annotations

import queue
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llmtrain.cluster.fleet import run_on_all
from llmtrain.errors import SyncError
from llmtrain.sync.bundle import agent_argv
from llmtrain.sync.certs import make_certificates
from llmtrain.sync.links import AgentLink, Inbox
from llmtrain.sync.request import SOURCE, HostReport, SyncReport, SyncRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from llmtrain.cluster.fleet import Fleet, Transport
    from llmtrain.cluster.tunnel import Tunnel
    from llmtrain.sync.chain import Chain
    from llmtrain.sync.manifest import Entry

Tell = Callable[[str, dict[str, Any]], None]
SILENT_S = 15.0
BEAT_S = 5.0
CACHE = "~/.cache/llmtrain/hashes"


class SourceError(SyncError):
    """The tree that is copied cannot be used."""


class Crew:
    """The agents of a sync, and what is known of each host."""

    def __init__(self, request: SyncRequest, tell: Tell) -> None:
        self.request = request
        self.tell = tell
        self.inbox: Inbox = queue.Queue()
        self.links: dict[str, AgentLink] = {}
        self.reports = {name: HostReport(host=name) for name in request.hosts}
        self.begun = time.monotonic()
        self.active: list[str] = []
        self.plain: list[str] = []
        self.transports: dict[str, Transport] = {}
        self.report = SyncReport(hosts=list(self.reports.values()))
        self.entries: list[Entry] = []
        self.chain: Chain | None = None
        self._built: dict[str, str] = {}
        self._checking: dict[str, str] = {}
        self.source_sent = 0
        self.finished_at: dict[str, float] = {}
        self.tunnels: dict[str, Tunnel] = {}
        self._beat_at = 0.0
        self._tokens = {name: secrets.token_hex(8) for name in request.hosts}
        sync_id = secrets.token_hex(4)
        members = [*request.hosts, SOURCE]
        self._names = {name: f"m{number}.{sync_id}.llmtrain" for number, name in enumerate(members)}

    # --- agents

    def start(self, fleet: Fleet, source: Transport | None) -> None:
        """Start all agents and have them look at what is there."""
        request = self.request
        pems = make_certificates(list(self._names.values()))
        common = {"exclude": request.exclude, "checksum": request.checksum}
        self.transports = transports = {name: fleet[name] for name in request.hosts}

        def begin(name: str) -> None:
            transport = source if name == SOURCE else transports[name]
            if transport is None:
                return
            argv = agent_argv(request.dest_on(name), request.pythons.get(name, ""))
            link = AgentLink(name, transport, argv, self.inbox)
            self.links[name] = link
            if name == SOURCE:
                follow, same = request.what == "weights", request.path == request.dest
                own = {"role": "source", "path": request.path, "follow": follow, "cache": CACHE, "same": same}
            else:
                guard = request.what == "environment"
                own = {"role": "dest", "token": self._tokens[name], "delete": request.delete, "guard": guard}
                own.update(dry_run=request.dry_run, streams=request.streams)
            link.send("open", pem=pems[self._names[name]], dest=request.dest_on(name), **common, **own)

        results = run_on_all([SOURCE, *request.hosts], begin)
        self.active = [name for name in request.hosts if name in results.good]
        for name, error in results.failed.items():
            if name == SOURCE:
                raise SourceError(error.error, where=error.where, fix=error.fix)
            self._fail(name, error.error)

    def close(self) -> None:
        """End all agents."""
        for tunnel in self.tunnels.values():
            tunnel.close()
        run_on_all(list(self.links), lambda name: self.links[name].close())

    def _fail(self, name: str, text: str) -> None:
        if name == SOURCE:
            where = self.request.source_host or "head"
            raise SourceError(text, where=f"{where}:{self.request.path}", fix="mend the source and sync again")
        report = self.reports[name]
        if report.error is None and not report.ok:
            report.error = text
            report.seconds = time.monotonic() - self.begun
            self.tell("failed", {"host": name, "error": text})
        if name in self.active:
            self.active.remove(name)
        if self.chain is not None:
            self.chain.drop(name)
        if name in self.links:
            self.links[name].close()

    def _set_aside(self, name: str) -> None:
        """No agent runs there: it gets the tree by tar, if the source is here."""
        self.links[name].close()
        if name == SOURCE or self.request.source_host is not None:
            self._fail(name, "no python3 on this host, and the tree is not on the head")
        else:
            self.active.remove(name)
            self.plain.append(name)

    def _succeed(self, name: str, note: str = "") -> None:
        report = self.reports[name]
        report.ok, report.note, report.seconds = True, note or report.note, time.monotonic() - self.begun
        self.tell("ready", {"host": name, "note": note})

    # --- messages

    def _next(self) -> tuple[str, dict[str, Any]] | None:
        """One message, with failures and silence taken care of."""
        now = time.monotonic()
        if now - self._beat_at > BEAT_S:
            self._beat_at = now
            for link in self.links.values():
                link.send("beat")
        for name in [one for one in (SOURCE, *self.active) if one in self.links]:
            if now - self.links[name].heard > SILENT_S:
                self._fail(name, f"no sign of life for {SILENT_S:.0f} s")
        try:
            name, message = self.inbox.get(timeout=0.1)
        except queue.Empty:
            return None
        kind = message["kind"]
        if name != SOURCE and name not in self.active:
            return None
        if kind == "error":
            self._fail(name, message["error"])
        elif kind == "nopython":
            self._set_aside(name)
        elif kind == "gone":
            self._fail(name, "the agent or the connection was lost")
        else:
            return name, message
        return None

    def _gather(self, kind: str, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        """One answer from each of these, or their failure."""
        wanted, found = set(names), dict[str, dict[str, Any]]()
        while wanted - set(found) - (wanted - set(self.active) - {SOURCE}):
            got = self._next()
            if got is not None and got[1]["kind"] == kind and got[0] in wanted:
                found[got[0]] = got[1]
        return {name: answer for name, answer in found.items() if name == SOURCE or name in self.active}

    def _ask(self, kind: str, names: Iterable[str], **values: Any) -> dict[str, dict[str, Any]]:
        names = list(names)
        for name in names:
            self.links[name].send(kind, **values)
        return self._gather(kind, names)
