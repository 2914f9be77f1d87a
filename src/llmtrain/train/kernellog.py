"""What the kernel of this host says about its accelerators while a run lives (standard library only)."""

from __future__ import annotations

import os

WORDS = (b"NVRM: Xid",)
CHUNK = 8192


class KernelLog:
    """New lines of the kernel's log; without the right to read it there are none."""

    def __init__(self, path: str = "/dev/kmsg") -> None:
        self._handle = -1
        try:
            self._handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._handle, 0, os.SEEK_END)
        except OSError:
            self.close()

    def read(self) -> list[str]:
        """Lines about accelerators since the last time."""
        lines: list[str] = []
        while self._handle >= 0:
            try:
                record = os.read(self._handle, CHUNK)  # one record a call
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue  # records were overwritten before we came
            except OSError:
                self.close()
                break
            if not record:
                break
            if any(word in record for word in WORDS):
                lines.append(record.partition(b";")[2].decode("utf-8", "replace").splitlines()[0])
        return lines

    def close(self) -> None:
        """Read no more."""
        if self._handle >= 0:
            os.close(self._handle)
        self._handle = -1
