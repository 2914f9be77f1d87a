"""Talking to the hosts of a lab: commands, files, processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path
from subprocess import DEVNULL, PIPE, CompletedProcess
from typing import TYPE_CHECKING, Any

from tests.lab.memory import MemoryGroup
from tests.lab.model import CommandFailedError, LabError, address, host_names
from tests.lab.proc import HostProcess, Identity, Process, outer_pids, read_process

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.lab.state import LabState

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENVIRON = {"PATH": PATH, "HOME": "/root", "USER": "root", "LOGNAME": "root", "SHELL": "/bin/bash", "LANG": "C.UTF-8"}
if source := os.environ.get("PYTHONPATH"):
    ENVIRON["PYTHONPATH"] = source  # a checkout beside the one that is installed is tested in the lab as well
ENTER = ("-m", "-u", "-i", "-n", "-p")
WRITE_SCRIPT = 'mkdir -p -- "$(dirname -- "$1")" && cat >"$1"'
ENROL_SCRIPT = 'echo $$ >"$0" && exec "$@"'
DRAIN_S = 5.0


class Hosts:
    """The hosts of a running lab."""

    def __init__(self, state: LabState) -> None:
        self.state = state
        self.faults = state.faults
        self.node_count, self.options = state.read()
        self.names = host_names(self.node_count)

    @property
    def nodes(self) -> list[str]:
        """All hosts but the head."""
        return self.names[1:]

    def address(self, host: str, nic: str = "eth0") -> str:
        """The host's IPv4 address; eth1 is the second network."""
        return address(self.options, self._known(host), nic)

    def is_on(self, host: str) -> bool:
        """Whether the host has power."""
        return self.state.identity(self._known(host)) is not None

    def identity(self, host: str) -> Identity:
        """The host's PID 1."""
        identity = self.state.identity(self._known(host))
        if identity is None:
            raise LabError(f"{host} is off")
        return identity

    def carrier(self, host: str, cwd: str = "/root") -> list[str]:
        """The words before an argv that make it run in the host's namespaces (and under its memory limit)."""
        target = ["-t", str(self.identity(host).pid), *ENTER]
        words = [shutil.which("nsenter") or "nsenter", *target, "--", "/usr/bin/env", "-C", cwd, "--"]
        if self.faults.has("memory", host):
            return ["/bin/sh", "-c", ENROL_SCRIPT, str(self.memory_group(host).path / "cgroup.procs"), *words]
        return words

    def popen(
        self,
        host: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "/root",
        **options: Any,
    ) -> HostProcess:
        """Start a command on a host, in a session of its own; options are Popen's (text mode unless told otherwise).

        The environment is that of a fresh root login plus `env`. Signals sent through the result reach the command.
        """
        options = {"stdin": DEVNULL, "text": True, "errors": "replace", **options}
        if options["text"] is False:
            options.pop("errors")
        environ = {**ENVIRON, **(env or {})}
        return HostProcess(self.carrier(host, cwd), argv, env=environ, start_new_session=True, **options)

    def run(
        self,
        host: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        input: str | None = None,  # noqa: A002 - the name subprocess.run has
        cwd: str = "/root",
        timeout: float = 60.0,
        check: bool = True,
    ) -> CompletedProcess[str]:
        """Run a command on a host to its end; its process group is killed when time is up.

        Raises:
            CommandFailedError: out of time, or (with `check`) an exit code other than 0.
        """
        stdin = DEVNULL if input is None else PIPE
        with self.popen(host, argv, env=env, cwd=cwd, stdin=stdin, stdout=PIPE, stderr=PIPE) as process:
            try:
                out, err = process.communicate(input, timeout)
            except subprocess.TimeoutExpired:
                out, err = drain(process)
                raise CommandFailedError(host, list(argv), None, out, err) from None
            except BaseException:
                process.kill_group()
                raise
        if check and process.returncode:
            raise CommandFailedError(host, list(argv), process.returncode, out, err)
        return CompletedProcess(list(argv), process.returncode, out, err)

    def write(self, host: str, path: str, text: str, *, mode: int | None = None) -> None:
        """Write a file on a host; missing folders are made."""
        self.run(host, ["sh", "-c", WRITE_SCRIPT, "sh", path], input=text)
        if mode is not None:
            self.run(host, ["chmod", f"{mode:o}", "--", path])

    def read(self, host: str, path: str) -> str:
        """A file's text on a host."""
        return self.run(host, ["cat", "--", path]).stdout

    def processes(self, host: str) -> list[Process]:
        """All running processes of the host but its PID 1; zombies do not count."""
        found = (read_process(pid) for pid in outer_pids(self.identity(host).pid))
        return [process for process in found if process is not None]

    def signal(self, host: str, pid: int, sig: int) -> None:
        """Signal a process by the pid that the host knows."""
        for process in self.processes(host):
            if process.pid == pid:
                Identity.of(process.outer_pid).send(sig)
                return
        raise LabError(f"{host} has no process {pid}")

    def memory_group(self, host: str) -> MemoryGroup:
        """The host's cgroup, made or not."""
        return MemoryGroup(self.state.group_name(host))

    def _known(self, host: str) -> str:
        if host not in self.names:
            raise LabError(f"no host {host!r}; there are {', '.join(self.names)}")
        return host


def drain(process: HostProcess) -> tuple[str, str]:
    """What a killed command had printed; one that left its group may hold the pipes open for ever."""
    process.kill_group()
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.communicate(timeout=DRAIN_S)
    return "", ""


def existing_shares(paths: Sequence[str]) -> list[str]:
    """Shares to bind: absolute, there, each once, none inside another or inside what every host has anyway."""
    kept: list[str] = []
    for path in sorted({str(Path(p).absolute()) for p in paths}):
        if not Path(path).exists():
            raise LabError(f"cannot share {path}: it does not exist")
        if not any(path == outer or path.startswith(f"{outer}/") for outer in [*kept, "/usr", "/opt"]):
            kept.append(path)
    return kept
