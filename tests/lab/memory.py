"""A memory limit for one host, with cgroup v1 or v2."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.lab.model import LabError

if TYPE_CHECKING:
    from collections.abc import Iterable

V1 = Path("/sys/fs/cgroup/memory")
V2 = Path("/sys/fs/cgroup")
REMOVE_S = 5.0


def _make_v2(group: Path) -> None:
    if "memory" not in (V2 / "cgroup.controllers").read_text().split():
        raise LabError("this kernel has no memory cgroup")
    if "memory" not in (V2 / "cgroup.subtree_control").read_text().split():
        (V2 / "cgroup.subtree_control").write_text("+memory")
    group.mkdir(exist_ok=True)


class MemoryGroup:
    """The cgroup of one host; made when it is first limited."""

    def __init__(self, name: str) -> None:
        self.v1 = (V1 / "memory.limit_in_bytes").exists()
        self.path = (V1 if self.v1 else V2) / name

    def enrol(self, pids: Iterable[int]) -> None:
        """Move processes in; their children follow."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                (self.path / "cgroup.procs").write_text(str(pid))

    def limit(self, mb: int | None) -> None:
        """Set the limit in MiB, swap included; None lifts it."""
        try:
            self._make()
            for name, value in self._settings(mb):
                (self.path / name).write_text(value)
        except OSError as error:
            raise LabError(f"cannot limit memory through {self.path}: {error}") from error

    def _make(self) -> None:
        if self.v1:
            self.path.mkdir(exist_ok=True)
        else:
            _make_v2(self.path)

    def _settings(self, mb: int | None) -> list[tuple[str, str]]:
        size = None if mb is None else str(mb * 2**20)
        if not self.v1:
            swap = [("memory.swap.max", "0" if size else "max")] if (self.path / "memory.swap.max").exists() else []
            return [("memory.max", size or "max"), *swap]
        both = [("memory.limit_in_bytes", size or "-1"), ("memory.memsw.limit_in_bytes", size or "-1")]
        if not (self.path / both[1][0]).exists():
            return both[:1]
        # the kernel wants memory <= memory + swap at every moment
        lift = [("memory.memsw.limit_in_bytes", "-1")]
        return lift + both

    def remove(self) -> None:
        """Delete the group; the kernel may need a moment to see the last process go."""
        deadline = time.monotonic() + REMOVE_S
        while self.path.exists():
            with contextlib.suppress(OSError):
                self.path.rmdir()
                return
            if time.monotonic() > deadline:
                raise LabError(f"could not remove {self.path}")
            time.sleep(0.02)
