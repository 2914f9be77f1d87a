"""Runs on every host: listen for the others, and try to reach them.

Standard library only, Python 3.6 and later, given to the interpreter as text. A listener answers every connection
with a token, so that whoever connects knows that it reached the right machine. It lives until its input ends.
"""

import errno
import json
import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Dict, List, Optional  # noqa: F401  read by the type checker in comments

CONNECT_S = 4.0
ATTEMPTS = 2
RESOLVE_S = 6.0
PING_S = 0.7
HEADERS = 28
MARK_FILE = ".llmtrain-check-"


def serve(request):
    # type: (Dict[str, Any]) -> None
    """Listen on any port of the address, and on the port where ranks will meet if it is here; tell, and wait."""
    tcp = listener(request["address"], 0)
    threading.Thread(target=greet, args=(tcp, request["token"].encode()), daemon=True).start()
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind((request["address"], 0))
    threading.Thread(target=echo, args=(udp,), daemon=True).start()
    answer = {"tcp": tcp.getsockname()[1], "udp": udp.getsockname()[1], "master": None}
    if request.get("master_port"):
        answer["master"] = busy(request["address"], request["master_port"])
    mark = write_mark(request)
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    try:
        sys.stdin.read()
    finally:
        if mark:
            os.unlink(mark)


def listener(address, port):
    # type: (str, int) -> socket.socket
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((address, port))
    sock.listen(128)
    return sock


def busy(address, port):
    # type: (str, int) -> Optional[str]
    """Why nobody could listen there now; None if one can."""
    try:
        listener("", port).close()
        listener(address, port).close()
    except OSError as error:
        return error.strerror
    return None


def greet(sock, token):
    # type: (socket.socket, bytes) -> None
    while True:
        connection, _ = sock.accept()
        with connection:
            try:
                connection.sendall(token)
            except OSError:
                continue


def echo(sock):
    # type: (socket.socket) -> None
    while True:
        data, sender = sock.recvfrom(65536)
        try:
            sock.sendto(data, sender)
        except OSError:
            continue


def write_mark(request):
    # type: (Dict[str, Any]) -> Optional[str]
    """A file that other hosts see only if they share the folder."""
    folder = existing(request["folder"])
    path = os.path.join(folder, MARK_FILE + request["token"])
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except OSError:
        return None
    return path


def existing(folder):
    # type: (str) -> str
    while not os.path.isdir(folder) and folder != "/":
        folder = os.path.dirname(folder)
    return folder


def probe(request):
    # type: (Dict[str, Any]) -> None
    """Reach the peers, resolve names, look for marks; tell what came of it."""
    pool = ThreadPoolExecutor(64)
    reached = {name: pool.submit(reach, *peer) for name, peer in request["peers"].items()}
    pings = {name: pool.submit(ping, *peer) for name, peer in request["pings"].items()}
    names = resolve_all(request["names"])
    marks = seen_marks(request)
    answer = {
        "reached": {name: future.result() for name, future in reached.items()},
        "pings": {name: future.result() for name, future in pings.items()},
        "names": names,
        "marks": marks,
    }
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)  # a resolver may still hang


def reach(address, port, token):
    # type: (str, int, str) -> Optional[str]
    """None if that listener answers, else why not; a lost packet or two do not count."""
    why = None  # type: Optional[str]
    for _ in range(ATTEMPTS):
        try:
            with socket.create_connection((address, port), timeout=CONNECT_S) as connection:
                heard = b""
                while len(heard) < len(token):
                    data = connection.recv(64)
                    if not data:
                        break
                    heard += data
                if heard == token.encode():
                    return None
                why = "something else answers there"
        except socket.timeout:
            why = "timed out"
        except OSError as error:
            why = error.strerror or str(error)
    return why


def ping(address, port, mtu):
    # type: (str, int, int) -> Dict[str, bool]
    """Whether small datagrams and unfragmented ones of the full size come back."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setsockopt(socket.IPPROTO_IP, 10, 2)  # IP_MTU_DISCOVER, IP_PMTUDISC_DO
    sock.connect((address, port))
    sock.settimeout(PING_S)
    small = any([exchange(sock, 64) for _ in range(3)])
    large = small and any(exchange(sock, mtu - HEADERS) for _ in range(5))
    return {"small": small, "large": large}


def exchange(sock, size):
    # type: (socket.socket, int) -> bool
    try:
        sock.send(os.urandom(16).ljust(size, b"x"))
        return len(sock.recv(65536)) == size
    except OSError as error:
        if error.errno == errno.ECONNREFUSED:
            time.sleep(PING_S)
        return False


def resolve_all(names):
    # type: (List[str]) -> Dict[str, Optional[List[str]]]
    """Name -> IPv4 addresses; empty where there is none, None where no answer came in time."""
    pool = ThreadPoolExecutor(16)
    futures = {name: pool.submit(resolve, name) for name in names}
    deadline = time.monotonic() + RESOLVE_S
    found = {}  # type: Dict[str, Optional[List[str]]]
    for name, future in futures.items():
        try:
            found[name] = future.result(max(0.01, deadline - time.monotonic()))
        except Exception:  # a time-out has another class before Python 3.11; resolve() itself answers for its errors
            found[name] = None
    return found


def resolve(name):
    # type: (str) -> List[str]
    try:
        return sorted({str(item[4][0]) for item in socket.getaddrinfo(name, None, socket.AF_INET)})
    except OSError:
        return []


def seen_marks(request):
    # type: (Dict[str, Any]) -> List[str]
    """Hosts whose marks are in our folder, too."""
    try:
        there = set(os.listdir(existing(request["folder"])))
    except OSError:
        return []
    return [host for host, token in request["marks"].items() if MARK_FILE + token in there]
