"""The watch over a run, with channels and a clock of our own."""

from __future__ import annotations

import json
import queue
import time
from dataclasses import replace

import pytest
from tests.launch.jobs import write_job

from llmtrain.cluster.fleet import Fleet
from llmtrain.cluster.sshconfig import SAFE_OPTIONS
from llmtrain.errors import ExitCode, HostError, PreflightError
from llmtrain.launch import verdict
from llmtrain.launch import watch as module
from llmtrain.launch.asked import Asked
from llmtrain.launch.prepare import plan_launch
from llmtrain.launch.rundir import RunDir
from llmtrain.launch.watch import LOST_S, STALL_S, Watch

LOST_PEER = "Connection closed by peer [10.0.0.2]:4242"


class FakeChannel:
    """A guardian that says what a test tells it to."""

    def __init__(self, *events):
        self.lines = queue.Queue()
        self.heard = []
        self.locks = [{"event": "locked"}]
        self.say(*events)

    def say(self, *events):
        for event in events:
            self.lines.put(json.dumps(event).encode() + b"\n")

    def hang_up(self):
        self.lines.put(b"")

    def read(self):
        return self.lines.get()

    def write(self, data):
        command = json.loads(data)
        self.heard.append(command)
        if "stop" in command:
            self.say({"event": "stopped", "left": []})
        if "lock" in command:
            self.say(*self.locks)

    def close(self):
        self.hang_up()


class FakeTransport:
    """A host that starts nothing but a guardian."""

    def __init__(self, channel):
        self.channel = channel

    def start(self, argv):
        return self.channel


class FakeLauncher:
    """DeepSpeed's launcher with an exit code of the test's choice."""

    def __init__(self, code=None):
        self.code = code
        self.ended = False

    def poll(self):
        return self.code

    def note(self):
        pass

    def end(self):
        self.ended = True


@pytest.fixture(autouse=True)
def door(monkeypatch):
    """No test knocks at a real host."""
    monkeypatch.setattr(module, "run_knock", lambda _: "silent")


@pytest.fixture
def channels():
    """Host -> its guardian; gpu004 has ranks 0 and 1, gpu006 rank 2."""
    return {name: FakeChannel({"event": "hello", "pid": 7}) for name in ("gpu004", "gpu006")}


@pytest.fixture
def told():
    """What the watch has told."""
    return []


@pytest.fixture
def watch(tmp_path, channels, told):
    """A watch whose guardians have said hello."""
    job, contact = write_job(tmp_path)
    run_dir = RunDir(tmp_path / "run")
    run_dir.logs.mkdir(parents=True)
    fleet = Fleet({name: FakeTransport(channel) for name, channel in channels.items()})
    made = Watch(plan_launch(job, contact, "run-1", {}), fleet, run_dir, lambda *event: told.append(event))
    made.open()
    yield made
    for channel in channels.values():
        channel.hang_up()


def done(rank, *, ok=True, error=None, **more):
    """A done record on its way to the head."""
    return {"event": "done", "record": {"rank": rank, "ok": ok, "error": error, "step": 3, **more}}


def failed(rank, kind, message=""):
    """A done record of a failure."""
    return done(rank, ok=False, error={"type": kind, "message": message})


def text(name, content):
    """Part of a file."""
    return {"event": "text", "file": name, "data": content}


def causes(watch):
    """Failures that no rank reported, in words for scripts."""
    return [failure.cause for failure, _ in watch.state.noted]


@pytest.fixture
def no_patience(monkeypatch):
    """Waits for stragglers are over at once."""
    monkeypatch.setattr(module, "SETTLE_S", 0.0)
    monkeypatch.setattr(module.Watch, "_drain", lambda self, _: self._take(0.05))


def test_good_records_of_all_ranks_are_a_success(watch, channels):
    """The watch ends when every rank has a good done record, and the launcher has gone by itself."""
    channels["gpu004"].say(done(0), done(1))
    channels["gpu006"].say(done(2))
    watch.run(FakeLauncher(0), Asked())
    assert watch.state.is_success(3)
    assert watch.state.noted == []


def test_launcher_that_ends_early_is_the_cause_even_with_code_0(watch, channels, no_patience):
    """Exit code 0 of the launcher proves nothing: without records of all ranks it is a failure."""
    channels["gpu004"].say(done(0), done(1))
    watch.run(FakeLauncher(0), Asked())
    assert causes(watch) == ["launcher"]
    assert not watch.state.is_success(3)


@pytest.mark.parametrize("code", [0, -9, 255])
def test_ranks_ended_with_their_launcher_are_not_the_cause(watch, channels, no_patience, code):
    """Leashes whose launcher is gone, and peers of their ranks, report only a consequence."""
    channels["gpu004"].say(failed(0, "RuntimeError", LOST_PEER))
    channels["gpu006"].say(failed(2, "Abandoned", "the launcher's connection ended"))
    watch._take(0.5)
    watch._take(0.5)
    watch.run(FakeLauncher(code), Asked())
    assert causes(watch) == ["launcher"]


def test_ranks_that_lost_each_other_are_the_cause_of_the_launchers_end(watch, channels, no_patience):
    """Where ranks lose each other and DeepSpeed then ends, the network is the cause and not the launcher."""
    channels["gpu004"].say(failed(0, "RuntimeError", LOST_PEER))
    channels["gpu006"].say(failed(2, "RuntimeError", LOST_PEER))
    watch._take(0.5)
    watch._take(0.5)
    watch.run(FakeLauncher(1), Asked())
    assert watch.state.noted == []
    assert {host for host, _ in watch.state.failed} == {"gpu004", "gpu006"}


def test_rank_that_ends_while_all_are_stopped_has_not_failed(watch, channels):
    """Once we end a run its ranks' ends are ours."""
    stop = Asked()
    stop.event.set()
    launcher = FakeLauncher()
    watch.run(launcher, stop)
    channels["gpu006"].say(failed(2, "Killed", "killed by SIGTERM"))
    watch.close(launcher, grace_s=0.0)
    assert watch.state.failed == []
    assert set(watch.state.stopped) == {"gpu004", "gpu006"}
    assert watch.unverified == ()
    assert launcher.ended


def test_host_whose_guardian_is_gone_is_lost(watch, channels, no_patience):
    """When a guardian's channel ends, its host is named; it is frozen if its sshd takes connections in silence."""
    channels["gpu006"].hang_up()
    watch.run(FakeLauncher(), Asked())
    failure, code = watch.state.noted[0]
    assert (failure.host, failure.cause, code) == ("gpu006", "host-frozen", ExitCode.HOST_LOST)


@pytest.fixture
def clock(monkeypatch):
    """The watch's time, moved by hand."""
    now = [time.monotonic()]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_host_that_is_silent_for_long_is_lost(watch, channels, clock):
    """A host that answers no ping within its time is lost, one that answers is not."""
    for _ in range(int(LOST_S) + 2):
        clock[0] += 1.0
        channels["gpu004"].say({"event": "pong", "n": 1})
        watch._ping()
        watch._take(0.01)
        watch._take(0.01)
    assert watch.state.lost == ["gpu006"]


def test_our_own_stall_is_no_silence_of_the_hosts(watch, clock):
    """A head that was suspended for minutes gives its hosts new time to answer."""
    watch._ping()
    clock[0] += 10 * LOST_S + STALL_S
    watch._ping()
    assert watch.state.lost == []


def test_world_of_another_size_is_noticed_at_the_start(watch, channels, no_patience):
    """A rank that was started into a smaller world ends the run at once."""
    record = {"rank": 0, "world_size": 1, "pid": 5}
    channels["gpu004"].say({"event": "ranks", "record": record})
    watch.run(FakeLauncher(), Asked())
    assert causes(watch) == ["world-size"]


@pytest.mark.parametrize(("free", "cause"), [(0, "disk-full"), (1 << 30, "killed")])
def test_rank_that_vanishes_without_a_record_may_have_had_no_room_for_one(watch, channels, free, cause):
    """A rank gone together with its leash is told by the free space of its disk: none left, or killed."""
    channels["gpu006"].say({"event": "gone", "rank": 2, "free_bytes": free})
    watch._take(0.5)
    failure, _ = verdict.explain(*watch.state.failed[0])
    assert (failure.host, failure.rank, failure.cause) == ("gpu006", 2, cause)


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("gpu006", "../../home/me/.ssh/authorized_keys"),
        ("gpu006", "/etc/passwd"),
        ("gpu006", "metrics.jsonl"),
        ("gpu006", "gpu004-0.log"),
        ("gpu004", "launcher.log"),
    ],
)
def test_a_host_writes_only_its_own_logs_here(watch, channels, tmp_path, host, name):
    """No host can name another file of the head's than the logs of its ranks."""
    channels[host].say(text(name, "planted"), text(f"{host}-{0 if host == 'gpu004' else 2}.log", "own"))
    watch._take(0.5)
    watch._take(0.2)
    written = [path for path in tmp_path.rglob("*") if path.is_file() and "run" in path.relative_to(tmp_path).parts]
    assert [path.read_text() for path in written] == ["own"]


def test_metrics_are_kept_and_told(watch, channels, told):
    """Rank 0's metrics are appended as they are, and the last loss and step are known."""
    row = {"step": 4, "loss": 1.5}
    channels["gpu004"].say(text("metrics.jsonl", json.dumps(row) + "\n"))
    watch._take(0.5)
    assert json.loads(watch.run_dir.metrics.read_text()) == row
    assert (watch.state.last_step, watch.state.final_loss) == (4, 1.5)
    assert ("metrics", row) in told


def test_bytes_that_are_no_text_reach_the_log_unchanged(watch, channels):
    """A rank's output is passed on byte for byte, also where it is no UTF-8."""
    raw = b"caf\xe9 \xff\n"
    channels["gpu006"].say(text("gpu006-2.log", raw.decode("utf-8", "surrogateescape")))
    watch._take(0.5)
    assert (watch.run_dir.logs / "gpu006-2.log").read_bytes() == raw


def test_processes_that_stay_are_named(watch, channels):
    """What a guardian could not end is known by host and pid."""
    channels["gpu006"].write = lambda _: channels["gpu006"].say(
        {"event": "stopped", "left": [{"pid": 99, "start_time": 1}]}
    )
    watch.close(FakeLauncher(), grace_s=0.0)
    assert watch.state.stopped == {"gpu004": [], "gpu006": [99]}


def test_guardian_that_does_not_start_is_an_error(watch, channels):
    """Where a guardian ends before its first word the launch stops with the host's name."""
    channels["gpu004"].say({"event": "hello", "pid": 7})
    silent = FakeChannel()
    silent.hang_up()
    watch.fleet.transports["gpu006"] = FakeTransport(silent)
    with pytest.raises(HostError, match="guardian") as caught:
        watch.open()
    assert "gpu006" in str(caught.value)


def test_ssh_gives_a_link_up_later_than_the_watch():
    """The connections of pdsh outlive a silence after which the watch calls a host lost."""
    options = dict(SAFE_OPTIONS)
    assert int(options["ServerAliveInterval"]) * int(options["ServerAliveCountMax"]) > LOST_S


HELD = {"event": "busy", "holders": {"GPU-1": {"run": "theirs", "user": "ann", "pid": 7}}}


@pytest.fixture
def with_locks(watch):
    """The same watch for a run on accelerators."""
    watch.plan = replace(watch.plan, hosts=tuple(replace(host, locks=("GPU-1",)) for host in watch.plan.hosts))
    return watch


def test_an_accelerator_that_another_run_holds_stops_the_launch(with_locks, channels):
    """Without --wait a launch ends with exit code 4, naming the host and whose run it is."""
    channels["gpu004"].locks = [HELD]
    with pytest.raises(PreflightError) as refused:
        with_locks.lock(wait=False)
    assert refused.value.where == "gpu004"
    assert "theirs of ann" in refused.value.error
    assert {"lock": ["GPU-1"]} not in channels["gpu006"].heard


def test_a_launch_that_waits_goes_on_when_the_accelerator_is_free(with_locks, channels, told):
    """With --wait it says what it waits for, and takes host after host in the order of their names."""
    channels["gpu004"].locks = [HELD, {"event": "locked"}]
    with_locks.lock(wait=True)
    assert [values["host"] for what, values in told if what == "queue"] == ["gpu004"]
    assert [{"lock": ["GPU-1"]} in channels[name].heard for name in ("gpu004", "gpu006")] == [True, True]
