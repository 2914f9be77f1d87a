"""Messages between an agent and the program that coordinates, over standard input and output.

Part of the agent: standard library only, Python 3.6 and later.
"""

import os
import struct
import sys
import threading
import time
import zlib
from json import dumps, loads
from typing import Any, Dict, Optional

LENGTH = struct.Struct(">I")
Json = Dict[str, Any]


class Wire:
    """Messages to and from the program that coordinates."""

    def __init__(self) -> None:
        self.source = sys.stdin.buffer
        self.sink = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)  # whatever prints now cannot disturb the messages
        self.heard = time.monotonic()
        self._lock = threading.Lock()

    def send(self, kind: str, **values: Any) -> None:
        """One message."""
        data = zlib.compress(dumps(dict(values, kind=kind)).encode(), 1)
        with self._lock:
            self.sink.write(LENGTH.pack(len(data)) + data)
            self.sink.flush()

    def receive(self) -> Optional[Json]:
        """The next message, or None at the end."""
        head = self.source.read(LENGTH.size)
        if len(head) < LENGTH.size:
            return None
        data = self.source.read(LENGTH.unpack(head)[0])
        self.heard = time.monotonic()
        return dict(loads(zlib.decompress(data).decode()))
