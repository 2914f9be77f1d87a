"""Whether a host that no longer answers us is gone, or there and frozen."""

from __future__ import annotations

import socket
from typing import Literal

from llmtrain.cluster.sshconfig import read_target
from llmtrain.errors import LlmtrainError

Door = Literal["answers", "silent", "gone", "unknown"]
"""``silent``: the kernel takes a connection, but sshd says nothing on it."""
WAIT_S = 3.0


def run_knock(name: str) -> Door:
    """Connect to a host's sshd and wait for its first line; hosts behind a jump host are not asked."""
    try:
        target = read_target(name)
        if target.proxy:
            return "unknown"
        with socket.create_connection((target.address, target.port), timeout=WAIT_S) as door:
            door.settimeout(WAIT_S)
            return "answers" if door.recv(64) else "gone"
    except TimeoutError:
        return _told_apart(name)
    except (OSError, LlmtrainError):
        return "gone"


def _told_apart(name: str) -> Door:
    """A time-out while connecting means that nobody is there; after it, that nobody speaks."""
    target = read_target(name)
    try:
        with socket.create_connection((target.address, target.port), timeout=WAIT_S):
            return "silent"
    except OSError:
        return "gone"
