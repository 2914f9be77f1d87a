"""How chunks travel between agents: mutual TLS, each host pulls from its predecessor while that one still receives.

Part of the agent: standard library only, Python 3.6 and later. A request names the chunks a host lacks; the answer is
these chunks, each as soon as it is there, with the digests of its blocks. A chunk counts only once every block of it
has the digest that came with it from the source; a host hands on the digests it was given, never its own, so a bad
disk or memory on the way is noticed by the next one.
"""

import collections
import contextlib
import json
import socket
import ssl
import struct
import threading
import time
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple, Union

from llmtrain.sync.hop import Hop
from llmtrain.sync.manifest import MIB, Entry, TreeError, block_size
from llmtrain.sync.sockets import connect, listen, receive

HEADER = struct.Struct(">BIQ")
DATA, WAIT = 1, 2
RING_BYTES = 32 * MIB
STALL_S = 2.5
SEND_S = 30.0
BEAT_S = 0.5
PIECE = 256 * 1024
STRIPE_CHUNKS = 4
"""Chunks in a row that one connection fetches where there are several."""
Json = Dict[str, Any]
Bytes = Union[bytes, bytearray]


class Stream:
    """The chunks that some host lacks, in the order they travel, and which of them are here."""

    def __init__(self, entries: List[Entry], chunks: List[List[List[int]]]) -> None:
        self.entries = entries
        self.chunks = chunks
        self.have = bytearray(len(chunks))
        self.count = 0
        self.changed = threading.Condition(threading.RLock())
        self.closed = False
        self._ring = collections.OrderedDict()  # type: collections.OrderedDict[int, List[Bytes]]
        self._ring_bytes = 0

    def blocks(self, chunk: int) -> Iterator[Tuple[int, int, int, int]]:
        """(file, block, offset, length) of every block of a chunk."""
        for file, first, last in self.chunks[chunk]:
            size = self.entries[file].size
            step = block_size(size)
            for block in range(first, last + 1):
                yield file, block, block * step, min(step, size - block * step)

    def mark(self, chunk: int, frame: Optional[List[Bytes]] = None) -> bool:
        """This chunk is here now; True if it was not before."""
        with self.changed:
            fresh = not self.have[chunk]
            self.have[chunk] = 1
            self.count += fresh
            if frame:
                self.keep(chunk, frame)
            self.changed.notify_all()
        return fresh

    def keep(self, chunk: int, frame: List[Bytes]) -> None:
        """Hold a recent chunk in memory: the next host wants it now."""
        with self.changed:
            if chunk not in self._ring:
                self._ring[chunk] = frame
                self._ring_bytes += sum(map(len, frame))
            while self._ring_bytes > RING_BYTES and len(self._ring) > 1:
                self._ring_bytes -= sum(map(len, self._ring.popitem(last=False)[1]))

    def recent(self, chunk: int) -> Optional[List[Bytes]]:
        """The chunk if it is still in memory."""
        with self.changed:
            return self._ring.get(chunk)

    def close(self) -> None:
        """Wake everybody up for the end."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()


class Bucket:
    """Lets a number of bytes pass in a second."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.free_at = time.monotonic()
        self._lock = threading.Lock()

    def take(self, count: int) -> None:
        """Wait until these bytes may pass."""
        with self._lock:
            self.free_at = max(self.free_at, time.monotonic() - 0.1) + count / self.rate
            pause = self.free_at - time.monotonic()
        if pause > 0:
            time.sleep(pause)


class Server:
    """Hands chunks to the hosts that ask."""

    def __init__(self, context: ssl.SSLContext, address: str, ports: Tuple[int, int]) -> None:
        self.context = context
        self.sock = listen(address, ports)
        self.port = self.sock.getsockname()[1]
        self.stream = None  # type: Optional[Stream]
        self.frame = None  # type: Optional[Callable[[int], List[Bytes]]]
        self.bucket = None  # type: Optional[Bucket]
        self.sent = 0
        self.refused = 0
        self.note = lambda error: None  # type: Callable[[Exception], None]
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                conn, _ = self.sock.accept()
            except OSError:
                return
            threading.Thread(target=self._guard, args=(conn,), daemon=True).start()

    def _guard(self, raw: socket.socket) -> None:
        raw.settimeout(SEND_S)
        try:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            conn = self.context.wrap_socket(raw, server_side=True)
        except (OSError, ValueError):
            self.refused += 1  # a stranger, or one who hung up: nothing was told to it
            raw.close()
            return
        try:
            self._serve(conn)
        except OSError:
            pass  # it left; it asks again, here or elsewhere
        except Exception as error:
            self.note(error)
        finally:
            conn.close()

    def _serve(self, conn: ssl.SSLSocket) -> None:
        with conn.makefile("rb") as reader:
            request = json.loads(reader.readline(16 * MIB).decode())
        while self.stream is None or self.frame is None:
            time.sleep(0.02)
            if self.sock.fileno() < 0:
                return
        stream = self.stream
        for first, last in request["ranges"]:
            for chunk in range(first, last + 1):
                while not stream.have[chunk]:
                    with stream.changed:
                        if stream.closed:
                            return
                        ready = stream.have[chunk] or (stream.changed.wait(BEAT_S) and stream.have[chunk])
                    if not ready:
                        conn.sendall(HEADER.pack(WAIT, stream.count, 0))
                frame = stream.recent(chunk)
                if frame is None:
                    frame = self.frame(chunk)
                    stream.keep(chunk, frame)
                self._send(conn, HEADER.pack(DATA, chunk, sum(map(len, frame))), frame)

    def _send(self, conn: ssl.SSLSocket, header: bytes, frame: List[Bytes]) -> None:
        conn.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)  # or every record of 16 KiB ends in a short packet
        conn.sendall(header)
        step = PIECE if self.bucket else 4 * MIB
        for part in frame:
            view = memoryview(part)
            for at in range(0, len(part), step):
                piece = view[at : at + step]
                if self.bucket:
                    self.bucket.take(len(piece))
                conn.sendall(piece)
        conn.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 0)
        with self._lock:
            self.sent += len(header) + sum(map(len, frame))

    def close(self) -> None:
        """Stop listening."""
        self.sock.close()


class Puller:
    """Fetches the chunks this host lacks from the first peer that gives them, over one connection or several."""

    def __init__(
        self,
        context: ssl.SSLContext,
        stream: Stream,
        needed: List[int],
        take: Callable[..., bool],
        lanes: int = 1,
    ) -> None:
        self.context = context
        self.stream = stream
        self.needed = needed
        self.left = len(needed)
        self.take = take
        self.lanes = lanes
        self.peers = []  # type: List[Json]
        self.hop = None  # type: Optional[Hop]
        self.current = ""
        self.received = 0
        self.events = []  # type: List[Json]
        self.failure = None  # type: Optional[Exception]
        self._turn = 0
        self._version = 0
        self._started = False
        self._lock = threading.Lock()

    def start(self, peers: List[Json]) -> None:
        """Begin; later calls change where the chunks come from."""
        self.peers = peers
        self._turn = 0
        self._version += 1
        if not self._started:
            self._started = True
            for lane in range(self.lanes):
                threading.Thread(target=self._run, args=(lane,), daemon=True).start()

    @property
    def done(self) -> bool:
        """Everything is here."""
        return not self.failure and not self.left

    def missing(self, lane: int = 0) -> List[List[int]]:
        """What this connection still has to fetch, as ranges: stripes of chunks take turns."""
        numbered = enumerate(self.needed)
        mine = (chunk for at, chunk in numbered if at // STRIPE_CHUNKS % self.lanes == lane)
        return ranges(chunk for chunk in mine if not self.stream.have[chunk])

    def _run(self, lane: int) -> None:
        bad = collections.Counter()  # type: collections.Counter[str]
        while not self.failure and self.missing(lane):
            peers, turn, version = self.peers, self._turn, self._version
            peer = peers[turn % len(peers)]
            self.current = peer["host"]
            before = self.stream.count
            try:
                self._pull(peer, version, lane)
                continue
            except TreeError as error:
                if error.args[0].startswith("disk"):
                    self.failure = error
                    return
                reason, again = str(error), bad[peer["host"]] == 0
            except (ssl.SSLError, ConnectionError) as error:
                reason, again = str(error) or type(error).__name__, bad[peer["host"]] == 0
            except OSError as error:
                reason, again = str(error) or "no answer", False
            except Exception as error:
                self.failure = error
                return
            if self.stream.count > before:
                again = again or ("bad" not in reason and bad[peer["host"]] < 3)
            bad[peer["host"]] += 1
            self._note({"peer": peer["host"], "problem": reason, "again": again})
            if not again and version == self._version:
                self._turn = turn + 1
            time.sleep(0.05 if self._turn < 2 * len(peers) else 1.0)

    def _note(self, event: Json) -> None:
        """Told once, although every connection to a peer that went sees it go."""
        if event not in self.events:
            self.events.append(event)

    def _pull(self, peer: Json, version: int, lane: int) -> None:
        wanted = self.missing(lane)
        coming = sum(last - first + 1 for first, last in wanted)
        with contextlib.closing(connect(self.context, peer, self.hop)) as conn:
            conn.settimeout(SEND_S)
            conn.sendall(json.dumps({"ranges": wanted}).encode() + b"\n")
            conn.settimeout(STALL_S)
            header = bytearray(HEADER.size)
            while coming and not self.failure:
                receive(conn, memoryview(header))
                kind, chunk, length = HEADER.unpack(header)
                if kind == DATA:
                    if length > 64 * MIB or chunk >= len(self.stream.chunks):
                        raise TreeError("bad frame")
                    frame = bytearray(length)
                    receive(conn, memoryview(frame))
                    fresh = self.take(chunk, frame)
                    coming -= 1
                    with self._lock:
                        self.received += HEADER.size + length
                        self.left -= fresh
                if version != self._version and self.peers[0]["host"] != peer["host"]:
                    return


def choose_streams(cores: int) -> int:
    """Connections a host pulls over: one takes a core of each end, and a job may be running beside it."""
    return max(1, min(4, cores // 4))


def ranges(numbers: Any) -> List[List[int]]:
    """Ascending numbers as [first, last] pairs."""
    found = []  # type: List[List[int]]
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return found
