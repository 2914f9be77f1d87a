"""What a launch brings to hosts that lack it: environment, code, a model that differs; and whom it asks before."""

from __future__ import annotations

import json
import os
import platform
import pty
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from tests.cluster.hosts import make_facts
from tests.launch.jobs import write_job
from tests.launch.launchlab import LLMTRAIN

from llmtrain.cluster.findings import Finding
from llmtrain.cluster.probes import ops_name
from llmtrain.launch import delivery
from llmtrain.launch.delivery import Output, bring_home
from llmtrain.launch.lineage import judge_lineage, read_software, software_of
from llmtrain.launch.stage import LinkError
from llmtrain.launch.verdict import Outcome

ENV = "/data/envs/train-1"
LIBRARY = "/root/library"
PACKAGES = {one: version(one) for one in ("torch", "deepspeed")}
OPS = ops_name(platform.python_version(), PACKAGES, f"{ENV}/bin/python")
RUN_FILE = f"""\
model: {{path: /root/own model, dtype: fp32}}
data: {{path: /root/data.jsonl, max_length: 64}}
batch: {{micro: 1, accumulation: 1}}
training: {{max_steps: 2, loader_workers: 0, save_steps: 2}}
env: {{OMP_NUM_THREADS: 1}}
environment: {ENV}
ports: 21000-21999
sync: {{model: same, paths: [{LIBRARY}]}}
"""


@pytest.fixture(scope="module")
def folder(launch_lab):
    """An environment and a library on the head alone, and a host with another model at our model's path.

    The environment is a venv of its own whose heavy packages are those of the tests: hosts see them anyway.
    """
    lab = launch_lab.lab
    heavy = next(path for path in sys.path if path.endswith("site-packages"))
    script = (
        f"set -e; mkdir -p /data/envs {LIBRARY}; {sys.executable} -m venv --without-pip {ENV};"
        f"echo {heavy} > $(echo {ENV}/lib/python3*/site-packages)/heavy.pth;"
        # Another ninja would not take the compiled operations for its own.
        f"ln -s {Path(sys.executable).with_name('ninja')} {ENV}/bin/ninja;"
        f"echo 'x = 1' > {LIBRARY}/mine.py; cp -r /root/model '/root/own model'"
    )
    lab.run("head", ["bash", "-c", script])
    # As if this environment had compiled them here: the headers are the same.
    lab.run("head", ["bash", "-c", f"cd /root/.llmtrain/ops; cp -a $(ls | head -1) {OPS}"])
    lab.run("node2", ["sh", "-c", "mkdir '/root/own model'; echo '{}' > '/root/own model/config.json'"])
    return launch_lab.folder("/root/supply", hosts="node1 node2", run=RUN_FILE)


@pytest.fixture(scope="module")
def unasked(launch_lab, folder):
    """The launch without a terminal and without --yes, and which hosts have the environment afterwards."""
    run = launch_lab.launch(folder, "--json")
    run.wait()
    return run, [launch_lab.lab.run(host, ["test", "-e", ENV], check=False).returncode for host in ("node1", "node2")]


def test_without_a_terminal_nothing_is_brought_and_the_command_is_named(unasked):
    """Exit 4 names the environment, the hosts that lack it and the command that brings it; nothing was copied."""
    run, there = unasked
    assert run.process.returncode == 4, run.err
    assert re.search(rf"bring the environment {ENV} \(0\.\d\d GiB\), missing on node1, node2", run.json["error"])
    assert f"llmtrain sync-env {ENV} --hosts" in run.json["fix"]
    assert there == [1, 1]


def answer(launch_lab, folder, text):
    """Launch at a terminal, answer its first question; exit code and what the terminal showed."""
    ours, theirs = pty.openpty()
    argv = [LLMTRAIN, "launch", "--hosts", "hostfile", "--config", "zero3-offload"]
    process = launch_lab.lab.popen("head", argv, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        while b"[y/N]" not in shown:
            shown += os.read(ours, 4096)
        os.write(ours, text.encode())
        while block := os.read(ours, 4096):
            shown += block
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(ours)
    return process.wait(60), shown.decode()


def test_at_a_terminal_it_asks_and_takes_no_for_an_answer(launch_lab, folder, unasked):
    """The question names what would happen; anything but a yes ends the launch with code 4."""
    code, shown = answer(launch_lab, folder, "\n")
    assert "GiB), missing on node1, node2? [y/N]" in shown
    assert code == 4
    assert "the answer was no" in shown


@pytest.fixture(scope="module")
def brought(launch_lab, folder, unasked):
    """The launch with --yes."""
    run = launch_lab.launch(folder, "--json", "--yes")
    run.wait()
    return run


def test_with_yes_the_launch_trains_in_the_environment_it_brought(launch_lab, brought):
    """Hosts that had no such prefix train in it, and all that was brought is said."""
    assert brought.process.returncode == 0, brought.err
    assert brought.json["last_step"] == 2
    assert "2 of 2 hosts are equal to the source" in brought.err
    script = "import sys; print(sys.prefix)"
    assert launch_lab.lab.run("node2", [f"{ENV}/bin/python", "-c", script]).stdout.strip() == ENV


def test_compiled_operations_come_along(launch_lab, brought):
    """What was compiled here for the environment is on the hosts, and the ranks did not compile it again."""
    there = f"/root/.llmtrain/ops/{OPS}/deepspeed_shm_comm"
    look = ["stat", "-c", "%Y", f"{there}/.ninja_log", f"{there}/deepspeed_shm_comm.so"]
    assert "compiled operations (cpu_adam, deepspeed_shm_comm) go along" in brought.err
    assert launch_lab.lab.run("node1", look).stdout == launch_lab.lab.run("head", look).stdout


def test_code_and_a_model_that_differed_are_as_here(launch_lab, brought):
    """A path of the run file is on all hosts, the model that differed is replaced, and the old one can be had back."""
    lab = launch_lab.lab
    assert lab.read("node1", f"{LIBRARY}/mine.py") == "x = 1\n"
    assert lab.read("node2", "/root/own model/config.json") == lab.read("head", "/root/model/config.json")
    assert (
        "replace /root/own model, which differs on node2 (theirs is kept: llmtrain sync --rollback)? --yes"
        in brought.err
    )
    back = [LLMTRAIN, "sync", "/root/own model", "/root/own model", "node2", "node2", "--rollback"]
    lab.run("head", [*back, "--hosts", f"{brought.folder}/hostfile"])
    assert lab.read("node2", "/root/own model/config.json") == "{}\n"


def test_the_environment_is_recorded(brought):
    """run.json names the prefix and one digest, versions.json the digest of every host."""
    environment = json.loads((brought.dir / "run.json").read_text())["environment"]
    hosts = json.loads((brought.dir / "versions.json").read_text())["hosts"]
    assert environment["prefix"] == ENV
    assert environment["digests"] == [hosts["node1"]["environment"]] == [hosts["node2"]["environment"]]


def test_an_environment_that_changed_is_brought_again_only_if_asked_for(launch_lab, folder, brought):
    """By default an environment that is there is used; with `same` a difference is seen and would be brought."""
    script = f"echo 'x = 2' > $(echo {ENV}/lib/python3*/site-packages)/extra.py"
    launch_lab.lab.run("head", ["bash", "-c", script])
    default = launch_lab.launch(folder, "--dry-run", "--output", "other")
    strict = launch_lab.launch(folder, "--dry-run", "--output", "other", "--set", "sync.environment=same")
    assert (default.wait(), strict.wait()) == (0, 0), default.err + strict.err
    assert "a launch brings it" not in default.err
    assert f"the environment {ENV} is different on node1, node2: a launch brings it" in strict.err


def test_a_resumed_run_is_warned_of_another_environment(tmp_path, monkeypatch):
    """The checkpoint's path leads to the records of its run; only a host whose environment changed gets a warning."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    before = {name: software_of(make_facts(name, environment="a" * 64)) for name in ("one", "two")}
    folder = tmp_path / "llmtrain/runs/demo-1"
    folder.mkdir(parents=True)
    (folder / "versions.json").write_text(json.dumps({"schema": 1, "hosts": before}))
    found = read_software("/home/me/.llmtrain/runs/demo-1/checkpoints/checkpoint-10")
    assert found == before
    now = make_facts("two", environment="b" * 64)
    now.packages["torch"] = "2.14.0"
    findings = judge_lineage(found, {"one": make_facts("one", environment="a" * 64), "two": now})
    assert [(one.host, one.level) for one in findings] == [("two", "warn")]
    assert "torch 2.13.0 -> 2.14.0" in findings[0].saw
    assert isinstance(findings[0], Finding)
    assert read_software("/elsewhere/checkpoint-10") == {}
    assert judge_lineage({}, {"two": now}) == []


class Away:
    """A transport whose OpenSSH cannot connect for the first so many times."""

    def __init__(self, times, source: Path) -> None:
        self.times = times
        self.source = source

    def bulk(self, argv):
        """Fail as ssh does, or pack the folder after the mark."""
        self.times -= 1
        script = "echo refused >&2; exit 255" if self.times >= 0 else argv[2]
        pipe = subprocess.PIPE
        words = ["/bin/sh", "-c", script, *argv[3:]]
        return subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)


@pytest.mark.parametrize(("times", "good"), [(2, True), (99, False)])
def test_a_model_is_fetched_again_while_a_host_is_away_and_stays_there_if_it_remains_so(
    tmp_path, monkeypatch, times, good
):
    """A refused connection is tried again; in the end the outcome says where the model still is, with the command."""
    from llmtrain.launch.prepare import plan_launch

    monkeypatch.setattr(delivery, "AGAIN_S", 0.01)
    monkeypatch.setattr(delivery, "PATIENCE_S", 0.2)
    job, contact = write_job(tmp_path)
    plan = plan_launch(job, contact, "demo-1", {})
    place = tmp_path / "host/output"
    place.mkdir(parents=True)
    (place / "weights").write_text("w")
    hosts = (delivery.replace(plan.hosts[0], own_dir=str(place.parent)), *plan.hosts[1:])
    plan = delivery.replace(plan, hosts=hosts)
    fleet = {plan.hosts[0].name: Away(times, place)}
    told = []
    outcome = Outcome(ok=True, exit_code=0, run_dir=str(tmp_path), reason="done")
    output = Output(host=None, path=str(tmp_path / "tuned"))
    end = bring_home(plan, output, fleet, outcome, lambda what, values: told.append(what))
    assert end.ok == good
    assert "again" in told
    if good:
        assert (tmp_path / "tuned/weights").read_text() == "w"
    else:
        assert end.first_failure.advice.startswith("scp -rp -- gpu004:")
        assert issubclass(LinkError, Exception)
        assert (place / "weights").exists()
