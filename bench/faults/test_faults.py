"""Faults whose effect takes long to show. Run as: python -m pytest bench/faults

Every test asserts what the command says, and that nothing of the run is left on any host that can be reached.
"""

from __future__ import annotations

import signal
import time

import pytest
from tests.launch.launchlab import wait_for

from llmtrain.launch.watch import LEASE_S, LOST_S

ENDLESS = ("--json", "--set", "training.max_steps=100000")


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


def ended(run, code):
    """The command has ended with this code, and nothing is left."""
    assert run.wait() == code, run.err
    run.wait_gone()
    run.bench.wait_quiet()
    return run.json["first_failure"]


def find(run, host, *words):
    """The Python process of the run on a host whose first arguments end like this."""
    return next(
        item
        for item in run.bench.lab.processes(host)
        if len(item.argv) > len(words)
        and all(arg.endswith(word) for arg, word in zip(item.argv[1:], words, strict=False))
    )


def test_frozen_host(run):
    """A host that is frozen is lost; once it thaws its ranks end."""
    lab = run.bench.lab
    lab.freeze("node2")
    assert run.wait() == 9, run.err
    assert run.json["first_failure"]["host"] == "node2"
    assert run.json["unverified"] == ["node2"]
    lab.thaw("node2")
    run.wait_gone()
    run.bench.wait_quiet()


def test_link_gone_for_twelve_seconds(run):
    """A link that loses everything for twelve seconds does not end a run."""
    run.bench.lab.blackhole("node2")
    time.sleep(12)
    run.bench.lab.unblackhole("node2")
    run.wait_step(run.step + 5)
    run.process.send_signal(signal.SIGTERM)
    assert ended(run, 143) is None


def test_suspended_head(run):
    """A head that does not run for longer than hosts may be silent loses none of them."""
    run.process.send_signal(signal.SIGSTOP)
    time.sleep(LOST_S + 5)
    run.process.send_signal(signal.SIGCONT)
    run.wait_step(run.step + 20)
    run.process.send_signal(signal.SIGTERM)
    assert ended(run, 143) is None


def test_hangup(run):
    """A closed terminal ends the run like Ctrl-C."""
    run.process.send_signal(signal.SIGHUP)
    assert ended(run, 130) is None


def test_killed_guardian(run):
    """A host whose guardian is killed counts as lost, and its ranks still end."""
    run.bench.kill(find(run, "node2", "-I", "-u", "guardian.py"))
    assert ended(run, 9)["host"] == "node2"


def test_killed_ssh_client(run):
    """When the launcher's connection to one host is killed, the launch ends with code 13."""
    ssh = next(item for item in run.find("ssh") if "node2" in item.argv)
    run.bench.kill(ssh)
    assert ended(run, 13)["cause"] == "launcher"


def test_killed_leash(run):
    """A killed leash takes its rank with it, and the rank is named."""
    run.bench.kill(find(run, "node2", "-u", "entry.py"))
    failure = ended(run, 8)
    assert (failure["host"], failure["rank"]) == ("node2", 1)


def test_killed_launcher_on_a_host(run):
    """When DeepSpeed's launcher on a host is killed, its ranks end with it and the launch ends with code 13."""
    run.bench.kill(find(run, "node2", "-u", "-m", "deepspeed.launcher.launch"))
    assert ended(run, 13)["cause"] == "launcher"


def test_stopped_sshd(run):
    """A run goes on when a host's sshd no longer takes new connections, and can be stopped."""
    run.bench.lab.sshd_stop("node2")
    run.wait_step(run.step + 20)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143
    run.wait_gone()


def test_user_stops_while_a_host_is_out_of_reach(run):
    """A stop that a host cannot confirm ends with code 14 and its name; the host ends its ranks by itself."""
    run.bench.lab.blackhole("node2")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 14, run.err
    assert run.json["unverified"] == ["node2"]
    assert "node2" in run.json["reason"]
    wait_for(lambda: not run.left(), LEASE_S + 15, lambda: str(run.left()))


def test_head_without_power(launch_lab, run):
    """When the head loses its power the hosts end the run by themselves within the lease."""
    launch_lab.lab.power_cut("head")
    wait_for(lambda: not run.left(), LEASE_S + 15, lambda: str(run.left()))


def test_memory(launch_lab, two):
    """A rank that the kernel kills for memory ends the run with code 11 and its host's name."""
    launch_lab.lab.memory("node2", 420)
    run = launch_lab.launch(two, *ENDLESS)
    failure = ended(run, 11)
    assert failure["host"] == "node2"


def test_full_disk(launch_lab, two):
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
