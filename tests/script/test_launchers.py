"""A module where this machine has no pdsh, and scripts that fail or are stopped."""

from __future__ import annotations

import json
import signal

import pytest

NO_PDSH = {"PATH": "/root/few"}
"""A head whose PATH holds ssh and tar only."""
PLAIN = """
import json, os, sys, deepspeed, torch
print("argv", json.dumps(sys.argv[1:]), torch.distributed.is_initialized(), os.getcwd(), flush=True)
engine, *_ = deepspeed.initialize(model=torch.nn.Linear(8, 8), config=sys.argv[1])
for _ in range(2):
    engine.backward(engine(torch.ones(1, 8, dtype=engine.get_data_types()[0])).sum())
    engine.step()
engine.save_checkpoint(sys.argv[2])
"""
FAILING = """
import os, sys, time
if os.environ["RANK"] == "1":
    raise ZeroDivisionError("on purpose")
time.sleep(600)
"""
SETS = ("--set", "env.OMP_NUM_THREADS=1", "--hosts", "hostfile")


@pytest.fixture(scope="module")
def poor_head(script_lab):
    """PATH of a head without pdsh."""
    for name in ("ssh", "tar", "ssh-keygen"):
        script_lab.lab.run("head", ["sh", "-c", f"mkdir -p /root/few; ln -sf $(command -v {name}) /root/few/"])
    return NO_PDSH


@pytest.fixture(scope="module")
def module(script_lab, poor_head):
    """A module of a package that calls deepspeed.initialize, sent with everything around it."""
    files = {"pkg/__init__.py": "", "pkg/plain.py": PLAIN, ".gitignore": "secret*\n", "secret.txt": "x", "note.txt": ""}
    folder = script_lab.folder("/root/module", files)
    argv = ["launch", *SETS, "--config", "zero2", "--set", "deepspeed.scheduler.type=WarmupLR", "--json"]
    argv += ["--set", "deepspeed.scheduler.params={warmup_max_lr: auto, warmup_num_steps: 1}"]
    argv += ["--set", "batch.accumulation=1", "--", "-m", "pkg.plain", "{ds_config_resolved}", "{output}/ckpt", "a b"]
    done = script_lab.llmtrain(folder, *argv, env=poor_head)
    assert done.code == 0, done.err
    return done


def test_auto_takes_ssh_without_pdsh(module):
    """Without pdsh here the launcher is ours, and the plan says why."""
    assert "launcher = ssh: no pdsh on this machine" in module.err


def test_module_starts_connected_in_its_folder(module):
    """A module runs after the ranks are connected, in the copy of the folder it was started from."""
    run = json.loads((module.run / "run.json").read_text())["run_dir"]
    words = json.dumps([f"{run}/ds_config_resolved.json", f"{run}/output/ckpt", "a b"])
    for rank, host in enumerate(("node1", "node2")):
        assert f"argv {words} True {run}/project\n" in module.log(host, rank)


def test_checkpoints_stay_on_the_hosts(module, script_lab):
    """DeepSpeed checkpoints that a script writes are named in the outcome and stay where their parts are."""
    found = module.json["checkpoints"]
    assert set(found) == {"node1", "node2"}
    for host, (path,) in found.items():
        assert path.endswith("/ckpt/global_step2")
        assert list((script_lab.lab.state.disk(host) / path.lstrip("/")).glob("*optim_states.pt"))
        sent = script_lab.lab.state.disk(host) / path.lstrip("/").partition("/output")[0]
        assert [item.name for item in sent.iterdir()] == ["output"]


def test_size_of_the_code_is_shown(module):
    """The plan says what is sent; what .gitignore names is not."""
    assert "code = /root/module: 5 files" in module.err


@pytest.mark.parametrize("launcher", ["pdsh", "ssh"])
def test_failing_script(script_lab, launcher):
    """One rank's exception ends the run on all hosts, and is named with its line and host."""
    folder = script_lab.folder(f"/root/failing-{launcher}", {"train.py": FAILING})
    done = script_lab.llmtrain(
        folder, "launch", *SETS, "--launcher", launcher, "--config", "zero2", "--json", "--", "train.py"
    )
    failure = done.json["first_failure"]
    assert (done.code, failure["host"], failure["rank"], failure["message"]) == (8, "node2", 1, "on purpose")
    assert failure["where"].endswith("/project/train.py:4")
    assert done.json["leftovers"] == {}
    assert done.json["unverified"] == []


def test_stop_on_the_ssh_launcher(script_lab):
    """TERM ends every process of the run on every host, without pdsh in between."""
    folder = script_lab.folder("/root/stopped", {"train.py": "import time; print('here', flush=True); time.sleep(600)"})
    argv = ("launch", *SETS, "--launcher", "ssh", "--config", "zero2", "--json", "--", "train.py")
    done = script_lab.llmtrain(folder, *argv, until="here", number=signal.SIGTERM)
    assert done.code == 143, done.err
    assert (done.json["leftovers"], done.json["unverified"]) == ({}, [])
