"""Start DeepSpeed's launcher and end it without its own clean-up, which kills other people's runs.

Two ways, one interface: DeepSpeed's runner through pdsh, and its launcher on each host over our own connections.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from llmtrain.errors import LauncherError
from llmtrain.process import die_with_parent, send, start_time

if TYPE_CHECKING:
    from llmtrain.cluster.fleet import Channel, Fleet
    from llmtrain.launch.prepare import LaunchPlan
    from llmtrain.launch.rundir import RunDir


# One line with the exit code comes after all that the launcher prints; without it, it did not end by itself.
_TELL_CODE = 'cd /; "$@" 2>&1; printf "\\nllmtrain-exit %s\\n" $?'
_CODE_MARK = b"llmtrain-exit "


class Launcher(Protocol):
    """What started the ranks and holds them."""

    def poll(self) -> int | None:
        """Exit code, or None while it runs; negative if it did not end by itself. Zero proves nothing."""

    def note(self) -> None:
        """Called now and then while it runs."""

    def end(self) -> None:
        """End all of it at once."""


def execute(plan: LaunchPlan, run_dir: RunDir, fleet: Fleet) -> Launcher:
    """Start the planned command.

    Raises:
        LauncherError: it cannot be started.
        HostError: a host cannot be reached.
    """
    return SshLauncher(plan, run_dir, fleet) if plan.launcher == "ssh" else _start_runner(plan, run_dir)


class SshLauncher:
    """DeepSpeed's launcher on each host; it and its ranks live as long as our channel to it."""

    def __init__(self, plan: LaunchPlan, run_dir: RunDir, fleet: Fleet) -> None:
        self._log = run_dir.launcher_log
        self._lock = threading.Lock()
        self._codes: dict[str, int] = {}
        self._channels: dict[str, Channel] = {}
        try:
            for number, host in enumerate(plan.hosts):
                argv = ("/bin/sh", "-c", _TELL_CODE, "sh", *plan.node_argv(number))
                self._channels[host.name] = fleet[host.name].start(argv)
        except BaseException:  # Ctrl-C too: what has started is ended before anybody hears of it
            self.end()
            raise
        for name, channel in self._channels.items():
            threading.Thread(target=self._listen, args=(name, channel), daemon=True).start()

    def _listen(self, name: str, channel: Channel) -> None:
        rest, code = b"", -signal.SIGKILL
        while data := channel.read():
            *lines, rest = (rest + data).split(b"\n")
            told = [line for line in lines if line.startswith(_CODE_MARK)]
            if told:
                code = int(told[-1].removeprefix(_CODE_MARK))
            self._write(name, [line for line in lines if line and line not in told])
        with self._lock:
            self._codes[name] = code

    def _write(self, name: str, lines: list[bytes]) -> None:
        text = b"".join(name.encode() + b": " + line + b"\n" for line in lines)
        with self._lock, self._log.open("ab") as log:
            log.write(text)

    def poll(self) -> int | None:
        """The first code that is not 0, at once; 0 when every host has ended with it."""
        with self._lock:
            bad = [code for code in self._codes.values() if code != 0]
            if bad:
                return bad[0]
            return 0 if len(self._codes) == len(self._channels) else None

    def note(self) -> None:
        """Nothing to remember: no process of ours is in between."""

    def end(self) -> None:
        """Close the channels: the leashes see their input end."""
        for channel in self._channels.values():
            channel.close()


class PdshLauncher:
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


def _start_runner(plan: LaunchPlan, run_dir: RunDir) -> PdshLauncher:
    """Start DeepSpeed's runner.

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
    return PdshLauncher(process)


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
