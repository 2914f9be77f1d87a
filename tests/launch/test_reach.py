"""Ways to the hosts: a jump host, this machine without sshd; the same numbers whichever way the ranks are spread."""

from __future__ import annotations

import os
import signal

import pytest
from tests.documented import stale_lines

JUMP = """\
Host node1
    ProxyJump root@node3:22
"""


@pytest.fixture(scope="module")
def behind_jump(launch_lab):
    """A working folder for two hosts, of which the head reaches node1 only through node3."""
    lab = launch_lab.lab
    lab.write("head", "/root/.ssh/config", JUMP, mode=0o600)
    yield launch_lab.folder("/root/jump", hosts="node1 node2")
    lab.run("head", ["rm", "/root/.ssh/config"])


@pytest.fixture(scope="module")
def jumped(launch_lab, behind_jump):
    """Two hosts with a slot each, one of them behind a jump host."""
    launch_lab.lab.cut("head", "node1")
    run = launch_lab.launch(behind_jump, "--json", "--output", "node1:/root/deep/tuned")
    run.wait()
    launch_lab.lab.heal("head", "node1")
    return run


@pytest.fixture(scope="module")
def alone(launch_lab):
    """This machine alone with two slots, while its sshd does not run."""
    launch_lab.lab.sshd_stop("head")
    folder = launch_lab.folder("/root/alone")
    launch_lab.lab.write("head", f"{folder}/hostfile", "localhost slots=2\n")
    run = launch_lab.launch(folder, "--json", "--output", "tuned")
    run.wait()
    launch_lab.lab.sshd_start("head")
    return run


def test_jump_host_serves_the_whole_launch(jumped):
    """A host behind ProxyJump of ~/.ssh/config is reached by every part of a launch: questions, copies and pdsh."""
    assert jumped.process.returncode == 0, jumped.err


def test_output_may_be_a_folder_of_a_host(jumped, launch_lab, behind_jump):
    """With HOST:DIR the model goes to that host and nothing of it stays here; what exists there is refused at once."""
    place = launch_lab.lab.state.disk("node1") / "root/deep/tuned"
    assert (place / "model.safetensors").exists()
    assert sorted(path.name for path in jumped.disk.iterdir()) == ["hostfile", "llmtrain.yaml", "runs"]
    again = launch_lab.launch(behind_jump, "--json", "--dry-run", "--output", "node1:/root/deep/tuned")
    assert again.wait() == 2
    assert (again.json["error"], again.json["where"]) == (
        "the output exists, and is never overwritten",
        "node1:/root/deep/tuned",
    )


def test_one_machine_needs_no_sshd(alone):
    """A hostfile that names only this machine trains without sshd, and leaves nothing, in shared memory neither."""
    assert alone.process.returncode == 0, alone.err
    assert (alone.disk / "tuned/model.safetensors").exists()
    alone.bench.wait_quiet()
    assert list(alone.bench.lab.state.disk("head").glob("root/.llmtrain/runs/*")) == []
    assert alone.bench.lab.run("head", ["ls", "-A", "/dev/shm"]).stdout == ""


def test_losses_do_not_depend_on_where_ranks_run(alone, jumped):
    """One host with two slots and two hosts with one slot give the same losses in fp32."""
    assert len(alone.losses) == len(jumped.losses) == 3
    assert alone.losses == pytest.approx(jumped.losses, abs=1e-3)


def test_ctrl_c_at_a_terminal_spares_the_way_to_the_hosts(launch_lab, behind_jump):
    """Ctrl-C reaches all processes of the terminal, yet the jump connection lives until everything is ended."""
    launch_lab.lab.cut("head", "node1")
    run = launch_lab.launch(behind_jump, "--json", "--set", "training.max_steps=100000")
    run.wait_launcher()
    group = run.process.pid
    for item in launch_lab.children("head", run.process):
        if os.getpgid(item.outer_pid) == group:
            launch_lab.kill(item, signal.SIGINT)
    assert run.wait() == 130, run.err
    assert run.json["unverified"] == []
    run.wait_gone()
    launch_lab.wait_quiet()


def test_smoke_passes_on_this_machine(launch_lab):
    """`llmtrain smoke` takes the whole real path on this machine and leaves neither run nor file behind."""
    folder = launch_lab.folder("/root/smoking")
    before = sorted(path.name for path in launch_lab.lab.state.disk("head").glob("root/smoking/*"))
    temporary = launch_lab.lab.run("head", ["ls", "-A", "/tmp"]).stdout
    links = launch_lab.lab.run("head", ["ls", "/root/.local/state/llmtrain/runs"], check=False).stdout
    run = launch_lab.start(folder, "smoke", "--json", "--env", "OMP_NUM_THREADS=1")
    assert run.wait() == 0, run.err
    assert [stage["stage"] for stage in run.json["stages"]][:2] == ["make model", "contact and check"]
    assert stale_lines("smoke", "llmtrain smoke", run.err) == [], run.err
    assert sorted(path.name for path in run.disk.iterdir()) == before
    assert launch_lab.lab.run("head", ["ls", "-A", "/tmp"]).stdout == temporary
    assert launch_lab.lab.run("head", ["ls", "/root/.local/state/llmtrain/runs"], check=False).stdout == links
    launch_lab.wait_quiet()
