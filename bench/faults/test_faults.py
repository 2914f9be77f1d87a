"""Faults whose effect takes long to show. Run as: python -m pytest bench/faults

Every test asserts what the command says, and that nothing of the run is left on any host that can be reached.
"""

from __future__ import annotations

import signal
import time

import pytest
from tests.launch.launchlab import LLMTRAIN, wait_for

LEASE_S = 20.0
ENDLESS = ("--json", "--set", "training.max_steps=100000", "--set", f"lease={LEASE_S}")


@pytest.fixture(scope="module")
def two(launch_lab):
    """A working folder for runs over two hosts."""
    return launch_lab.folder("/root/two", hosts="node1 node2")


@pytest.fixture
def run(launch_lab, two):
    """A run that has begun to step and does not end by itself."""
    run = launch_lab.launch(two, *ENDLESS)
    run.wait_step(1)
    return run


@pytest.fixture
def ended(request, table):
    """Checks that a command has ended with a code and nothing is left, and puts the fault into the table."""
    fault = (request.function.__doc__ or "").strip()
    begun = time.monotonic()

    def check(run, code, *, begun=begun, quiet=True):
        assert run.wait() == code, run.err
        seconds = time.monotonic() - begun
        run.wait_gone()
        if quiet:
            run.bench.wait_quiet()
        document = run.json
        reason = document.get("reason") or document["error"]
        left = sum(len(items) for items in run.left().values())
        table(fault=fault, verdict=reason, code=code, seconds=round(seconds, 1), survivors=left)
        return document.get("first_failure")

    return check


def find(run, host, *words):
    """The Python process of the run on a host whose first arguments end like this."""
    return next(
        item
        for item in run.bench.lab.processes(host)
        if len(item.argv) > len(words)
        and all(arg.endswith(word) for arg, word in zip(item.argv[1:], words, strict=False))
    )


def test_frozen_host(run, ended):
    """A host that is frozen is lost; once it thaws its ranks end."""
    lab = run.bench.lab
    begun = time.monotonic()
    lab.freeze("node2")
    assert run.wait() == 9, run.err
    seconds = time.monotonic() - begun
    failure = run.json["first_failure"]
    assert (failure["host"], failure["cause"]) == ("node2", "host-frozen")
    assert run.json["unverified"] == ["node2"]
    lab.thaw("node2")
    ended(run, 9, begun=time.monotonic() - seconds)


def test_link_gone_for_twelve_seconds(run, ended):
    """A link that loses everything for twelve seconds does not end a run."""
    run.bench.lab.blackhole("node2")
    time.sleep(12)
    run.bench.lab.unblackhole("node2")
    run.wait_step(run.step + 5)
    run.process.send_signal(signal.SIGTERM)
    assert ended(run, 15) is None


def test_suspended_supervisor(run, ended):
    """A supervisor that does not run for longer than hosts may be silent loses none of them."""
    supervisor = run.supervisor()
    run.bench.kill(supervisor, signal.SIGSTOP)
    time.sleep(LEASE_S - 5)
    run.bench.kill(supervisor, signal.SIGCONT)
    run.wait_step(run.step + 20)
    begun = time.monotonic()
    run.process.send_signal(signal.SIGTERM)
    assert ended(run, 15, begun=begun) is None


def test_closed_terminal(run, table):
    """A closed terminal leaves the run as it is; `stop` ends it later."""
    run.process.send_signal(signal.SIGHUP)
    run.wait()
    run.wait_more(run.step + 5)
    begun = time.monotonic()
    run.bench.lab.run("head", [LLMTRAIN, "stop", "last"], cwd=run.folder, timeout=120)
    seconds = time.monotonic() - begun
    run.wait_gone()
    reason = f"trains on; then: {run.outcome['reason']}"
    table(
        fault="terminal closed", verdict=reason, code=run.outcome["exit_code"], seconds=round(seconds, 1), survivors=0
    )


def test_killed_supervisor(run, ended):
    """A killed supervisor takes the run with it on every host."""
    run.bench.kill(run.supervisor())
    assert ended(run, 13) is None


def test_killed_command(run, table):
    """A launch command that is killed leaves the run as it is; `stop --now` ends it later."""
    run.process.send_signal(signal.SIGKILL)
    run.wait()
    run.wait_more(run.step + 5)
    begun = time.monotonic()
    run.bench.lab.run("head", [LLMTRAIN, "stop", "last", "--now"], cwd=run.folder, timeout=120)
    seconds = time.monotonic() - begun
    run.wait_gone()
    reason = f"trains on; then: {run.outcome['reason']}"
    table(fault="launch killed", verdict=reason, code=run.outcome["exit_code"], seconds=round(seconds, 1), survivors=0)


def test_ctrl_c(run, ended):
    """Ctrl-C saves and stops."""
    run.process.send_signal(signal.SIGINT)
    assert ended(run, 130) is None


def test_ctrl_c_twice(run, ended):
    """Ctrl-C twice stops now."""
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    run.process.send_signal(signal.SIGINT)
    assert ended(run, 130) is None


def test_killed_rank(run, ended):
    """A killed rank is named with its host and signal."""
    run.bench.kill(run.rank(1)[1])
    assert ended(run, 8)["cause"] == "killed"


def test_killed_pdsh(run, ended):
    """A killed pdsh ends the run although DeepSpeed calls that a success."""
    (pdsh,) = run.find("pdsh")
    run.bench.kill(pdsh)
    assert ended(run, 13)["cause"] == "launcher"


def test_power_cut(run, ended):
    """A host without power is lost."""
    run.bench.lab.power_cut("node2")
    try:
        assert ended(run, 9, quiet=False)["host"] == "node2"
    finally:
        run.bench.lab.boot("node2")


def test_link_cut(run, ended):
    """A link that is cut and not healed loses the host; its own lease ends its ranks."""
    lab = run.bench.lab
    lab.cut("node2")
    try:
        assert run.wait() == 9
        wait_for(lambda: not run.left(), LEASE_S + 15, lambda: str(run.left()))
    finally:
        lab.heal("node2")
    assert ended(run, 9)["host"] == "node2"


def test_killed_guardian(run, ended):
    """A host whose guardian is killed counts as lost, and its ranks still end."""
    run.bench.kill(find(run, "node2", "-I", "-u", "guardian.py"))
    assert ended(run, 9)["host"] == "node2"


def test_killed_ssh_client(run, ended):
    """When the launcher's connection to one host is killed, the launch ends with code 13."""
    ssh = next(item for item in run.find("ssh") if "node2" in item.argv)
    run.bench.kill(ssh)
    assert ended(run, 13)["cause"] == "launcher"


def test_killed_leash(run, ended):
    """A killed leash takes its rank with it, and the rank is named."""
    run.bench.kill(find(run, "node2", "-u", "entry.py"))
    failure = ended(run, 8)
    assert (failure["host"], failure["rank"]) == ("node2", 1)


def test_killed_launcher_on_a_host(run, ended):
    """When DeepSpeed's launcher on a host is killed, its ranks end with it and the launch ends with code 13."""
    run.bench.kill(find(run, "node2", "-u", "-m", "deepspeed.launcher.launch"))
    assert ended(run, 13)["cause"] == "launcher"


def test_stopped_sshd(run, table):
    """A run goes on when a host's sshd no longer takes new connections, and can be stopped."""
    run.bench.lab.sshd_stop("node2")
    try:
        run.wait_step(run.step + 20)
        begun = time.monotonic()
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 15
        seconds = time.monotonic() - begun
        run.wait_gone()
    finally:
        run.bench.lab.sshd_start("node2")
    verdict = f"trains on; then: {run.json['reason']}"
    table(fault="sshd stopped", verdict=verdict, code=15, seconds=round(seconds, 1), survivors=0)


def test_stop_while_a_host_is_out_of_reach(run, table):
    """A stop that a host cannot confirm ends with code 14 and its name; the host ends its ranks by itself."""
    run.bench.lab.blackhole("node2")
    begun = time.monotonic()
    try:
        run.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 14, run.err
        seconds = time.monotonic() - begun
        assert run.json["unverified"] == ["node2"]
        wait_for(lambda: not run.left(), LEASE_S + 15, lambda: str(run.left()))
    finally:
        run.bench.lab.unblackhole("node2")
    row = {"verdict": run.json["reason"], "code": 14, "seconds": round(seconds, 1), "survivors": 0}
    table(fault="SIGTERM twice while a host is out of reach", **row)


def test_memory(launch_lab, two, ended):
    """A rank that the kernel kills for memory ends the run with code 11 and its host's name."""
    launch_lab.lab.memory("node2", 420)
    run = launch_lab.launch(two, *ENDLESS)
    failure = ended(run, 11)
    launch_lab.lab.memory("node2", None)
    assert failure["host"] == "node2"


def test_full_disk(launch_lab, two, ended):
    """A disk that gets full while ranks train ends the run with code 12 and its host's name."""
    lab = launch_lab.lab
    (ops,) = lab.state.disk("node1").glob("root/.llmtrain/ops/*")
    lab.disk("node1", "/root/small", 700)
    places = (
        "node_dir=/root/small",
        f"env.TORCH_EXTENSIONS_DIR=/root/.llmtrain/ops/{ops.name}",
        "training.max_steps=99",
    )
    run = launch_lab.launch(two, "--json", *(word for place in places for word in ("--set", place)))
    run.wait_step(1)
    lab.run("node1", ["dd", "if=/dev/zero", "of=/root/small/ballast", "bs=1M", "count=800"], check=False)
    failure = ended(run, 12)
    assert (failure["host"], failure["cause"]) == ("node1", "disk-full")


def test_head_without_power(launch_lab, run, table):
    """When the head loses its power the hosts end the run by themselves within the lease."""
    begun = time.monotonic()
    launch_lab.lab.power_cut("head")
    wait_for(lambda: not run.left(), LEASE_S + 15, lambda: str(run.left()))
    seconds = round(time.monotonic() - begun, 1)
    table(
        fault="head loses its power",
        verdict=f"hosts end the run (lease {LEASE_S:.0f} s)",
        code=None,
        seconds=seconds,
        survivors=0,
    )
