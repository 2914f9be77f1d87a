"""The leash of one rank: what DeepSpeed's launcher starts once per slot.

It starts the rank in a session of its own with output going to a file on this host, records who it is, and ends
it when the launcher's standard input ends (pdsh or ssh died), on a signal, or when the leash itself is killed
(the kernel then kills the rank). It writes the rank's done record if the rank could not.
Standard library only; runs before torch is imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

if __package__ in {None, ""}:  # started by path, since only one plain path may pass through the remote shell
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from llmtrain.process import die_with_parent, start_time, write_json

GRACE_S = 3.0
TAIL_LINES = 20


class Leash:
    """One rank and the record of it."""

    def __init__(self, run_file: str) -> None:
        self.run: dict[str, Any] = json.loads(Path(run_file).read_text(encoding="utf-8"))
        self.run_file = run_file
        self.dir = Path(self.run["run_dir"])
        self.rank = int(os.environ["RANK"])
        self.stopping = False
        self.abandoned = False
        self.log = self.dir / "logs" / f"{self.run['host']}-{self.rank}.log"
        self.kills_before = _memory_kills()

    def start(self) -> subprocess.Popen[bytes]:
        """Start the rank with its output in ``logs/<host>-<rank>.log``."""
        env = {**os.environ, "PYTHONPATH": str(self.dir / "code")}
        with self.log.open("ab") as stream:
            child = subprocess.Popen(
                [sys.executable, "-u", "-m", "llmtrain.train.rank", self.run_file],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env=env,
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509  this program has one thread
            )
        self._record(child.pid)
        return child

    def _record(self, pid: int) -> None:
        write_json(
            self.dir / "ranks" / f"{self.rank}.json",
            {
                "schema": 1,
                "rank": self.rank,
                "local_rank": int(os.environ.get("LOCAL_RANK", "0")),
                "world_size": int(os.environ.get("WORLD_SIZE", "0")),
                "pid": pid,
                "start_time": start_time(pid),
                "leash_pid": os.getpid(),
                "leash_start_time": start_time(os.getpid()),
            },
        )

    def wait(self, child: subprocess.Popen[bytes]) -> int:
        """Wait for the rank's end, ending it when asked to."""
        deadline: float | None = None
        watching = True
        while child.poll() is None:
            if watching and _input_ended(0.2):
                self.stopping, self.abandoned, watching = True, not self.stopping, False
            elif not watching:
                time.sleep(0.1)
            if self.stopping and deadline is None:
                _signal_group(child.pid, signal.SIGTERM)
                deadline = time.monotonic() + GRACE_S
            if deadline is not None and time.monotonic() > deadline:
                _signal_group(child.pid, signal.SIGKILL)
        _signal_group(child.pid, signal.SIGKILL)  # loader processes that outlived their parent
        return child.returncode

    def finish(self, code: int) -> int:
        """Write the done record if the rank did not; return the exit code to pass on."""
        path = self.dir / "done" / f"{self.rank}.json"
        if not path.exists():
            number = -code if code < 0 else None
            write_json(
                path,
                {
                    "schema": 1,
                    "rank": self.rank,
                    "ok": False,
                    "step": self._last_step(),
                    "world_size": int(os.environ.get("WORLD_SIZE", "0")),
                    "error": self._describe(code),
                    "exit_code": None if number else code,
                    "signal": number,
                    "time": time.time(),
                },
            )
        return 128 - code if code < 0 else code

    def _describe(self, code: int) -> dict[str, str | None]:
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if self.abandoned:
            kind, message = "Abandoned", "the launcher's connection to the rank ended (DeepSpeed, pdsh or ssh is gone)"
        elif self.stopping:
            kind, message = "Stopped", f"the rank was told to stop ({how})"
        elif code == -signal.SIGKILL and _memory_kills() > self.kills_before:
            kind, message = (
                "HostOutOfMemory",
                "the kernel killed the rank: the host, or its memory limit, ran out of RAM",
            )
        elif code < 0:
            kind, message = "Killed", f"the rank was {how}"
        else:
            kind, message = "Exited", f"the rank {how} without a record"
        return {"type": kind, "message": message, "where": None, "tail": self._tail()}

    def _tail(self) -> str | None:
        """The last lines the rank printed."""
        try:
            with self.log.open("rb") as stream:
                stream.seek(max(0, stream.seek(0, os.SEEK_END) - 8192))
                lines = stream.read().decode("utf-8", "replace").splitlines()
        except OSError:
            return None
        return "\n".join(lines[-TAIL_LINES:]) or None

    def _last_step(self) -> int:
        try:
            return int(json.loads((self.dir / "beat" / f"{self.rank}.json").read_text(encoding="utf-8"))["step"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0


def _input_ended(timeout_s: float) -> bool:
    """Whether standard input has ended; what arrives on it is dropped."""
    ready, _, _ = select.select([0], [], [], timeout_s)
    return bool(ready) and os.read(0, 4096) == b""


def _memory_kills() -> int:
    """How many processes the kernel has ended for lack of memory since boot, in whichever cgroup."""
    try:
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def main(argv: list[str]) -> int:
    """``RUN_JSON``: run one rank to its end."""
    leash = Leash(argv[0])

    def stop(_number: int, _frame: object) -> None:
        leash.stopping = True

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    return leash.finish(leash.wait(leash.start()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
