"""Runs on every host for ``check --links``: rate, latency and loss from one host to another.

Standard library only, Python 3.6 and later, given to the interpreter as text.
"""

import json
import socket
import sys
import threading
import time
from typing import Any, Dict, List, Optional  # noqa: F401  read by the type checker in comments

SECONDS = 1.5
WARM_S = 0.4
WAIT_S = 10.0
PINGS = 200
GAP_S = 0.002


def serve(address):
    # type: (str) -> None
    """Take any number of connections and datagrams; tell the ports; end with standard input."""
    tcp = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    tcp.bind((address, 0))
    tcp.listen(16)
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind((address, 0))
    threading.Thread(target=take, args=(tcp,), daemon=True).start()
    threading.Thread(target=echo, args=(udp,), daemon=True).start()
    sys.stdout.write(json.dumps({"tcp": tcp.getsockname()[1], "udp": udp.getsockname()[1]}) + "\n")
    sys.stdout.flush()
    sys.stdin.read()


def take(listener):
    # type: (socket.socket) -> None
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=receive, args=(connection,), daemon=True).start()


def receive(connection):
    # type: (socket.socket) -> None
    """Answer with megabits per second; what arrives at first filled the buffers of shapers and switches."""
    connection.settimeout(WAIT_S)
    buffer = bytearray(1 << 18)
    total = 0
    begun = last = None  # type: Optional[float]
    with connection:
        first = time.monotonic()
        while True:
            count = connection.recv_into(buffer)
            now = time.monotonic()
            if not count:
                break
            if begun is None:
                begun = now if now - first > WARM_S else None
                continue
            total += count
            last = now
        rate = total * 8 / max(last - begun, 1e-6) / 1e6 if begun and last else 0.0
        connection.sendall(json.dumps(rate).encode())


def echo(sock):
    # type: (socket.socket) -> None
    while True:
        data, sender = sock.recvfrom(2048)
        sock.sendto(data, sender)


def measure(request):
    # type: (Dict[str, Any]) -> None
    """Datagrams first, then as many bytes as go through."""
    answer = {"mbits": 0.0, "latency_ms": None, "loss": 1.0}  # type: Dict[str, Any]
    try:
        seen = ping(request["address"], request["udp"])
        for _ in range(2):
            if seen["loss"] == 0:
                break
            time.sleep(0.3)  # what the round before left in a queue is no loss of the link's
            seen = min(seen, ping(request["address"], request["udp"]), key=lambda one: one["loss"])
        answer.update(seen)
        answer["mbits"] = send(request["address"], request["tcp"])
    except (OSError, ValueError) as error:
        answer["error"] = str(error)
    sys.stdout.write("\n" + json.dumps(answer) + "\n")


def ping(address, port):
    # type: (str, int) -> Dict[str, Any]
    """Share of datagrams that did not come back, and the median time of those that did."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.connect((address, port))
    times = []  # type: List[float]
    listener = threading.Thread(target=collect, args=(sock, times), daemon=True)
    listener.start()
    for number in range(PINGS):
        sock.send(json.dumps([number, time.monotonic()]).encode())
        time.sleep(GAP_S)
    listener.join(1.0)
    times.sort()
    middle = times[len(times) // 2] * 1000 if times else None
    return {"loss": 1 - len(times) / PINGS, "latency_ms": middle}


def collect(sock, times):
    # type: (socket.socket, List[float]) -> None
    while len(times) < PINGS:
        try:
            times.append(time.monotonic() - json.loads(sock.recv(2048).decode())[1])
        except (OSError, ValueError):
            return


def send(address, port):
    # type: (str, int) -> float
    """Megabits per second as the receiver saw them."""
    block = bytes(1 << 16)
    with socket.create_connection((address, port), timeout=WAIT_S) as connection:
        # A small buffer, or a slow link would still be emptying it long after the moment is over.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 17)
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            connection.sendall(block)
        connection.shutdown(socket.SHUT_WR)
        return float(json.loads(connection.recv(64).decode()))
