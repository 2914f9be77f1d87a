"""The channel to one agent: messages out without ever blocking, messages in onto one queue."""

from __future__ import annotations

import contextlib
import json
import queue
import struct
import threading
import time
import zlib
from typing import TYPE_CHECKING, Any

from llmtrain.sync.bundle import agent_text

if TYPE_CHECKING:
    from llmtrain.cluster.fleet import Channel, Transport

LENGTH = struct.Struct(">I")
Inbox = queue.Queue["tuple[str, dict[str, Any]]"]


def encode(kind: str, **values: Any) -> bytes:
    """A message as it travels."""
    data = zlib.compress(json.dumps({**values, "kind": kind}).encode(), 1)
    return LENGTH.pack(len(data)) + data


class AgentLink:
    """An agent on a host, over a channel that ends it."""

    def __init__(self, name: str, transport: Transport, argv: tuple[str, ...], inbox: Inbox) -> None:
        self.name = name
        self.inbox = inbox
        self.heard = time.monotonic()
        self.sent_bytes = 0
        self.received_bytes = 0
        self._outbox: queue.Queue[bytes | None] = queue.Queue()
        self._channel: Channel = transport.start(argv)
        self._outbox.put(agent_text())
        self._threads = [threading.Thread(target=task, daemon=True) for task in (self._write, self._read)]
        for thread in self._threads:
            thread.start()

    def send(self, kind: str, **values: Any) -> None:
        """Queue a message."""
        self.post(encode(kind, **values))

    def post(self, message: bytes) -> None:
        """Queue a message that is encoded already: the same one for many hosts is encoded once."""
        self.sent_bytes += len(message)
        self._outbox.put(message)

    def close(self) -> None:
        """End the agent."""
        self._outbox.put(None)
        self._threads[0].join(1.0)
        with contextlib.suppress(OSError):
            self._channel.close()
        self._threads[1].join(1.0)

    def _write(self) -> None:
        while (data := self._outbox.get()) is not None:
            try:
                self._channel.write(data)
            except (OSError, ValueError):
                return

    def _read(self) -> None:
        buffer = b""
        while True:
            try:
                part = self._channel.read()
            except (OSError, ValueError):
                part = b""
            if not part:
                break
            self.heard = time.monotonic()
            self.received_bytes += len(part)
            buffer += part
            if buffer.startswith(b"NOPYTHON"):
                self.inbox.put((self.name, {"kind": "nopython"}))
                return
            while len(buffer) >= LENGTH.size and len(buffer) >= LENGTH.size + LENGTH.unpack(buffer[: LENGTH.size])[0]:
                end = LENGTH.size + LENGTH.unpack(buffer[: LENGTH.size])[0]
                message = json.loads(zlib.decompress(buffer[LENGTH.size : end]))
                buffer = buffer[end:]
                self.inbox.put((self.name, message))
        self.inbox.put((self.name, {"kind": "gone"}))
