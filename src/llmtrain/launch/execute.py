"""Start DeepSpeed's launcher and end it without its own clean-up, which kills other people's runs."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.errors import LauncherError
from llmtrain.process import die_with_parent, send, start_time

if TYPE_CHECKING:
    from llmtrain.launch.prepare import LaunchPlan
    from llmtrain.launch.rundir import RunDir


class Launcher:
    """DeepSpeed's runner, pdsh and its ssh clients: one process tree in a session of its own."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._known: dict[int, int] = {}
        self._noted = 0.0

    def poll(self) -> int | None:
        """Exit code of the runner, or None while it runs. Zero proves nothing."""
        return self._process.poll()

    def note(self, *, every_s: float = 1.0) -> None:
        """Remember who is in the tree now: once the runner is gone its children have another parent."""
        if time.monotonic() - self._noted < every_s:
            return
        self._noted = time.monotonic()
        for pid in _descendants(self._process.pid):
            begun = start_time(pid)
            if begun is not None:
                self._known[pid] = begun

    def end(self) -> None:
        """End the whole tree at once.

        The runner answers INT and TERM with a ``pkill`` on every host, so it only ever sees KILL; pdsh leaves its
        ssh clients behind when it is killed, so they are ended one by one.
        """
        self.note(every_s=0.0)
        if self._process.poll() is None:
            self._process.kill()
        for pid, begun in self._known.items():
            send(pid, begun, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin:
            self._process.stdin.close()


def execute(plan: LaunchPlan, run_dir: RunDir) -> Launcher:
    """Start the planned command.

    Its standard input is a pipe we hold: the ranks of a local run end when it does.

    Raises:
        LauncherError: it cannot be started.
    """
    with run_dir.launcher_log.open("ab") as log:
        try:
            process = subprocess.Popen(
                plan.argv(run_dir),
                cwd="/",  # exists on every host, and holds no .deepspeed_env of a cloned repository
                env=plan.env(run_dir),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509  nothing but a system call between fork and exec
            )
        except OSError as error:
            raise LauncherError(
                f"DeepSpeed's launcher cannot be started: {error.strerror}", where="head", fix="python -m deepspeed -h"
            ) from None
    return Launcher(process)


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208  names, not paths
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry))
    found, queue = [], [pid]
    while queue:
        queue.extend(below := children.get(queue.pop(), []))
        found.extend(below)
    return found
