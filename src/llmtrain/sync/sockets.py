"""Sockets of agents: listening, mutual TLS, connecting, reading whole frames.

Part of the agent: standard library only, Python 3.6 and later.
"""

import contextlib
import fcntl
import os
import socket
import ssl
import struct
import termios
import threading
import time
from typing import Any, Dict, Iterator, List, Optional, Tuple

from llmtrain.sync.hop import Hop
from llmtrain.sync.manifest import TreeError

CONNECT_S = 2.5
HOP_S = 20.0
GATHER = 128 * 1024
"""Bytes to let arrive before they are looked at: on a slow link every packet would wake the receiver otherwise."""
GATHER_S = 0.002
Json = Dict[str, Any]


def make_contexts(pem: Json) -> Tuple[ssl.SSLContext, ssl.SSLContext]:
    """TLS for serving and for pulling; only members of this one sync can speak to each other.

    The private key is never a named file: the kernel's memory file, or an unlinked one in memory, holds it.
    """
    contexts = []
    for purpose in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(purpose)
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=pem["ca"])
        with _memory_file((pem["cert"] + pem["key"]).encode()) as path:
            context.load_cert_chain(path)
        contexts.append(context)
    return contexts[0], contexts[1]


@contextlib.contextmanager
def _memory_file(content: bytes) -> Iterator[str]:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("llmtrain")
    else:
        import tempfile

        fd, name = tempfile.mkstemp(dir="/dev/shm")
        os.unlink(name)
    try:
        os.write(fd, content)
        yield "/proc/self/fd/%d" % fd
    finally:
        os.ftruncate(fd, 0)
        os.close(fd)


def listen(address: str, ports: Tuple[int, int]) -> socket.socket:
    """A listening socket on a port of the range; on any port if the range is (0, 0)."""
    import random

    choices = random.sample(range(ports[0], ports[1] + 1), min(200, ports[1] - ports[0] + 1))
    for port in choices:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.bind((address, port))
            sock.listen(64)
            return sock
        except OSError as error:
            sock.close()
            problem = error
    raise TreeError("no free port from %d to %d (%s)" % (ports[0], ports[1], problem.strerror))


def connect(context: ssl.SSLContext, peer: Json, hop: Optional[Hop] = None) -> ssl.SSLSocket:
    """A TLS connection to a peer, whose certificate must carry its name in this sync."""
    if peer.get("ssh") and hop is not None:
        raw = hop.open(peer)
        raw.settimeout(HOP_S)
    else:
        raw = socket.create_connection((peer["address"], peer["port"]), timeout=CONNECT_S)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        return context.wrap_socket(raw, server_hostname=peer["name"])
    except BaseException:  # whatever it is goes on; only the socket must not leak
        raw.close()
        raise


def reachable(places: List[List[Any]]) -> List[bool]:
    """Whether a connection to each (address, port) is accepted."""
    found = [False] * len(places)

    def knock(number: int) -> None:
        try:
            socket.create_connection((places[number][0], places[number][1]), timeout=CONNECT_S).close()
            found[number] = True
        except OSError:
            pass

    threads = [threading.Thread(target=knock, args=(number,)) for number in range(len(places))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def receive(conn: ssl.SSLSocket, view: memoryview) -> None:
    """Fill the buffer."""
    at = gathered = 0
    while at < len(view):
        if at >= gathered and len(view) - at >= GATHER:
            gathered = at + _gather(conn)
        count = conn.recv_into(view[at:])
        if not count:
            raise ConnectionError("the connection closed")
        at += count


def _gather(conn: ssl.SSLSocket) -> int:
    """Wait a little until there is something worth reading; bytes that may be read before the next look."""
    there = -1
    for _ in range(4):
        before, room = there, struct.pack("i", 0)
        (there,) = struct.unpack("i", fcntl.ioctl(conn.fileno(), termios.FIONREAD, room))
        if there >= GATHER or there == before:
            break
        time.sleep(GATHER_S)
    return int(max(there, GATHER // 2))
