from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmtrain.process import find_marked

ENTRY = Path(__file__).resolve().parents[2] / "src" / "llmtrain" / "train" / "entry.py"
RANK = {
    "kill": "import os, signal; print('last words', flush=True); os.kill(os.getpid(), signal.SIGKILL)",
    "leave": "import os; os._exit(7)",
    "sleep": "import time; print('begun', flush=True); time.sleep(60)",
    "stubborn": "import signal, time; signal.signal(15, signal.SIG_IGN); print('begun', flush=True); time.sleep(60)",
    "record": "import os, sys; open(os.path.dirname(sys.argv[1]) + '/done/0.json', 'w').write('{\"own\": 1}')",
    "loader": "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])",
    "eat": "data = [bytearray(b'x' * (8 << 20)) for _ in range(200)]",
}


@pytest.fixture
def run_dir(tmp_path):
    """A run folder whose rank module does what a test wants."""
    for name in ("logs", "ranks", "done", "beat", "code/llmtrain/train"):
        (tmp_path / name).mkdir(parents=True)
    for package in ("code/llmtrain", "code/llmtrain/train"):
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "run.json").write_text(json.dumps({"host": "gpu004", "run_dir": str(tmp_path)}))
    return tmp_path


@pytest.fixture
def start(run_dir):
    """Start the leash of a rank; whatever is left of it goes with the test."""
    with contextlib.ExitStack() as stack:

        def run(behaviour):
            (run_dir / "code/llmtrain/train/rank.py").write_text(RANK[behaviour])
            env = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LLMTRAIN_RUN_ID": run_dir.name}
            argv = [sys.executable, str(ENTRY), str(run_dir / "run.json")]
            leash = stack.enter_context(subprocess.Popen(argv, stdin=subprocess.PIPE, env=env))
            stack.callback(leash.kill)
            return leash

        yield run


def _done(run_dir):
    return json.loads((run_dir / "done" / "0.json").read_text())


def _wait_for(path, text):
    for _ in range(200):
        if path.exists() and text in path.read_text():
            return
        time.sleep(0.05)
    raise AssertionError(f"{text!r} never came")


def _gone(pid):
    return (
        not Path(f"/proc/{pid}").exists() or Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    )


def test_a_killed_rank_gets_a_record_with_its_last_words(run_dir, start):
    """A rank that a signal ends leaves a record of the signal and of the last lines it printed."""
    leash = start("kill")
    assert leash.wait(timeout=20) == 128 + signal.SIGKILL
    record = _done(run_dir)
    assert (record["ok"], record["signal"], record["error"]["type"]) == (False, 9, "Killed")
    assert record["error"]["tail"] == "last words"


def test_an_exit_without_a_record_is_a_failure(run_dir, start):
    """A rank that leaves without a word has failed, whatever its exit code."""
    leash = start("leave")
    assert leash.wait(timeout=20) == 7
    assert _done(run_dir)["error"]["type"] == "Exited"


def test_a_ranks_own_record_is_kept(run_dir, start):
    """The leash does not overwrite what the rank wrote."""
    start("record").wait(timeout=20)
    assert _done(run_dir) == {"own": 1}


def test_the_end_of_the_launcher_ends_the_rank(run_dir, start):
    """When standard input ends, because pdsh or ssh is gone, the rank is ended."""
    leash = start("sleep")
    _wait_for(run_dir / "logs/gpu004-0.log", "begun")
    pid = json.loads((run_dir / "ranks/0.json").read_text())["pid"]
    leash.stdin.close()
    leash.wait(timeout=20)
    assert _gone(pid)
    assert _done(run_dir)["error"]["type"] == "Abandoned"


def test_a_rank_that_ignores_the_request_is_killed(run_dir, start):
    """A rank that does not end on TERM is killed after the grace."""
    leash = start("stubborn")
    _wait_for(run_dir / "logs/gpu004-0.log", "begun")
    leash.send_signal(signal.SIGTERM)
    leash.wait(timeout=20)
    assert _done(run_dir)["signal"] == 9
    assert _done(run_dir)["error"]["type"] == "Stopped"


def test_the_rank_dies_with_its_leash(run_dir, start):
    """SIGKILL of the leash leaves no rank behind: the kernel ends it."""
    leash = start("sleep")
    _wait_for(run_dir / "logs/gpu004-0.log", "begun")
    pid = json.loads((run_dir / "ranks/0.json").read_text())["pid"]
    leash.kill()
    leash.wait(timeout=20)
    for _ in range(100):
        if _gone(pid):
            break
        time.sleep(0.05)
    assert _gone(pid)


def test_loader_processes_do_not_outlive_the_rank(run_dir, start):
    """What the rank started in its session ends with it."""
    start("loader").wait(timeout=20)
    assert find_marked(run_dir.name) == {}


def test_the_kernels_memory_kill_is_named(run_dir, lab3):
    """A rank that the kernel kills for memory is told from one that a person kills."""
    lab3.memory("node1", 200)
    (run_dir / "code/llmtrain/train/rank.py").write_text(RANK["eat"])
    for path in [path for path in run_dir.rglob("*") if path.is_file()]:
        lab3.write("node1", f"/root/run/{path.relative_to(run_dir)}", path.read_text())
    for name in ("logs", "ranks", "done", "beat"):
        lab3.run("node1", ["mkdir", "-p", f"/root/run/{name}"])
    lab3.write("node1", "/root/run/run.json", json.dumps({"host": "node1", "run_dir": "/root/run"}))
    command = f"RANK=0 WORLD_SIZE=1 {sys.executable} {ENTRY} /root/run/run.json"
    with subprocess.Popen(["sleep", "60"], stdout=subprocess.PIPE) as open_input:
        ssh = lab3.popen("head", ["ssh", "node1", command], stdin=open_input.stdout)
        ssh.wait(timeout=60)
        open_input.kill()
    error = json.loads(lab3.read("node1", "/root/run/done/0.json"))["error"]
    assert error["type"] == "HostOutOfMemory"
