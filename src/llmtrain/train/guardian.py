"""The guardian of one run on one host: reports to the head, and ends the run's processes when the head is gone.

The head starts it over a channel of its own. It tells, as JSON lines on standard output, what the ranks write on
this host (records, heartbeats, metrics, log text), and hears ``{"ping": n}``, ``{"save": true}`` (ranks are to save
and end), ``{"hold": names}`` (checkpoints that must stay), ``{"dump": true}`` (what are they doing?),
``{"lock": names}`` (take these accelerators for the run) and ``{"stop": seconds}``. When its standard input ends, or no
ping came for the lease, it ends every process of the run on this host. Log files are read from disk, so a head that
does not listen never holds up a rank. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

if __package__ in {None, ""}:  # started by path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from llmtrain.process import end_marked, start_time, write_json
from llmtrain.train.kernellog import KernelLog
from llmtrain.train.locks import Locks
from llmtrain.train.stacks import read_stacks

PERIOD_S = 0.2
USAGE_S = 5.0
SHM = Path("/dev/shm")  # noqa: S108  where DeepSpeed's C++ puts its buffers
CHUNK = 64 * 1024
BACKLOG = 1 << 20
"""Bytes kept for a head that does not listen; log text beyond stays on disk until it does."""


class Output:
    """Standard output that never blocks."""

    def __init__(self) -> None:
        os.set_blocking(1, False)
        self.pending = bytearray()

    def put(self, event: str, **fields: Any) -> None:
        """Queue one event."""
        self.pending += json.dumps({"event": event, **fields}).encode() + b"\n"

    def flush(self) -> None:
        """Write what the pipe takes."""
        while self.pending:
            try:
                sent = os.write(1, self.pending[:CHUNK])
            except BlockingIOError:
                return
            del self.pending[:sent]

    def flush_within(self, limit_s: float) -> None:
        """Write all of it, or as much as the pipe takes within the limit."""
        deadline = time.monotonic() + limit_s
        while self.pending and time.monotonic() < deadline:
            try:
                self.flush()
            except OSError:
                return  # nobody is there any more
            time.sleep(0.02)


class Guardian:
    """State of the watch over one run folder."""

    def __init__(self, run_dir: str, run_id: str, lease_s: float, meeting: str) -> None:
        self.dir = Path(run_dir)
        self.run_id = run_id
        self.lease_s = lease_s
        self.meeting = meeting
        self.out = Output()
        self.seen: dict[Path, int] = {}
        self.offsets: dict[Path, int] = {}
        self.records: dict[int, dict[str, Any]] = {}
        self.done: set[int] = set()
        self.last_ping = time.monotonic()
        self.heard = bytearray()
        self.locks = Locks(run_id)
        self.wanted: list[str] = []
        self.busy: dict[str, dict[str, Any]] = {}
        self.reported = float("-inf")
        self.checkpoints = _find_checkpoints(self.dir)
        self.kernel = KernelLog()

    def look(self, *, last: bool = False) -> None:
        """Report whatever is new on disk; with ``last``, to the end of every file."""
        for kind in ("ranks", "beat", "done"):
            self._new_records(kind)
        if len(self.out.pending) < BACKLOG or last:
            for path in [*sorted((self.dir / "logs").glob("*.log")), self.dir / "metrics.jsonl"]:
                while self._more_text(path, last=last) and last:
                    pass
        lines = self.kernel.read()
        if lines:
            self.out.put("kernel", lines=lines)
        self._sealed()
        self._gone()
        self._lock()

    def _lock(self) -> None:
        """Take the accelerators of the run as soon as nobody holds one of them, and say who does until then."""
        if not self.wanted:
            return
        try:
            busy = self.locks.take(self.wanted)
        except OSError as error:
            busy = {self.wanted[0]: {"problem": f"{error.filename}: {error.strerror}"}}
        if not busy:
            self.wanted = []
            self.out.put("locked")
        elif busy != self.busy:
            self.out.put("busy", holders=busy)
        self.busy = busy

    def _new_records(self, kind: str) -> None:
        for path in sorted((self.dir / kind).glob("[0-9]*.json")):
            with contextlib.suppress(OSError, ValueError):
                stamp = path.stat().st_mtime_ns
                if self.seen.get(path) == stamp:
                    continue
                record = json.loads(path.read_text(encoding="utf-8"))
                self.seen[path] = stamp
                if kind == "ranks":
                    self.records[record["rank"]] = record
                elif kind == "done":
                    self.done.add(record["rank"])
                self.out.put(kind, record=record)

    def _sealed(self) -> None:
        """Tell of each checkpoint once; hosts that share a disk tell the same of its manifest."""
        for path in sorted(self.checkpoints.glob("step-*/manifest.json")):
            if path not in self.seen:
                with contextlib.suppress(OSError):
                    stat = path.stat()
                    self.seen[path] = stat.st_mtime_ns
                    self.out.put("sealed", name=path.parent.name, token=f"{stat.st_ino}-{stat.st_mtime_ns}")

    def _more_text(self, path: Path, *, last: bool) -> bool:
        offset = self.offsets.get(path, 0)
        try:
            with path.open("rb") as stream:
                stream.seek(offset)
                data = stream.read(CHUNK)
        except OSError:
            return False
        if path.suffix == ".jsonl" and not last:
            data = data[: data.rfind(b"\n") + 1]
        if not data:
            return False
        self.offsets[path] = offset + len(data)
        self.out.put("text", file=path.name, data=data.decode("utf-8", "surrogateescape"))
        return True

    def _gone(self) -> None:
        """A rank whose leash and process are both gone without a done record will never write one."""
        for rank, record in list(self.records.items()):
            pids = ((record["pid"], record["start_time"]), (record["leash_pid"], record["leash_start_time"]))
            if rank in self.done or any(start_time(pid) == begun for pid, begun in pids):
                continue
            self._new_records("done")
            if rank not in self.done:
                self.out.put("gone", rank=rank, free_bytes=_free_bytes(self.dir))
            del self.records[rank]

    def hear(self) -> float | None:
        """Read commands; the grace in seconds when the run is to be stopped."""
        ready, _, _ = select.select([0], [], [], PERIOD_S)
        if ready:
            data = os.read(0, CHUNK)
            if not data:
                return 2.0  # the head is gone
            self.heard += data
        while b"\n" in self.heard:
            line, _, rest = self.heard.partition(b"\n")
            self.heard = bytearray(rest)
            command = json.loads(line)
            if "stop" in command:
                return float(command["stop"])
            self._obey(command)
        if time.monotonic() - self.last_ping > self.lease_s:
            return 2.0
        return None

    def _obey(self, command: dict[str, Any]) -> None:
        if "lock" in command:
            self.wanted = list(command["lock"])
        if "save" in command:
            write_json(self.dir / "stop.json", {"schema": 1})
        if "hold" in command:
            with contextlib.suppress(OSError):  # what goes too early is only copied again
                write_json(self.checkpoints / ".held.json", {"schema": 1, "names": command["hold"]})
        if "dump" in command:
            self.out.put("stacks", ranks=read_stacks(self.dir, self.records))
        self.last_ping = time.monotonic()
        if "ping" in command:
            self.out.put("pong", n=command["ping"])
            self._report_usage()

    def _report_usage(self) -> None:
        """Memory of the host and of its ranks, now and then."""
        if time.monotonic() - self.reported < USAGE_S:
            return
        self.reported = time.monotonic()
        ranks = {rank: _kibibytes(f"/proc/{record['pid']}/status", "VmRSS:") for rank, record in self.records.items()}
        total, available = (_kibibytes("/proc/meminfo", key) for key in ("MemTotal:", "MemAvailable:"))
        self.out.put("usage", total=total, available=available, ranks=ranks)

    def stop(self, grace_s: float) -> None:
        """End everything of this run on this host, report what is left and the last of the logs."""
        left = end_marked(self.run_id, grace_s=grace_s)
        remove_buffers(self.meeting)
        (self.dir / "env.json").unlink(missing_ok=True)
        self.look(last=True)
        self.out.put("stopped", left=[{"pid": pid, "start_time": begun} for pid, begun in left.items()])
        self.out.flush_within(20.0)


def _find_checkpoints(run_dir: Path) -> Path:
    """Where the run's file says that they are."""
    try:
        return Path(json.loads((run_dir / "run.json").read_text(encoding="utf-8"))["checkpoints"])
    except (OSError, ValueError, KeyError):
        return run_dir / "checkpoints"


def remove_buffers(meeting: str, folder: Path = SHM) -> None:
    """Remove what DeepSpeed's ranks on processors share in memory: it never does, and a run leaves 66 MiB a rank.

    Args:
        meeting: address and port at which the ranks met, as they stand in the names (csrc/cpu/comm/shm.cpp).
        folder: where the kernel shows shared memory.
    """
    for path in folder.glob(f"deepspeed_allreduce_buffer_{os.getuid()}_{meeting}_*"):
        with contextlib.suppress(OSError):
            path.unlink()


def _kibibytes(path: str, key: str) -> int | None:
    """Bytes that a line of a file in /proc says in kibibytes."""
    try:
        lines = Path(path).read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key)), None)


def _free_bytes(path: Path) -> int:
    """Space on the disk of a folder; with none, nobody there could write a record of why it ended."""
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize


def main(argv: list[str]) -> None:
    """``RUN_DIR RUN_ID LEASE_SECONDS ADDRESS_PORT``: watch until told to stop."""
    with contextlib.suppress(OSError):
        os.setsid()
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    guardian = Guardian(argv[0], argv[1], float(argv[2]), argv[3])
    guardian.out.put("hello", pid=os.getpid())
    grace: float | None = None
    while grace is None:
        guardian.look()
        with contextlib.suppress(OSError):
            guardian.out.flush()
        grace = guardian.hear()
    guardian.stop(grace)


if __name__ == "__main__":
    main(sys.argv[1:])
