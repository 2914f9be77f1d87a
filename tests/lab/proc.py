"""Processes by pid and start time: record, find, end. Never by name."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.lab.model import LabError

if TYPE_CHECKING:
    from collections.abc import Sequence

DEAD = "ZX"
END_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Stat:
    """What /proc/PID/stat says."""

    state: str
    """One letter; Z and X are dead."""
    parent: int
    """Pid of the parent."""
    start_time: int
    """Clock ticks since boot, field 22."""


def read_stat(pid: int) -> Stat | None:
    """The process's state, or None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Stat(state=fields[0], parent=int(fields[1]), start_time=int(fields[19]))


def boot_id() -> str:
    """Start times repeat after a reboot; this does not."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass(frozen=True, kw_only=True)
class Identity:
    """One process, for as long as this machine stays up."""

    pid: int
    """As this machine sees it."""
    start_time: int
    """Clock ticks since boot, field 22 of /proc/PID/stat."""
    boot_id: str
    """Which boot of this machine."""

    @classmethod
    def of(cls, pid: int) -> Identity:
        """Identity of a process that is there now."""
        stat = read_stat(pid)
        if stat is None:
            raise LabError(f"process {pid} is gone")
        return cls(pid=pid, start_time=stat.start_time, boot_id=boot_id())

    @classmethod
    def read(cls, path: Path) -> Identity | None:
        """The recorded identity, or None where none (or half of one) was recorded."""
        try:
            return cls(**json.loads(path.read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def write(self, path: Path) -> None:
        """Record it."""
        path.write_text(json.dumps(asdict(self)))

    def alive(self) -> bool:
        """Whether this very process still runs."""
        stat = read_stat(self.pid)
        return stat is not None and stat.state not in DEAD and self._same(stat.start_time)

    def _same(self, start_time: int) -> bool:
        return start_time == self.start_time and boot_id() == self.boot_id

    def send(self, sig: int, *, ends_within: float | None = None) -> None:
        """Signal this process if it is still there, and wait for its end if told.

        Through a pidfd, so that no other process can be meant.
        """
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            if not self.alive():
                return
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, sig)
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            if ends_within is not None and not poll.poll(ends_within * 1000):
                raise LabError(f"process {self.pid} did not end within {ends_within} s after signal {sig}")
        finally:
            os.close(fd)

    def end(self, sig: int = signal.SIGKILL) -> None:
        """Signal it and wait until it is gone."""
        self.send(sig, ends_within=END_S)


@dataclass(frozen=True, kw_only=True)
class Process:
    """A running process of a host."""

    pid: int
    """As the host sees it."""
    outer_pid: int
    """As this machine sees it."""
    start_time: int
    """Field 22 of /proc/PID/stat; the same inside and outside."""
    argv: tuple[str, ...]
    """Its command line; sshd and others rewrite theirs."""
    environ: dict[str, str]
    """Its environment at exec."""

    @property
    def is_sshd(self) -> bool:
        """Whether it is the host's ssh daemon or one of its sessions."""
        return bool(self.argv) and self.argv[0].startswith(("sshd:", "sshd-session:", "/usr/sbin/sshd"))


def namespace(pid: int, kind: str) -> str | None:
    """Name of a process's namespace, or None if the process is gone."""
    try:
        return str(Path(f"/proc/{pid}/ns/{kind}").readlink())
    except OSError:
        return None


def outer_pids(init: int, kind: str = "pid") -> list[int]:
    """Pids (as seen here) of all processes that share a namespace with `init`, without `init`."""
    wanted = namespace(init, kind)
    pids = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    return [pid for pid in pids if pid != init and wanted and namespace(pid, kind) == wanted]


def end_host(init: Identity) -> None:
    """SIGKILL a PID 1, with all its processes, and wait.

    The nsenter of a stopped command is stopped too and would never reap it; the kernel would wait for that for ever.
    """
    stat = read_stat(init.pid)
    if stat is None or not init.alive():
        return
    if namespace(init.pid, "mnt") == namespace(os.getpid(), "mnt"):
        raise LabError(f"process {init.pid} is not a host's PID 1")
    carriers = set(outer_pids(init.pid, "mnt")) - {*outer_pids(init.pid), stat.parent}
    known = [Identity.of(pid) for pid in carriers if read_stat(pid)]
    init.send(signal.SIGKILL)
    for carrier in known:
        carrier.send(signal.SIGKILL)
    init.end()


def read_process(outer_pid: int) -> Process | None:
    """The process, or None if it has ended meanwhile."""
    stat = read_stat(outer_pid)
    if stat is None or stat.state in DEAD:
        return None
    root = Path(f"/proc/{outer_pid}")
    try:
        status = (root / "status").read_text(errors="replace")
        argv = (root / "cmdline").read_bytes().decode(errors="replace").split("\0")
        environ = (root / "environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    inner = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[-1]
    return Process(
        pid=int(inner),
        outer_pid=outer_pid,
        start_time=stat.start_time,
        argv=tuple(argv[:-1]),
        environ=dict(item.partition("=")[::2] for item in environ if item),
    )


class HostProcess(subprocess.Popen):
    """A command on a host. Signals go to the command, not to the nsenter that carries it."""

    def __init__(self, carrier: Sequence[str], argv: Sequence[str], **options: Any) -> None:
        self._carrier, self._argv = list(carrier), list(argv)
        super().__init__([*carrier, *argv], **options)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            self.kill_group()  # else a failing test would wait for the command's end
        super().__exit__(kind, *rest)

    def inner_pid(self) -> int | None:
        """Pid of the command as this machine sees it, as soon as it runs; None once it has ended."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        while self.poll() is None:
            with contextlib.suppress(OSError, IndexError):
                inner = int(children.read_text().split()[0])
                if not self._is_carrier(Path(f"/proc/{inner}/cmdline").read_text().split("\0")[:-1]):
                    return inner
            time.sleep(0.002)
        return None

    def _is_carrier(self, argv: list[str]) -> bool:
        """Whether a process has not become the command yet."""
        whole = [*self._carrier, *self._argv]
        return len(argv) > len(self._argv) and argv == whole[-len(argv) :]

    def send_signal(self, sig: int) -> None:
        """Signal the command; nsenter stops with it, so it has to be continued with it."""
        inner = self.inner_pid()
        if inner is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(inner, sig)
            if sig == signal.SIGCONT:
                os.kill(self.pid, sig)

    def kill_group(self) -> None:
        """SIGKILL the command and all it started that did not leave its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
