"""Runs on two hosts: how fast bytes move between them over each of several addresses.

One stdlib-only file for Python 3.6 and later, given to the interpreter as text. The receiver measures, since a
sender only sees how fast its buffers fill.
"""

import json
import socket
import sys
import threading
import time
from typing import Dict, List, Optional  # noqa: F401  read by the type checker in comments

SECONDS = 0.4
LIMIT = 64 << 20
WAIT_S = 5.0


def serve(addresses):
    # type: (List[str]) -> None
    """Listen on every address, tell the ports, answer each connection with its rate; end with standard input."""
    ports = {}
    for address in addresses:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind((address, 0))
        listener.listen(1)
        ports[address] = listener.getsockname()[1]
        threading.Thread(target=receive, args=(listener,), daemon=True).start()
    sys.stdout.write(json.dumps(ports) + "\n")
    sys.stdout.flush()
    sys.stdin.read()


def receive(listener):
    # type: (socket.socket) -> None
    """Take one connection and answer with megabits per second."""
    connection, _ = listener.accept()
    connection.settimeout(WAIT_S)
    buffer = bytearray(1 << 18)
    total = connection.recv_into(buffer)
    begun = last = time.monotonic()
    first = total
    while True:
        count = connection.recv_into(buffer)
        if not count:
            break
        total += count
        last = time.monotonic()
    rate = (total - first) * 8 / max(last - begun, 1e-6) / 1e6
    connection.sendall(json.dumps(rate).encode())
    connection.close()


def measure(ports):
    # type: (Dict[str, int]) -> None
    """Send to every address for a moment, one after the other, and tell the rates; null where nothing arrives."""
    rates = {}  # type: Dict[str, Optional[float]]
    for address, port in sorted(ports.items()):
        try:
            rates[address] = send(address, port)
        except (OSError, ValueError):
            rates[address] = None
    sys.stdout.write("\n" + json.dumps({"rates": rates}) + "\n")


def send(address, port):
    # type: (str, int) -> float
    """Megabits per second to one address, as its receiver saw it."""
    block = bytes(1 << 17)
    with socket.create_connection((address, port), timeout=WAIT_S) as connection:
        # A small buffer, or a slow link would still be emptying it long after the moment is over.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)
        deadline = time.monotonic() + SECONDS
        sent = 0
        while time.monotonic() < deadline and sent < LIMIT:
            connection.sendall(block)
            sent += len(block)
        connection.shutdown(socket.SHUT_WR)
        return float(json.loads(connection.recv(64).decode()))
