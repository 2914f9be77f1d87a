from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.train.runs import make_run

from llmtrain.train import rank

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run_file(tmp_path):
    """A run on two ranks that nothing is loaded for."""
    return make_run(tmp_path / "run", "/m", "/d", world=2)


def execute_apart(run_file, code, **env):
    """Run code that ends with an exit code in a Python of its own, as rank 1 of 2."""
    place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", **env}
    setup = f"import sys; from pathlib import Path; from llmtrain.train import rank; FILE = Path({str(run_file)!r}); "
    done = subprocess.run(  # noqa: PLW1510 - its exit code is what is tested
        [sys.executable, "-c", setup + code], env={**os.environ, **place}, capture_output=True, text=True, timeout=60
    )
    record = run_file.parent / "done" / "1.json"
    return done, json.loads(record.read_text()) if record.exists() else None


def test_wrong_world_size_ends_before_torch(run_file):
    """A launch with another number of ranks than planned fails at once, without importing torch."""
    code = "code = rank.execute(FILE); assert 'torch' not in sys.modules; sys.exit(code)"
    done, record = execute_apart(run_file, code, WORLD_SIZE="3")
    assert done.returncode == 1, done.stderr
    assert record["ok"] is False
    assert record["error"]["type"] == "WorldSizeError"
    assert record["error"]["message"].startswith("the launcher started 3 ranks, but the run was planned for 2")
    assert (record["rank"], record["world_size"], record["exit_code"], record["signal"]) == (1, 3, 1, None)


TASK = "import types; task = types.ModuleType('task'); task.run = {body}; sys.modules['task'] = task; "
START = "rank.TASKS['finetune'] = 'task'; sys.exit(rank.execute(FILE))"


def test_success(run_file):
    """A task that returns leaves an ok record with its last step, and the last beat says done."""
    body = "lambda run, place, beat: beat.advance(7)"
    done, record = execute_apart(run_file, TASK.format(body=body) + START)
    assert done.returncode == 0, done.stderr
    assert (record["ok"], record["step"], record["error"], record["exit_code"]) == (True, 7, None, 0)
    assert json.loads((run_file.parent / "beat" / "1.json").read_text())["phase"] == "done"


@pytest.mark.parametrize(
    ("raised", "kind"), [("ZeroDivisionError('oh')", "ZeroDivisionError"), ("SystemExit(0)", "SystemExit")]
)
def test_exception(run_file, raised, kind):
    """Whatever a task raises is recorded with its place and printed, even an exit that claims success."""
    body = f"lambda *_: (_ for _ in ()).throw({raised})"
    done, record = execute_apart(run_file, TASK.format(body=body) + START)
    assert done.returncode == 1
    assert (record["ok"], record["error"]["type"], record["exit_code"]) == (False, kind, 1)
    assert "Traceback" in done.stderr
    assert kind in record["error"]["tail"]


def test_cores_and_threads(run_file):
    """The rank is bound to the cores of its local rank and gets its threads before the task starts."""
    document = json.loads(run_file.read_text())
    run_file.write_text(json.dumps({**document, "cores": {"0": [99], "1": [0]}, "threads": 3}))
    body = "lambda *_: print(os.sched_getaffinity(0), os.environ['OMP_NUM_THREADS'])"
    done, _ = execute_apart(run_file, "import os; " + TASK.format(body=body) + START)
    assert done.stdout == "{0} 3\n", done.stderr


def test_cores_that_are_not_there(run_file):
    """Cores that this container may not use are warned about, not fatal."""
    document = json.loads(run_file.read_text())
    run_file.write_text(json.dumps({**document, "cores": {"1": [100_000]}}))
    done, record = execute_apart(run_file, TASK.format(body="lambda *_: None") + START)
    assert record["ok"], done.stderr
    assert "cannot bind" in done.stderr


def test_unknown_task(run_file):
    """A task of a later version is refused by name."""
    run_file.write_text(json.dumps({**json.loads(run_file.read_text()), "task": "dance"}))
    _, record = execute_apart(run_file, "sys.exit(rank.execute(FILE))")
    assert "'dance'" in record["error"]["message"]


def test_leaving_does_not_wait(run_file):
    """The process ends with its code although a thread is still busy and a batch-loading child is alive."""
    code = (
        "import multiprocessing, threading, time; threading.Thread(target=time.sleep, args=(3600,)).start(); "
        "multiprocessing.get_context('fork').Process(target=time.sleep, args=(3600,)).start(); rank._leave(5)"
    )
    done, _ = execute_apart(run_file, code)
    assert done.returncode == 5


def test_tasks_exist():
    """Every task names a module of ours."""
    for module in rank.TASKS.values():
        assert (ROOT / "src" / f"{module.replace('.', '/')}.py").is_file()
