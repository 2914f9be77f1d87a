"""Watch a run: guardians on every host, one state on the head, and a verified end."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llmtrain.cluster.alive import run_knock
from llmtrain.errors import HostError
from llmtrain.launch import verdict
from llmtrain.launch.copies import Copies
from llmtrain.launch.rundir import write_record
from llmtrain.launch.stall import judge_stall, write_stacks
from llmtrain.launch.state import Progress, State, render_state

if TYPE_CHECKING:
    from llmtrain.cluster.fleet import Channel, Fleet
    from llmtrain.launch.asked import Asked
    from llmtrain.launch.execute import Launcher
    from llmtrain.launch.prepare import LaunchPlan
    from llmtrain.launch.rundir import RunDir

PING_S = 2.0
LOST_S = 25.0
"""Seconds without an answer after which a host counts as lost; a link may be gone for a few."""
STALL_S = 5.0
"""When we ourselves did not run for so long (suspended, swapped out), silence says nothing about the hosts."""
START_S = 180.0
SETTLE_S = 1.5
"""Time given to other ranks to report their own failure, so that the first cause is among them."""
STOP_S = 12.0
END_S = 8.0
STATE_S = 1.0
"""How old the picture of the run that others read may be."""
STACKS_S = 15.0
"""Time given to hosts to say what their ranks are doing when the run stands still."""

Event = tuple[str, dict[str, Any]]
Tell = Callable[[str, dict[str, Any]], None]


class Watch:
    """The guardians of a run and what they report."""

    def __init__(self, plan: LaunchPlan, fleet: Fleet, run_dir: RunDir, tell: Tell) -> None:
        self.plan = plan
        self.fleet = fleet
        self.run_dir = run_dir
        self.tell = tell
        self.state = State()
        self.events: queue.Queue[Event] = queue.Queue()
        self.channels: dict[str, Channel] = {}
        self.heard: dict[str, float] = {}
        self.files = {host.name: {f"{host.name}-{rank}.log" for rank in host.ranks} for host in plan.hosts}
        self.files[plan.hosts[0].name].add("metrics.jsonl")
        self.last_ping = 0.0
        self.last_loop = time.monotonic()
        self.last_state = 0.0
        self.progress = Progress(time.monotonic())
        self.save_until: float | None = None
        self.save_is_late = False
        self.stalled_at: float | None = None
        self.closing = False
        self.copies = Copies(plan, fleet, tell, self._hold)

    def open(self) -> None:
        """Start a guardian on every host.

        Raises:
            HostError: one could not be started.
        """
        for host in self.plan.hosts:
            script = self.plan.run_dir / "code/llmtrain/train/guardian.py"
            words = (str(self.plan.run_dir), self.plan.run_id, str(self.plan.lease_s))
            meeting = f"{self.plan.master_addr}_{self.plan.master_port}"
            argv = (host.python, "-I", "-u", script, *words, meeting)
            channel = self.fleet[host.name].start(argv)
            self.channels[host.name] = channel
            self.heard[host.name] = time.monotonic()
            threading.Thread(target=self._listen, args=(host.name, channel), daemon=True).start()
        deadline = time.monotonic() + 30
        waiting = set(self.channels)
        while waiting:
            name, event = self._next(max(0.0, deadline - time.monotonic()))
            if event.get("event") == "hello":
                waiting.discard(name)
            elif event.get("event") in {"end", "silence"}:
                names = ", ".join(sorted(waiting))
                raise HostError("the guardian did not start", where=names, fix=f"ssh -- {min(waiting)} true")

    def lock(self, *, wait: bool) -> None:
        """Take the accelerators, host by host in one order for all launches, so that no two wait for each other.

        Args:
            wait: queue for those that another run holds.

        Raises:
            PreflightError: one is held by another run, and we are not to wait.
            HostError: a host does not answer.
        """
        for host in sorted((one for one in self.plan.hosts if one.locks), key=lambda one: one.name):
            self._send(host.name, {"lock": list(host.locks)})
            deadline: float | None = time.monotonic() + 30
            event: dict[str, Any] = {}
            while event.get("event") != "locked":
                self._ping()
                name, event = self._next(PING_S / 2)
                if name and name != host.name:
                    event = {}
                if event.get("event") == "busy":
                    refused = verdict.held(host.name, event["holders"])
                    if not wait:
                        raise refused
                    self.tell("queue", {"host": host.name, "text": refused.error})
                    deadline = None
                elif event.get("event") == "end" or (deadline is not None and time.monotonic() > deadline):
                    raise HostError("the guardian took no lock", where=host.name, fix=f"ssh -- {host.name} true")

    def _listen(self, name: str, channel: Channel) -> None:
        rest = b""
        while data := channel.read():
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                with contextlib.suppress(ValueError):
                    self.events.put((name, json.loads(line)))
        self.events.put((name, {"event": "end"}))

    def _next(self, timeout_s: float) -> Event:
        try:
            return self.events.get(timeout=timeout_s)
        except queue.Empty:
            return "", {"event": "silence"}

    def run(self, launcher: Launcher, asked: Asked) -> None:
        """Watch until every rank is done, something failed, or a stop that was asked for has been prepared."""
        begun = self.last_loop = self.progress.at = time.monotonic()
        first_failure: float | None = None
        while not self._must_stop(asked):
            self._ping()
            self._write_state()
            self._take(0.2)
            launcher.note()
            if self.state.is_success(self.plan.world_size):
                self._let_end(launcher)
                return
            self._notice(launcher, time.monotonic() - begun)
            if self.state.failed or self.state.noted:
                first_failure = first_failure or time.monotonic()
                if time.monotonic() - first_failure > SETTLE_S:
                    return

    def _must_stop(self, asked: Asked) -> bool:
        """The first request lets ranks that train save; then, at the second, or where nothing can be saved, stop."""
        if not asked.event.is_set():
            return False
        if asked.now.is_set() or not self._can_save():
            return True
        now = time.monotonic()
        if self.save_until is None:
            self.save_until = now + self.plan.save_deadline_s
            for name in self.channels:
                self._send(name, {"save": True})
            self.tell("saving", {"step": self.state.last_step, "deadline_s": self.plan.save_deadline_s})
        self.save_is_late = now > self.save_until
        return self.save_is_late

    def _can_save(self) -> bool:
        phase = self.state.beats.get(0, {}).get("phase")
        return not self.plan.own_script and phase in {"train", "eval", "save", "done"}

    def _write_state(self, phase: str | None = None) -> None:
        """Let others see how the run is."""
        now = time.monotonic()
        if phase is None and now - self.last_state < STATE_S:
            return
        self.last_state = now
        phase = phase or ("saving before the stop" if self.save_until is not None else None)
        with contextlib.suppress(OSError):  # a full disk here is no reason to end the run
            write_record(self.run_dir.state, render_state(self.plan, self.state, self.progress, self.heard, phase))

    def _let_end(self, launcher: Launcher) -> None:
        """After a success DeepSpeed's launcher ends by itself, once a second it looks whether its ranks are gone."""
        deadline = time.monotonic() + END_S
        while launcher.poll() is None and time.monotonic() < deadline:
            self._take(0.1)

    def _take(self, timeout_s: float) -> None:
        """Handle what has arrived, waiting a little for the first of it."""
        name, event = self._next(timeout_s)
        while event["event"] != "silence":
            self.heard[name] = time.monotonic()
            self._handle(name, event)
            name, event = self._next(0)

    def _handle(self, host: str, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "text":
            self._write_text(host, event["file"], event["data"])
        elif kind == "ranks":
            self._rank_started(host, event["record"])
        elif kind == "beat":
            self._beat(host, event["record"])
        elif kind == "done":
            record = event["record"]
            self.state.done[record["rank"]] = record
            if not record["ok"]:
                self._fail(host, record)
        elif kind == "gone":
            self._fail(host, verdict.gone(event["rank"], event["free_bytes"]))
        elif kind == "stopped":
            self.state.stopped[host] = [item["pid"] for item in event["left"]]
        elif kind == "end" and host not in self.state.stopped and host not in self.state.lost:
            self._lose(host)
        else:
            self._keep(host, event)

    def _keep(self, host: str, event: dict[str, Any]) -> None:
        """What is only looked at later."""
        if event["event"] == "sealed":
            self.copies.note(host, event["name"], event["token"])
        elif event["event"] == "usage":
            self.state.usage[host] = event
        elif event["event"] == "kernel":
            self.state.kernel.setdefault(host, []).extend(event["lines"])
            for line in event["lines"]:
                self.tell("kernel", {"host": host, "line": line})
        elif event["event"] == "stacks":
            self.state.stacks.update({int(rank): item for rank, item in event["ranks"].items()})

    def _fail(self, host: str, record: dict[str, Any]) -> None:
        """A rank that ends once we are ending all of them did not fail."""
        if not self.closing:
            self.state.failed.append((host, record))

    def _lose(self, host: str) -> None:
        self.state.lost.append(host)
        self.state.noted.append(verdict.host_lost(host, "unknown" if self.plan.local else run_knock(host)))

    def _rank_started(self, host: str, record: dict[str, Any]) -> None:
        rank, actual = record["rank"], record["world_size"]
        if actual != self.plan.world_size:
            self.state.noted.append(verdict.wrong_world(host, rank, self.plan.world_size, actual))
        self.state.started[rank] = record
        if len(self.state.started) == self.plan.world_size:
            self.tell("ranks", {"world_size": self.plan.world_size})

    def _beat(self, host: str, record: dict[str, Any]) -> None:
        before = self.state.beats.get(record["rank"], {}).get("phase")
        self.state.beats[record["rank"]] = record
        self.progress.note(time.monotonic(), record)
        self.state.last_step = max(self.state.last_step, record["step"])
        if record["phase"] != before and record["rank"] == 0:
            self.tell("phase", {"phase": record["phase"], "host": host})

    def _write_text(self, host: str, name: str, text: str) -> None:
        if name not in self.files[host]:  # a host must not be able to write elsewhere on the head
            return
        data = text.encode("utf-8", "surrogateescape")
        if name == "metrics.jsonl":
            with self.run_dir.metrics.open("ab") as stream:
                stream.write(data)
            for line in data.splitlines():
                self._metric(line)
            return
        with (self.run_dir.logs / name).open("ab") as stream:
            stream.write(data)
        if self.plan.own_script and name == f"{self.plan.hosts[0].name}-0.log":
            self.tell("output", {"text": text})

    def _metric(self, line: bytes) -> None:
        try:
            values = json.loads(line)
        except ValueError:
            return
        if "loss" in values:
            self.state.last_step = max(self.state.last_step, values["step"])
            self.state.final_loss = values["loss"]
            self.state.metric = values
            self.progress.note_step(time.monotonic(), values)
        self.tell("metrics", values)

    def _ping(self) -> None:
        now = time.monotonic()
        if now - self.last_loop > STALL_S:
            self.heard = dict.fromkeys(self.heard, now)
            self.progress.at += now - self.last_loop
        self.last_loop = now
        if now - self.last_ping < PING_S:
            return
        self.last_ping = now
        for name in self.channels:
            self._send(name, {"ping": int(now)})
            silent = now - self.heard[name]
            if silent > LOST_S and name not in self.state.lost and name not in self.state.stopped:
                self._lose(name)

    def _hold(self, names: list[str]) -> None:
        for name in self.channels:
            self._send(name, {"hold": names})

    def _send(self, name: str, command: dict[str, Any]) -> None:
        with contextlib.suppress(OSError, EOFError):
            self.channels[name].write(json.dumps(command).encode() + b"\n")

    def _notice(self, launcher: Launcher, elapsed_s: float) -> None:
        """Failures that no rank can report."""
        code = launcher.poll()
        if code is not None and not self.state.noted and self._is_unexplained(code):
            self._drain(3.0)
            if self._is_unexplained(code):
                self.state.noted.append(verdict.launcher_died(code, self._launcher_tail()))
        waiting = [rank for rank in range(self.plan.world_size) if rank not in self.state.started]
        if waiting and elapsed_s > START_S and not self.state.noted:
            self.state.noted.append(verdict.not_started(waiting, START_S, self._launcher_tail()))
        self._notice_stall()

    def _notice_stall(self) -> None:
        """No progress for many times a step: ask every rank what it is doing, then name the one behind."""
        now, silent = time.monotonic(), time.monotonic() - self.progress.at
        if self.state.noted or self.state.failed or self.plan.own_script or self.state.done:
            return
        if self.stalled_at is None and silent > self.progress.limit_s(self.plan.stall):
            self.stalled_at = now
            self.tell("stall", {"silent_s": silent, "step": self.state.last_step})
            for name in self.channels:
                self._send(name, {"dump": True})
        if self.stalled_at is None:
            return
        if silent < now - self.stalled_at:  # it goes on after all
            self.stalled_at = None
            self.state.stacks.clear()
        elif len(self.state.stacks) == self.plan.world_size or now - self.stalled_at > STACKS_S:
            write_stacks(self.run_dir, self.state.stacks)
            self.state.noted.append(judge_stall(self.plan, self.state, silent, self.progress.step_s))

    def _is_unexplained(self, code: int) -> bool:
        """Whether the launcher's end is the cause: with it leashes end their ranks, and ranks lose each other."""
        records = [record for _, record in self.state.failed]
        if not records:
            return len(self.state.done) < self.plan.world_size
        by_itself = code <= 0 or any(verdict.is_abandoned(record) for record in records)
        return by_itself and all(verdict.is_consequent(record) for record in records)

    def _drain(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and len(self.state.done) < self.plan.world_size:
            self._take(0.1)

    def _launcher_tail(self) -> str:
        try:
            lines = self.run_dir.launcher_log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-12:])

    def close(self, launcher: Launcher | None, *, grace_s: float) -> None:
        """End every process of the run, on the head and on every host that answers, and learn what is left."""
        self.closing = True
        self.copies.close()
        self._write_state("stopping")
        for name in self.channels:
            self._send(name, {"stop": grace_s})
        if grace_s and launcher:
            launcher.end()
        deadline = time.monotonic() + grace_s + STOP_S
        while time.monotonic() < deadline:
            waiting = [name for name in self.channels if name not in self.state.stopped and name not in self.state.lost]
            if not waiting:
                break
            self._take(0.1)
        if launcher:
            launcher.end()
        for channel in self.channels.values():
            channel.close()
        self._write_state("ended")

    @property
    def unverified(self) -> tuple[str, ...]:
        """Hosts that did not confirm that everything is gone."""
        return tuple(name for name in self.channels if name not in self.state.stopped)
