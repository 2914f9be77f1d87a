"""The agent: one process on every host of a sync, alive as long as the channel it was started over.

Standard library only, Python 3.6 and later; sent together with manifest, relay, build, finish and place as one text
(`llmtrain.sync.bundle`). It takes messages on standard input, answers on standard output, and ends when either ends.
Nothing of it stays: no daemon, no open port, no key.
"""

import base64
import gc
import os
import sys
import threading
import time
import traceback
from typing import Any, List, Optional

from llmtrain.sync import finish
from llmtrain.sync.blocks import SourceReader
from llmtrain.sync.build import Builder
from llmtrain.sync.hop import Hop, allow, forbid, own_address, own_sshd
from llmtrain.sync.manifest import (
    HASHED_AT_ONCE,
    Cache,
    Entry,
    Scan,
    TreeError,
    block_count,
    combine,
    diff,
    dump,
    fill_holes,
    load,
    root_digest,
    signature,
)
from llmtrain.sync.place import Place, users_of
from llmtrain.sync.relay import BEAT_S, Bucket, Json, Puller, Server, Stream, choose_streams
from llmtrain.sync.sockets import make_contexts, reachable
from llmtrain.sync.wire import Wire

SILENCE_S = 40.0


class Agent:
    """What both ends have in common."""

    def __init__(self, wire: Wire, hello: Json) -> None:
        self.wire = wire
        self.hello = hello
        self.server_tls, self.client_tls = make_contexts(hello["pem"])
        self.server = None  # type: Optional[Server]
        self.stream = None  # type: Optional[Stream]

    def listen(self, message: Json) -> Json:
        """Open the port for this sync; where to is decided by the network that is asked for."""
        address = message.get("address") or own_address(message.get("network"), message.get("toward"))
        self.server = Server(self.server_tls, message.get("bind") or address, tuple(message["ports"]))
        self.server.note = self.fail
        if message.get("rate"):
            self.server.bucket = Bucket(message["rate"])
        return {"address": address, "port": self.server.port, "ssh": own_sshd()}

    def fail(self, error: BaseException) -> None:
        """Tell why this is the end."""
        known = isinstance(error, (TreeError, OSError))
        text = str(error) if known else "".join(traceback.format_exception(type(error), error, error.__traceback__))
        self.wire.send("error", error=text, bug=not known)

    def totals(self, _message: Json) -> Json:
        """The last word on what was sent."""
        return self.beat()

    def beat(self) -> Json:
        """What to tell twice a second."""
        sent, refused = (self.server.sent, self.server.refused) if self.server else (0, 0)
        return {"sent": sent, "refused": refused, "cpu_s": time.process_time()}

    def forget(self) -> None:
        """Take away what only this sync needed."""


class Source(Agent):
    """The end that has the tree."""

    def open(self, _message: Json) -> Json:
        """Read the tree."""
        path = self.hello["path"]
        self.scan = Scan(path, self.hello["exclude"], self.hello["follow"])
        self.cache = Cache(os.path.join(os.path.expanduser(self.hello["cache"]), hex_name(path)))
        self.scan.run()
        if self.scan.others:
            raise TreeError("sockets, pipes and devices cannot be copied", self.scan.others[0])
        self.long = self.scan.hash(self.cache, HASHED_AT_ONCE, again=self.hello["checksum"])
        self.cache.write()
        self.reader = None  # type: Optional[SourceReader]
        root = root_digest(self.scan.entries)
        size = sum(entry.size for entry in self.scan.entries if entry.kind == "f")
        return {"files": len(self.scan.entries), "bytes": size, "root": root, "followed": self.scan.followed[:50]}

    def rows(self, _message: Json) -> Json:
        """The entries, for who has another tree."""
        return {"rows": dump(self.scan.entries)}

    def tokens(self, _message: Json) -> Json:
        """Marks that hosts have left here by now: theirs is this very place."""
        return {"tokens": Place(self.hello["dest"], changes=False).tokens() if self.hello["same"] else []}

    def ask(self, message: Json) -> Json:
        """Digests of the blocks of some files."""
        lacking = {self.scan.entries[number].path for number in message["files"]} - set(self.long)
        self.long.update(self.scan.hash(self.cache, -1, lacking))
        found = {str(number): self.long[self.scan.entries[number].path] for number in message["files"]}
        return {"blocks": {number: base64.b64encode(blocks).decode() for number, blocks in found.items()}}

    def start(self, message: Json) -> Json:
        """Serve these chunks."""
        assert self.server is not None
        stream = Stream(self.scan.entries, message["chunks"])
        self.reader = SourceReader(stream, self.scan.full, self.scan.stats)
        for number, entry in enumerate(self.scan.entries):
            if entry.path in self.long:
                self.reader.digests[number] = bytearray(self.long[entry.path])
            elif entry.holes:
                self.reader.digests[number] = fill_holes(entry, bytearray(32 * block_count(entry.size)))
        for chunk in range(len(stream.chunks)):
            stream.mark(chunk)
        self.server.frame, self.server.stream = self.reader.frame, stream
        return {}

    def check(self, _message: Json) -> Json:
        """Has the tree changed since it was read? And what is its digest, now that all of it was read?"""
        entries = []
        for number, entry in enumerate(self.scan.entries):
            table = self.reader.digests.get(number) if self.reader else None
            if entry.kind == "f" and not entry.digest and table:
                entry = entry._replace(digest=combine(entry.size, bytes(table)))
                self.cache.put(self.scan.stats[entry.path], bytes(table), int(time.time() * 1e9))
            entries.append(entry)
        changed = self.scan.changed()
        self.cache.write()
        return {"changed": changed, "root": root_digest(entries)}


class Dest(Agent):
    """A host that gets the tree."""

    hopping = ""
    way = None  # type: Optional[Hop]

    def open(self, _message: Json) -> Json:
        """Look at the destination."""
        self.place = Place(self.hello["dest"])
        self.place.open()
        self.place.put_token(self.hello["token"])
        self.cache = Cache(os.path.join(self.place.state, "hashes"))
        self.puller = None  # type: Optional[Puller]
        self.builder = self.fresh_builder([])
        self.builder.scan()
        stat = os.statvfs(self.place.state)
        return {
            "free_bytes": stat.f_bavail * stat.f_frsize,
            "free_inodes": stat.f_favail if stat.f_files else 1 << 40,
            "exists": os.path.lexists(self.place.dest),
            "made": bool(self.place.record().get("made")),
            "users": users_of(self.place.dest) if self.hello["guard"] and os.path.exists(self.place.dest) else [],
            "generations": len(self.place.generations()),
            "dest": self.place.dest,
        }

    def fresh_builder(self, leftovers: List[str]) -> Builder:
        """A plan to be made."""
        return Builder(self.place.dest, self.place.new, leftovers, self.cache, {"checksum": self.hello["checksum"]})

    def tokens(self, _message: Json) -> Json:
        """Marks of the hosts that see this place."""
        return {"tokens": self.place.tokens()}

    def lock(self, message: Json) -> Json:
        """Take the destination; is it already as it should be?"""
        self.place.lock()
        if self.builder._old is not None and not self.place.can_exchange():
            raise TreeError(
                "this file system (NFS?) cannot swap two folders in one step; sync to a new, versioned path",
                self.place.dest,
            )
        record = self.place.record()
        known = bool(message["root"]) and record.get("root") == message["root"]
        self.known = []  # type: List[Entry]
        same = known and not self.hello["checksum"] and self._unchanged(record, message["delete"])
        if known and not same:
            self.known = self.known or self.place.manifest()
        return {"same": same, "known": known}

    def _unchanged(self, record: Json, delete: bool) -> bool:
        scan = self.builder._old
        if scan is None:
            return False
        if not (delete and record.get("extras", 1)) and record.get("seen") == signature(scan.stats):
            return True
        self.known = self.place.manifest()
        scan.hash(self.cache, -1, set())
        found = diff(self.known, scan.entries)
        return not (found.added or found.changed or found.touched or (delete and found.removed))

    def manifest(self, message: Json) -> Json:
        """Plan the new tree."""
        old = self.builder
        self.builder = self.fresh_builder(self.place.leftovers())
        self.builder._old = old._old
        self.builder.plan(load(message["rows"]) if message["rows"] is not None else self.known)
        return {"asks": self.builder.asks}

    def blocks(self, message: Json) -> Json:
        """What must travel, now that the digests of long files are known."""
        for number, blocks in message["blocks"].items():
            if int(number) in self.builder.asks:
                self.builder.answer(int(number), base64.b64decode(blocks))
        size, inodes = self.builder.need_bytes()
        stat = os.statvfs(self.place.state)
        if size > stat.f_bavail * stat.f_frsize and not self.hello["dry_run"]:
            raise TreeError(
                "disk full: the new tree needs %.1f GiB beside the old one, %.1f GiB are free"
                % (size / 2.0**30, stat.f_bavail * stat.f_frsize / 2.0**30),
                self.place.state,
            )
        if stat.f_files and inodes > stat.f_favail:
            raise TreeError("no inodes: %d are needed, %d are free" % (inodes, stat.f_favail), self.place.state)
        return {"needs": self.builder.needs, "disk_bytes": size, "changes": self._changes()}

    def _changes(self) -> Json:
        found = diff(self.builder.entries, self.builder.have.values())
        return {
            name: [len(getattr(found, name)), [one.path for one in getattr(found, name)[:20]]]
            for name in ("added", "changed", "touched", "removed")
        }

    def start(self, message: Json) -> Json:
        """Build what needs no bytes from elsewhere, and serve it."""
        assert self.server is not None
        builder = self.builder
        self.stream = builder.stream = Stream(builder.entries, message["chunks"])
        builder.make()
        needed = message["needed"]
        lacking = {chunk for first, last in needed for chunk in range(first, last + 1)}
        for chunk in range(len(self.stream.chunks)):
            if chunk not in lacking:
                self.stream.mark(chunk)
        lanes = self.hello["streams"] or choose_streams(len(os.sched_getaffinity(0)))
        self.puller = Puller(self.client_tls, self.stream, sorted(lacking), builder.take, lanes)
        self.server.frame, self.server.stream = builder.frame, self.stream
        return {}

    def reach(self, message: Json) -> Json:
        """Which of these can be connected to."""
        return {"open": reachable(message["places"])}

    def hop(self, message: Json) -> Json:
        """Others may come in through sshd, to the port of this agent only, and this agent may do so with them."""
        assert self.server is not None
        self.hopping = message["sync"]
        allow(message["public"], message["sources"], "%s:%d" % self.server.sock.getsockname(), self.hopping)
        self.way = Hop(message["private"])
        return {}

    def pull(self, message: Json) -> None:
        """Fetch from these peers, best first; finish when everything is here."""
        assert self.puller is not None
        first = not self.puller.peers
        self.puller.hop = self.way
        self.puller.start(message["peers"])
        if first:
            threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        assert self.puller is not None
        try:
            while not self.puller.done:
                if self.puller.failure:
                    raise self.puller.failure
                time.sleep(0.02)
            begun = time.monotonic()
            root = finish.finish(self.builder, not self.hello["delete"], self.hello["exclude"])
            reused = sum(e.size for e in self.builder.entries if e.kind == "f") - self._fetched()
            self.wire.send("built", root=root, finish_s=time.monotonic() - begun, reused=reused, **self.beat())
        except Exception as error:
            self.fail(error)

    def _fetched(self) -> int:
        assert self.puller is not None and self.stream is not None
        return sum(part[3] for chunk in self.puller.needed for part in self.stream.blocks(chunk))

    def commit(self, message: Json) -> Json:
        """Give the new tree its name."""
        if self.hello["guard"] and not message["force"] and os.path.exists(self.place.dest):
            users = users_of(self.place.dest)
            if users:
                raise TreeError("in use by %s; stop it, or --force" % ", ".join(users[:5]), self.place.dest)
        finish.remember(self.builder, int(time.time() * 1e9))
        self.cache.write()
        stats = self.builder.stats
        record = dict(message["record"], seen=signature(stats), extras=len(stats) - len(self.builder.entries))
        self.place.commit(self.builder.entries, record, message["keep"])
        self.builder.new_root = self.place.dest
        return {}

    def rollback(self, _message: Json) -> Json:
        """The tree before this one."""
        self.place.lock()
        return self.place.rollback()

    def forget(self) -> None:
        """The mark, and the key that may come in."""
        if self.hopping:
            forbid(self.hopping)
        if hasattr(self, "place"):
            self.place.drop_token(self.hello["token"])

    def beat(self) -> Json:
        """How far this host is."""
        values = super().beat()
        if self.puller is not None and self.stream is not None:
            events, self.puller.events = self.puller.events, []
            values.update(
                have=self.stream.count,
                left=self.puller.left,
                received=self.puller.received,
                peer=self.puller.current,
                events=events,
            )
        return values


def hex_name(path: str) -> str:
    """A file name for a path."""
    import hashlib

    return hashlib.sha256(os.fsencode(os.path.abspath(path))).hexdigest()[:32]


def keep_time(wire: Wire, agent: Agent) -> None:
    """Tell that this agent lives; end it when nobody listens any more."""
    while True:
        time.sleep(BEAT_S)
        try:
            wire.send("beat", **agent.beat())
        except (OSError, ValueError):
            leave(agent)
        if time.monotonic() - wire.heard > SILENCE_S:
            leave(agent)


def leave(agent: Optional[Agent]) -> None:
    """End, and leave nothing that opens a door."""
    try:
        if agent is not None:
            agent.forget()
    finally:
        os._exit(0)


def main() -> None:
    """Take messages until there are no more."""
    os.umask(0o077)
    sys.setswitchinterval(0.001)
    gc.disable()  # entries of a tree are many and hold no cycles; looking for some costs a third of the time
    wire = Wire()
    hello = wire.receive()
    if hello is None:
        return
    agent = None  # type: Optional[Agent]
    try:
        agent = Source(wire, hello) if hello["role"] == "source" else Dest(wire, hello)
        threading.Thread(target=keep_time, args=(wire, agent), daemon=True).start()
        message = hello  # type: Optional[Json]
        while message is not None:
            if message["kind"] != "beat":
                answer = getattr(agent, message["kind"])(message)
                if answer is not None:
                    wire.send(message["kind"], **answer)
            message = wire.receive()
    except Exception as error:
        if agent is not None:
            agent.fail(error)
        else:
            wire.send("error", error=traceback.format_exc(), bug=True)
        wire.receive()
    finally:
        leave(agent)
