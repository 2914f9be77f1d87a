"""A user's program in one rank, without communication."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.train.runs import make_run

ROOT = Path(__file__).parents[2]


def run_apart(folder, kind, target, code="", *, setup="pass"):
    """Run a program as the only rank; returns the process and its done record."""
    run_file = make_run(folder / "run", "", "", world=1)
    project = folder / "project"
    (project / "pkg").mkdir(parents=True)
    (project / "near.py").write_text("WORD = 'near'\n")
    (project / "train.py").write_text(code)
    (project / "pkg/__init__.py").write_text("")
    (project / "pkg/job.py").write_text(code)
    script = {"kind": kind, "target": target.format(project=project), "args": ["a b", "$x"], "cwd": str(project)}
    run_file.write_text(json.dumps({**json.loads(run_file.read_text()), "task": "script", "script": script}))
    start = (
        "import sys; from pathlib import Path; from llmtrain.train import rank, script; "
        f"script._connect = lambda: print('connected'); {setup}; rank._leave(rank.execute(Path({str(run_file)!r})))"
    )
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "PYTHONPATH": f"{ROOT / 'src'}"}
    env = {key: value for key, value in os.environ.items() if key != "DS_ACCELERATOR"} | place
    done = subprocess.run(  # noqa: PLW1510 - its exit code is what is tested
        [sys.executable, "-c", start], env=env, capture_output=True, text=True, timeout=60
    )
    return done, json.loads((folder / "run/done/0.json").read_text())


SHOW = "import os, sys, near; print(__name__, sys.argv[1:], near.WORD, os.path.basename(os.getcwd()))"


def test_file(tmp_path):
    """A file runs as the main program beside its neighbours, and nothing is connected for it on a GPU host."""
    done, record = run_apart(tmp_path, "file", "{project}/train.py", SHOW)
    assert done.stdout == "__main__ ['a b', '$x'] near project\n", done.stderr
    assert record["ok"]
    assert (tmp_path / "run/output").is_dir()


def test_module(tmp_path):
    """A module runs as the main program after the ranks are connected."""
    done, record = run_apart(tmp_path, "module", "pkg.job", SHOW)
    assert done.stdout == "connected\n__main__ ['a b', '$x'] near project\n", done.stderr
    assert record["ok"]


def test_command_of_the_environment(tmp_path):
    """A command's own function is called in this process, with its words; its result is its exit code."""
    entry = "type('E', (), {'name': 'tool', 'load': lambda self: lambda: print('tool', sys.argv[1:]) or 3})()"
    done, record = run_apart(tmp_path, "console", "tool", setup=f"script.entry_points = lambda group: [{entry}]")
    assert done.stdout == "connected\ntool ['a b', '$x']\n", done.stderr
    assert record["error"]["message"] == "tool ended with exit code 3"


def test_command_that_is_not_there(tmp_path):
    """A command the environment lacks is named with what to do."""
    _, record = run_apart(tmp_path, "console", "no-such-tool")
    assert "no command no-such-tool" in record["error"]["message"]


@pytest.mark.parametrize(("code", "ok"), [("0", True), ("", True), ("2", False), ("'text'", False)])
def test_exit_codes(tmp_path, code, ok):
    """sys.exit(0) is success, anything else is a failure with its code."""
    done, record = run_apart(tmp_path, "file", "{project}/train.py", f"import sys; sys.exit({code})")
    assert (record["ok"], done.returncode) == (ok, 0 if ok else 1)
    if not ok:
        assert f"ended with exit code {code.strip(chr(39))}" in record["error"]["message"]


def test_exception_names_the_users_line(tmp_path):
    """An exception is recorded with the line of the user's file."""
    _, record = run_apart(tmp_path, "file", "{project}/train.py", "x = 1\nraise KeyError('k')")
    assert record["error"]["type"] == "KeyError"
    assert record["error"]["where"].endswith("project/train.py:2")


def test_functions_for_the_exit_run(tmp_path):
    """Threads are waited for, and what was registered for the interpreter's exit runs before the record is written."""
    code = (
        "import atexit, threading, time; atexit.register(print, 'exit', flush=True); "
        "threading.Thread(target=lambda: (time.sleep(0.2), print('thread', flush=True))).start()"
    )
    done, record = run_apart(tmp_path, "file", "{project}/train.py", code)
    assert done.stdout == "thread\nexit\n", done.stderr
    assert record["ok"]
