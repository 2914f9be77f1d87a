"""However a launch ends, nothing of it is left on any host, other runs go on, and the outcome says what happened."""

from __future__ import annotations

import signal
import time

import pytest

ENDLESS = ("--json", "--set", "training.max_steps=100000")


@pytest.fixture(scope="module")
def two(launch_lab):
    """A working folder for runs over two hosts."""
    return launch_lab.folder("/root/two", hosts="node1 node2")


@pytest.fixture(scope="module")
def pair(launch_lab, two):
    """Two runs at once on the same hosts; the first is then stopped by SIGTERM, the second loses its pdsh."""
    other = launch_lab.folder("/root/other", hosts="node1 node2")
    first = launch_lab.launch(two, *ENDLESS)
    second = launch_lab.launch(other, *ENDLESS)
    first.wait_step(2)
    second.wait_step(2)
    first.process.send_signal(signal.SIGTERM)
    first.wait()
    first.wait_gone()
    second.reached = second.step
    second.wait_step(second.reached + 3)
    (pdsh,) = second.find("pdsh")
    launch_lab.kill(pdsh)
    second.wait()
    second.wait_gone()
    return first, second


def test_sigterm_ends_one_run_and_leaves_the_other_stepping(pair):
    """Of two runs on the same hosts one is stopped by SIGTERM, saved, code 15; the other one goes on training."""
    first, second = pair
    assert first.process.returncode == 15, first.err
    assert first.outcome["reason"].startswith("stopped by SIGTERM, saved after step")
    assert (first.outcome["leftovers"], first.outcome["unverified"]) == ({}, [])
    assert second.step >= second.reached + 3


def test_killed_pdsh_is_no_success(pair):
    """With pdsh killed, DeepSpeed's runner exits 0; the launch ends with code 13 and names the launcher."""
    _, second = pair
    assert second.process.returncode == 13, second.err
    assert second.json["first_failure"]["cause"] == "launcher"


def test_killed_runner(launch_lab, two):
    """With DeepSpeed's runner killed while it starts the ranks, the launch ends with code 13 and nothing is left."""
    run = launch_lab.launch(two, *ENDLESS)
    run.wait_launcher()
    (runner,) = run.find("runner")
    launch_lab.kill(runner)
    assert run.wait() == 13
    assert "killed by signal 9" in run.json["first_failure"]["message"]
    run.wait_gone()
    launch_lab.wait_quiet()


def test_killed_supervisor(launch_lab, two):
    """When its supervisor is killed, every process of the run ends on every host, and the terminal says so: code 13."""
    run = launch_lab.launch(two, *ENDLESS)
    run.wait_text("all 2 ranks have started")
    launch_lab.kill(run.supervisor())
    assert run.wait() == 13
    assert "supervisor was killed by signal 9" in run.json["error"]
    run.wait_gone()
    launch_lab.wait_quiet()


def test_interrupt_during_start(launch_lab, two):
    """Ctrl-C before the ranks have started ends with code 130 and leaves nothing, no environment file either."""
    run = launch_lab.launch(two, *ENDLESS)
    run.wait_launcher()
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    assert run.json["reason"] == "stopped by SIGINT"
    run.wait_gone()
    launch_lab.wait_quiet()
    for host in ("node1", "node2"):
        assert list(launch_lab.lab.state.disk(host).glob("root/.llmtrain/runs/*/env.json")) == []


def test_interrupt_during_copy(launch_lab):
    """Ctrl-C while the model is copied ends at once with code 130; no host keeps a part of the copy."""
    lab = launch_lab.lab
    lab.run("head", ["cp", "-r", "/root/model", "/root/another"])
    lab.run("head", ["dd", "if=/dev/urandom", "of=/root/another/ballast", "bs=1M", "count=40"])
    folder = launch_lab.folder("/root/copying", hosts="node3")
    lab.rate("node3", "10mbit")
    run = launch_lab.launch(folder, *ENDLESS, "--model", "/root/another")
    run.wait_text("copying /root/another to node3")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    assert "copying /root/another to node3: 100%" not in run.err
    assert (run.json["error"], run.outcome["reason"]) == ("stopped by SIGINT", "stopped by SIGINT")
    launch_lab.wait_quiet()
    assert list(lab.state.disk("node3").glob("root/another*")) == []


def test_launch_waits_for_another_that_brings_the_same_model(launch_lab):
    """Where another sync to the same place is running, a launch says so, waits, and then goes on."""
    lab = launch_lab.lab
    folder = launch_lab.folder("/root/waiting", hosts="node3")
    lab.run("head", ["cp", "-r", "/root/model", "/root/shared-model"])
    lab.run("node3", ["mkdir", "-p", "/root/.shared-model.llmtrain"])
    other = lab.popen("node3", ["flock", "/root/.shared-model.llmtrain/lock", "sleep", "600"])
    run = launch_lab.launch(folder, "--json", "--model", "/root/shared-model")
    run.wait_text("another launch is copying /root/shared-model to node3")
    other.kill_group()
    other.wait()
    assert run.wait() == 0, run.err
    assert (lab.state.disk("node3") / "root/shared-model/model.safetensors").exists()


def test_killed_rank(launch_lab, two):
    """A rank killed by SIGKILL ends the run with code 8, naming host, rank and signal, and nothing is left."""
    run = launch_lab.launch(two, *ENDLESS)
    run.wait_step(1)
    launch_lab.kill(run.rank(1)[1])
    assert run.wait() == 8, run.err
    failure = run.json["first_failure"]
    assert (failure["host"], failure["rank"], failure["cause"]) == ("node2", 1, "killed")
    assert "SIGKILL" in failure["message"]
    assert "where: node2, rank 1" in run.err
    run.wait_gone()
    launch_lab.wait_quiet()


def test_link_cut_for_a_while_then_power_cut(launch_lab, two):
    """A link that is gone for five seconds does not end a run; a host without power does, with code 9 and its name."""
    run = launch_lab.launch(two, *ENDLESS)
    run.wait_step(1)
    launch_lab.lab.cut("node2")
    time.sleep(5)
    launch_lab.lab.heal("node2")
    run.wait_step(run.step + 3)
    launch_lab.lab.power_cut("node2")
    assert run.wait() == 9, run.err
    failure = run.json["first_failure"]
    assert (failure["host"], failure["cause"]) == ("node2", "host-lost")
    run.wait_gone()
    launch_lab.wait_quiet()
