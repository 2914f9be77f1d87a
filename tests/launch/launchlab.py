"""Launches on the lab: start one in a folder of the head, look at it while it runs, count what it leaves."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.lab.proc import read_stat

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.lab.lab import Lab
    from tests.lab.proc import Process

LLMTRAIN = str(Path(sys.executable).with_name("llmtrain"))
END_S = 15.0
"""Every end of the command leaves nothing on any reachable host within this time."""
WAIT_S = 240.0
"""Until something happens that takes seconds on a quiet machine."""
RUN_FILE = """\
model: {path: /root/model, dtype: fp32}
data: {path: /root/data.jsonl, max_length: 64}
batch: {micro: 1, accumulation: 1}
training: {max_steps: 3, loader_workers: 0}
env: {OMP_NUM_THREADS: 1}
"""


def write_sums(path: Path, count: int) -> None:
    """Chat data, the same every time."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            a, b = number % 9 + 1, number // 9 + 1
            turns = [("user", f"{a}+{b}?"), ("assistant", f"{a}+{b} is {a + b}.")]
            file.write(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n")


def wait_for(what: Callable[[], Any], seconds: float, why: str | Callable[[], str]) -> Any:
    """The first true answer; fails the test when there is none in time."""
    deadline = time.monotonic() + seconds
    while not (answer := what()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:.0f} s: {why() if callable(why) else why}")
        time.sleep(0.1)
    return answer


class Run:
    """One `llmtrain` on the head."""

    def __init__(self, bench: LaunchLab, folder: str, argv: tuple[str, ...], env: dict[str, str] | None) -> None:
        self.bench = bench
        self.folder = folder
        self.disk = bench.lab.state.disk("head") / folder.lstrip("/")
        self._known = set(self.disk.glob("runs/*"))
        self._out = bench.here / f"{time.monotonic_ns()}.out"
        self._err = self._out.with_suffix(".err")
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = bench.lab.popen("head", [LLMTRAIN, *argv], cwd=folder, env=env, stdout=out, stderr=err)

    @property
    def out(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        return self._err.read_text(errors="replace")

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.out)

    @property
    def dir(self) -> Path:
        """The run folder on the head, as this machine sees it."""
        return min(set(self.disk.glob("runs/*")) - self._known)  # a later command may have made another one there

    @property
    def id(self) -> str:
        return self.dir.name

    @property
    def outcome(self) -> dict[str, Any]:
        return json.loads((self.dir / "outcome.json").read_text())

    @property
    def metrics(self) -> list[dict[str, Any]]:
        path = self.dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.metrics if "loss" in row]

    @property
    def step(self) -> int:
        return len(self.losses)

    def wait(self, seconds: float = WAIT_S) -> int:
        """Exit code."""
        try:
            return self.process.wait(seconds)
        except BaseException:
            self.process.kill_group()
            raise

    def wait_text(self, text: str, seconds: float = WAIT_S) -> None:
        """Wait until it has said this on standard error."""
        wait_for(lambda: text in self.err or self.process.poll() is not None, seconds, lambda: self.err)
        assert text in self.err, self.err

    def wait_launcher(self) -> None:
        """Wait until DeepSpeed's runner has started pdsh."""
        wait_for(lambda: self.find("pdsh") or self.process.poll() is not None, WAIT_S, lambda: self.err)
        assert self.process.poll() is None, self.err

    def wait_step(self, step: int, seconds: float = WAIT_S) -> None:
        """Wait until so many steps are done."""

        def there() -> bool:
            return self.process.poll() is not None or (bool(list(self.disk.glob("runs/*"))) and self._reached(step))

        wait_for(there, seconds, lambda: self.err)
        assert self._reached(step), self.err

    def wait_more(self, step: int, seconds: float = WAIT_S) -> None:
        """Wait until so many steps are done by a run that nobody here waits for."""
        wait_for(lambda: self.step >= step, seconds, lambda: self.err)

    def _reached(self, step: int) -> bool:
        return set(self.disk.glob("runs/*")) > self._known and self.step >= step

    def processes(self, host: str) -> list[Process]:
        """What of this run is on a host: by the mark in the environment, or the run's name in an argument."""
        return [
            process
            for process in self.bench.lab.processes(host)
            if process.environ.get("LLMTRAIN_RUN_ID") == self.id or any(self.id in part for part in process.argv)
        ] + ([item] if host == "head" and (item := self.supervisor()) else [])

    def supervisor(self) -> Process | None:
        """The process that supervises the run, while it is there."""
        path = self.dir / "supervisor.json"
        if not path.exists():
            return None
        pid = json.loads(path.read_text())["pid"]
        return next((item for item in self.bench.lab.processes("head") if item.pid == pid), None)

    def rank(self, rank: int) -> tuple[str, Process]:
        """Host and process of a rank, by the record it left there."""
        for host in self.bench.lab.nodes:
            path = self.bench.lab.state.disk(host) / f"root/.llmtrain/runs/{self.id}/ranks/{rank}.json"
            if path.exists():
                pid = json.loads(path.read_text())["pid"]
                return host, next(item for item in self.processes(host) if item.pid == pid)
        raise AssertionError(f"rank {rank} left no record")

    def find(self, name: str) -> list[Process]:
        """Processes of this run's launcher on the head by program: pdsh, ssh or runner."""
        tree = self.processes("head") if set(self.disk.glob("runs/*")) > self._known else []
        if name == "runner":
            return [item for item in tree if "llmtrain.train.runner" in item.argv]
        return [item for item in tree if item.argv and Path(item.argv[0]).name == name]

    def left(self) -> dict[str, list[str]]:
        """Host -> what is still there of this run."""
        hosts = [host for host in self.bench.lab.names if self.bench.lab.is_on(host)]
        found = {host: [" ".join(item.argv)[:120] for item in self.processes(host)] for host in hosts}
        return {host: items for host, items in found.items() if items}

    def wait_gone(self) -> None:
        """Nothing of this run is left anywhere."""
        wait_for(lambda: not self.left(), END_S, lambda: f"{self.left()}\n{self.err[-3000:]}")


class LaunchLab:
    """A lab with a tiny model at /root/model and data at /root/data.jsonl on the head."""

    def __init__(self, lab: Lab, here: Path) -> None:
        self.lab = lab
        self.here = here
        self.runs: list[Run] = []

    def folder(self, path: str, *, hosts: str = "", run: str = RUN_FILE) -> str:
        """A working folder on the head with `hostfile` (one slot each) and `llmtrain.yaml`; returns its path."""
        lines = "".join(f"{host} slots=1\n" for host in hosts.split())
        self.lab.write("head", f"{path}/hostfile", lines)
        self.lab.write("head", f"{path}/llmtrain.yaml", run)
        return path

    def start(self, folder: str, *argv: str, env: dict[str, str] | None = None) -> Run:
        """Start `llmtrain ARGV` there."""
        self.runs.append(Run(self, folder, argv, env))
        return self.runs[-1]

    def end(self) -> None:
        """End what a failed test has left running."""
        while self.runs:
            run = self.runs.pop()
            if run.process.poll() is None:
                run.process.kill_group()
                run.process.wait()
            if set(run.disk.glob("runs/*")) > run._known and (supervisor := run.supervisor()):
                self.kill(supervisor)

    def launch(self, folder: str, *more: str, env: dict[str, str] | None = None) -> Run:
        """Start the literal command there."""
        return self.start(folder, "launch", "--hosts", "hostfile", "--config", "zero3-offload", *more, env=env)

    def children(self, host: str, process: Any) -> list[Process]:
        """A command and everything below it now, as (host's) processes."""
        known = {item.outer_pid: item for item in self.lab.processes(host)}
        parents = {pid: stat.parent for pid in known if (stat := read_stat(pid))}
        found, queue = [], [process.inner_pid()]
        while queue:
            pid = queue.pop()
            found += [known[pid]] if pid in known else []
            queue.extend(child for child, parent in parents.items() if parent == pid)
        return found

    def strays(self) -> dict[str, list[str]]:
        """Processes on any host that are neither its PID 1 nor its listening sshd."""
        found = {
            host: [
                " ".join(item.argv)[:120]
                for item in self.lab.processes(host)
                if not (item.is_sshd and "[listener]" in " ".join(item.argv))
            ]
            for host in self.lab.names
            if self.lab.is_on(host)
        }
        return {host: items for host, items in found.items() if items}

    def wait_quiet(self) -> None:
        """No process of any launch, and no ssh session, is left on any host."""
        wait_for(lambda: not self.strays(), END_S, lambda: str(self.strays()))

    def kill(self, item: Process, sig: int = signal.SIGKILL) -> None:
        """Signal one process seen before."""
        os.kill(item.outer_pid, sig)
