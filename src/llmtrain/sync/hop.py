"""Through the sshd of the host before, where no other port of it can be reached.

Part of the agent: standard library only, Python 3.6 and later. For one sync a key is made that opens nothing but the
port of one agent: no shell, no command, no other port, only from hosts of the sync, for one day. The TLS of the sync
goes through this channel unchanged, so the host's SSH key need not be known: a wrong host has no certificate.
"""

import fcntl
import os
import pwd
import socket
import struct
import subprocess
import time
from typing import Any, Dict, Iterable, List, Optional

Json = Dict[str, Any]
MARK = "llmtrain-hop"
VALID_S = 86400
OPTIONS = (
    "BatchMode=yes",
    "IdentitiesOnly=yes",
    "IdentityAgent=none",
    "StrictHostKeyChecking=no",
    "UserKnownHostsFile=/dev/null",
    "GlobalKnownHostsFile=/dev/null",
    "LogLevel=ERROR",
    "ConnectTimeout=10",
    "Ciphers=aes128-gcm@openssh.com,aes256-gcm@openssh.com,chacha20-poly1305@openssh.com,aes128-ctr",
)


def own_sshd() -> Optional[Json]:
    """Where this host's sshd was reached, and as whom; None without SSH."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    if len(words) != 4:
        return None
    return {"user": pwd.getpwuid(os.getuid()).pw_name, "address": words[2], "port": int(words[3])}


def own_address(network: Optional[str], toward: Optional[str]) -> str:
    """This host's address: on a network or interface that is named, else where SSH came in, else toward a host."""
    if network and "/" not in network:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            found = fcntl.ioctl(sock.fileno(), 0x8915, struct.pack("256s", network.encode()[:15]))
            return socket.inet_ntoa(found[20:24])
    words = os.environ.get("SSH_CONNECTION", "").split()
    if not network and len(words) == 4 and ":" not in words[2]:
        return words[2]
    goal = network.split("/")[0] if network else toward or "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((goal, 9))
        return str(sock.getsockname()[0])


def allow(key: str, sources: Iterable[str], target: str, sync: str) -> None:
    """Let the key of this sync reach one port of this host; lines that have expired go."""
    until = time.time() + VALID_S
    line = 'restrict,port-forwarding,permitopen="%s",command="/bin/false",from="%s",expiry-time="%s" %s %s-%s-%d' % (
        target,
        ",".join(sorted(sources)),
        time.strftime("%Y%m%d%H%M", time.localtime(until)),
        key,
        MARK,
        sync,
        until,
    )
    _change(lambda lines: [one for one in lines if not _expired(one)] + [line])


def forbid(sync: str) -> None:
    """Take the line of this sync away."""
    _change(lambda lines: [one for one in lines if "%s-%s-" % (MARK, sync) not in one and not _expired(one)])


def _expired(line: str) -> bool:
    name = line.rpartition(" ")[2].strip()
    return name.startswith(MARK + "-") and float(name.rpartition("-")[2]) < time.time()


def _change(edit: Any) -> None:
    """Replace the file of authorized keys in one step, one sync after the other."""
    folder = os.path.expanduser("~/.ssh")
    path = os.path.realpath(os.path.join(folder, "authorized_keys"))
    os.makedirs(folder, mode=0o700, exist_ok=True)
    guard = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(guard, fcntl.LOCK_EX)
        try:
            with open(path, errors="surrogateescape") as stream:
                lines, mode = stream.read().splitlines(), os.fstat(stream.fileno()).st_mode & 0o777
        except FileNotFoundError:
            lines, mode = [], 0o600
        wanted = edit(lines)
        if wanted == lines:
            return
        temp = "%s.%d" % (path, os.getpid())
        with open(os.open(temp, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, mode), "w", errors="surrogateescape") as stream:
            stream.write("".join(one + "\n" for one in wanted))
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temp, path)
    finally:
        os.close(guard)


class Hop:
    """The private key, in memory only, and the ssh children it is used by."""

    def __init__(self, key: str) -> None:
        if hasattr(os, "memfd_create"):
            self.fd = os.memfd_create("llmtrain")
        else:
            import tempfile

            self.fd, name = tempfile.mkstemp(dir="/dev/shm")
            os.unlink(name)
        os.fchmod(self.fd, 0o600)
        os.write(self.fd, key.encode())
        self._children = []  # type: List[subprocess.Popen[bytes]]

    def open(self, peer: Json) -> socket.socket:
        """A connection to a peer's port, carried by an ssh child that ends with it."""
        self._children = [child for child in self._children if child.poll() is None]
        where = peer["ssh"]
        options = [word for option in OPTIONS for word in ("-o", option)]
        path = "/proc/%d/fd/%d" % (os.getpid(), self.fd)
        target = "%s:%d" % (peer["address"], peer["port"])
        argv = ["ssh", "-F", "/dev/null", "-T"] + options + ["-i", path, "-p", str(where["port"]), "-W", target]
        ours, theirs = socket.socketpair()
        try:
            child = subprocess.Popen(
                argv + ["%s@%s" % (where["user"], where["address"])],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._children.append(child)
        return ours
