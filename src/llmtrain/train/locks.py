"""One run at a time on an accelerator: locks that the kernel holds for the guardian and drops with it.

The files lie where every user of the host can open them, so colleagues see each other; what counts is the lock, not
the file, so a file that is left behind means nothing. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pwd
import stat
import time
from pathlib import Path
from typing import Any

PLACES = ("/run/lock", "/tmp")  # noqa: S108  one place that all users of a host know; opened without following links
LIMIT = 4096


class Locks:
    """Accelerators of this host, all of them or none."""

    def __init__(self, run_id: str, folder: Path | None = None) -> None:
        self.run_id = run_id
        self.folder = folder or next((Path(place) for place in PLACES if os.access(place, os.W_OK)), Path(PLACES[-1]))
        self._held: list[int] = []

    def take(self, names: list[str]) -> dict[str, dict[str, Any]]:
        """Take all of them; if some cannot be had none is taken, and what is known of their holders is returned."""
        busy: dict[str, dict[str, Any]] = {}
        taken: list[int] = []
        for name in sorted(names):
            fd = self._open(name)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                taken.append(fd)
            except OSError:
                busy[name] = _read_holder(fd)
                os.close(fd)
        if busy:
            for fd in taken:
                os.close(fd)
            return busy
        for fd in taken:
            self._sign(fd)
        self._held += taken
        return {}

    def _open(self, name: str) -> int:
        """Open without following a link that somebody else may have put there.

        Raises:
            OSError: it cannot be made.
        """
        path = self.folder / f"llmtrain-{name}.lock"
        flags = os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            # Without O_CREAT first: in a sticky folder the kernel may refuse it on a file of another user's.
            return os.open(path, os.O_RDWR | flags)
        except FileNotFoundError:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o666)
            with contextlib.suppress(OSError):
                os.fchmod(fd, 0o666)  # whatever the umask: the next user must be able to open it
            return fd
        except PermissionError:  # another user's umask was stronger; a lock can be taken on what can only be read
            return os.open(path, os.O_RDONLY | flags)

    def _sign(self, fd: int) -> None:
        """Say who holds it, for those who find it held."""
        uid = os.getuid()
        with contextlib.suppress(KeyError):
            user = pwd.getpwuid(uid).pw_name
            text = json.dumps({"run": self.run_id, "user": user, "pid": os.getpid(), "since": int(time.time())})
            with contextlib.suppress(OSError):
                os.ftruncate(fd, 0)
                os.pwrite(fd, text.encode(), 0)


def _read_holder(fd: int) -> dict[str, Any]:
    """What the holder wrote; it may be a program that writes nothing, or anything."""
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return {}
        found = json.loads(os.pread(fd, LIMIT, 0))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
