"""The way of chunks between agents: what is bad on the wire, who may ask."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
from pathlib import Path

import pytest
from tests.sync.chainbox import describe, sync

from llmtrain.sync import chain
from llmtrain.sync.blocks import SourceReader
from llmtrain.sync.build import Builder
from llmtrain.sync.certs import make_certificates
from llmtrain.sync.manifest import SMALL, Cache, Scan, TreeError
from llmtrain.sync.relay import HEADER, Puller, Server, Stream
from llmtrain.sync.sockets import connect, make_contexts, receive


class Proxy:
    """Passes bytes to a port; flips one byte of the answers, the first `times` connections (the first only knocks)."""

    def __init__(self, address: str, port: int, times: int) -> None:
        self.target = (address, port)
        self.left = times
        self.sock = socket.create_server(("127.0.0.1", 0))
        self.port = self.sock.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self.sock.accept()
            except OSError:
                return
            server = socket.create_connection(self.target)
            self.left -= 1
            for source, sink, bad in ((client, server, False), (server, client, self.left >= 0)):
                threading.Thread(target=self._pump, args=(source, sink, bad), daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket, bad: bool) -> None:
        passed = 0
        try:
            while data := source.recv(65536):
                if bad and passed <= 100_000 < passed + len(data):
                    at = 100_000 - passed
                    data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
                passed += len(data)
                sink.sendall(data)
        except OSError:
            pass
        source.close()
        sink.close()


@pytest.mark.parametrize(("times", "again"), [(1, [True]), (99, [True, False])])
def test_a_byte_flipped_in_flight_is_asked_for_again_and_then_elsewhere(tmp_path, monkeypatch, times, again):
    """One bad byte costs one more request to the same host; a host that keeps failing is left for the next one."""
    real = chain.Chain.peer
    proxies = {}

    def through_proxy(self, name):
        peer = real(self, name)
        if name != "h1":
            return peer
        proxy = proxies.setdefault(name, Proxy(peer["address"], peer["port"], times))
        return {**peer, "address": "127.0.0.1", "port": proxy.port}

    monkeypatch.setattr(chain.Chain, "peer", through_proxy)
    source = tmp_path / "source"
    source.mkdir()
    (source / "big").write_bytes(os.urandom(8 * SMALL))
    troubles = []
    report = sync(source, tmp_path, tell=lambda what, values: troubles.append(values) if what == "trouble" else None)
    proxies["h1"].sock.close()
    assert report.ok
    assert [one["again"] for one in troubles] == again
    assert {one["host"] for one in troubles} == {"h2"}
    assert describe(source) == describe(tmp_path / "h2/tree")


def test_several_connections_share_the_chunks_of_big_files(tmp_path):
    """Three connections a host bring every chunk, each once."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("one", "two"):
        (source / name).write_bytes(os.urandom(40 * SMALL + 17))
    report = sync(source, tmp_path, streams=3)
    size = 2 * (40 * SMALL + 17)
    assert report.ok
    assert all(size < host.bytes_sent < 1.01 * size for host in report.hosts)
    assert describe(source) == describe(tmp_path / "h2/tree")


def test_a_host_that_has_everything_may_be_told_of_new_peers():
    """The order to pull from elsewhere reaches hosts that are done too, when one before them fails late."""
    puller = Puller(ssl.create_default_context(), Stream([], []), [], lambda chunk, frame: True)
    for _ in range(2):
        puller.start([{"host": "other"}])
    assert puller.done


@pytest.fixture
def served(tmp_path):
    """A server with one file, its certificates, and the contexts of a member."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source/file").write_bytes(b"secret" * 1000)
    scan = Scan(str(tmp_path / "source")).run()
    scan.hash(Cache(), 1 << 30)
    pems = make_certificates(["a.test", "b.test"])
    server = Server(make_contexts(pems["a.test"])[0], "127.0.0.1", (20000, 29999))
    stream = Stream(scan.entries, [[[1, 0, 0]]])
    stream.mark(0)
    server.frame, server.stream = SourceReader(stream, scan.full, scan.stats).frame, stream
    yield server, pems
    server.close()


def ask(context: ssl.SSLContext, port: int, name: str) -> bytes:
    """The first chunk a server gives."""
    conn = connect(context, {"address": "127.0.0.1", "port": port, "name": name})
    try:
        conn.sendall(b'{"ranges": [[0, 0]]}\n')
        header = bytearray(HEADER.size)
        receive(conn, memoryview(header))
        return bytes(header)
    finally:
        conn.close()


def test_a_member_is_served(served):
    """A certificate of this sync opens the port."""
    server, pems = served
    assert HEADER.unpack(ask(make_contexts(pems["b.test"])[1], server.port, "a.test"))[2] == 32 + 6000


def test_a_stranger_gets_nothing(served):
    """Without a certificate, or with one of another sync, not one byte of the tree is told."""
    server, _ = served
    anonymous = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anonymous.check_hostname, anonymous.verify_mode = False, ssl.CERT_NONE
    other = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    other.check_hostname, other.verify_mode = False, ssl.CERT_NONE
    pem = make_certificates(["b.test"])["b.test"]
    path = f"/proc/self/fd/{os.memfd_create('pem')}"
    Path(path).write_text(pem["cert"] + pem["key"])
    other.load_cert_chain(path)
    os.close(int(path.rpartition("/")[2]))
    for context in (anonymous, other):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            ask(context, server.port, "a.test")
    with socket.create_connection(("127.0.0.1", server.port)) as plain:
        plain.sendall(b'{"ranges": [[0, 0]]}\n')
        with contextlib.suppress(ConnectionResetError):
            assert b"secret" not in plain.recv(65536)


def test_a_server_with_the_wrong_name_is_not_believed(served):
    """A host pulls only from the very member it was told."""
    server, pems = served
    with pytest.raises(ssl.SSLError):
        ask(make_contexts(pems["b.test"])[1], server.port, "c.test")


def test_a_chunk_whose_bytes_differ_from_its_digest_is_not_taken(tmp_path):
    """A host with bad memory or disk on the way is noticed by the next one, and nothing is written."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source/file").write_bytes(b"x" * 1000)
    scan = Scan(str(tmp_path / "source")).run()
    scan.hash(Cache(), 1 << 30)
    builder = Builder(str(tmp_path / "old"), str(tmp_path / "new"), [], Cache(), {})
    builder.plan(scan.entries)
    builder.stream = Stream(scan.entries, [[[1, 0, 0]]])
    builder.make()
    good = bytearray(b"".join(SourceReader(builder.stream, scan.full, scan.stats).frame(0)))
    bad = bytearray(good)
    bad[-1] ^= 1
    with pytest.raises(TreeError, match="bad chunk"):
        builder.take(0, bad)
    assert not (tmp_path / "new/file").exists()
    assert builder.take(0, good)
    assert (tmp_path / "new/file").read_bytes() == b"x" * 1000
