"""A way back: a port on a host that leads to a port the head can reach, through one OpenSSH child."""

from __future__ import annotations

import re
import subprocess
import threading

from llmtrain.cluster.local import kill_group
from llmtrain.cluster.sshconfig import SAFE_OPTIONS, option
from llmtrain.errors import HostError

OPEN_S = 20.0
_OTHER = frozenset({"ClearAllForwardings", "LogLevel"})


class Tunnel:
    """Open as long as this object is not closed."""

    def __init__(self, name: str, address: str, port: int) -> None:
        options = [part for key, value in SAFE_OPTIONS if key not in _OTHER for part in option(key, value)]
        options += [*option("ExitOnForwardFailure", "yes"), *option("Ciphers", "^aes128-gcm@openssh.com")]
        forward = f"127.0.0.1:0:{address}:{port}"
        # "Allocated port N" is said at this level; a quieter ssh would not tell which port it got.
        argv = ["ssh", "-N", "-T", *options, *option("LogLevel", "INFO"), "-R", forward, "--", name]
        self._process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
        )
        self.port = self._read_port(name)

    def _read_port(self, name: str) -> int:
        timer = threading.Timer(OPEN_S, self._process.kill)
        timer.start()
        text = ""
        try:
            for line in self._process.stderr or ():
                text = line.decode("utf-8", "replace").strip()
                if match := re.search(r"Allocated port (\d+) ", text):
                    return int(match[1])
        finally:
            timer.cancel()
        self.close()
        raise HostError(
            f"no tunnel back to the head: {text or 'no answer'}",
            where=name,
            fix="AllowTcpForwarding remote in sshd_config",
        )

    def close(self) -> None:
        """End it."""
        if self._process.poll() is None:
            kill_group(self._process)
        if self._process.stderr:
            self._process.stderr.close()
