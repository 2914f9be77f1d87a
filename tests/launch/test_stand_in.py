"""The script that stands in for the interpreter, run for real."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from llmtrain.launch.prepare import render_stand_in
from llmtrain.launch.rundir import HostDir
from llmtrain.launch.verdict import launcher_died
from llmtrain.train import bootstrap

HOSTILE = {"A": "$(touch canary)", "B": "`id`", "C": "two\nlines", "D": "'\"\\ %n %h", "E": "grüße", "F": ""}
SHOW = "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:], sys.executable]))"


@pytest.fixture
def run_dir(tmp_path):
    """A run folder whose name needs quoting, with the rank code's bootstrap in it."""
    folder = tmp_path / "a b 'c' $(touch canary)"
    code = folder / "code/llmtrain/train"
    code.mkdir(parents=True)
    shutil.copy(bootstrap.__file__, code / "bootstrap.py")
    return folder


def _start(folder, *, setup=(), keep=("HOME", "PATH"), login=None):
    (folder / "env.json").write_text(json.dumps({"keep": list(keep), "set": HOSTILE, "path": ["/opt/env/bin"]}))
    script = folder / "python"
    script.write_text(render_stand_in(HostDir(path=folder), "node1", sys.executable, tuple(setup)))
    script.chmod(0o700)
    env = {"HOME": "/home/me", "PATH": "/usr/bin:/bin", "SECRET_OF_LOGIN": "x", **(login or {})}
    return subprocess.run([script, "-c", SHOW, "1 2", "$X"], env=env, capture_output=True, text=True, check=False)


def test_values_and_arguments_arrive_byte_for_byte(run_dir):
    """Hostile values and arguments reach the interpreter unchanged, and no code in them runs."""
    done = _start(run_dir)
    env, argv, executable = json.loads(done.stdout)
    assert {key: env[key] for key in HOSTILE} == HOSTILE
    assert argv == ["1 2", "$X"]
    assert executable == sys.executable
    assert not list(run_dir.parent.rglob("canary"))
    assert not (run_dir / "canary").exists()


def test_only_the_allow_list_of_the_login_survives(run_dir):
    """Of the login's environment only the listed names are kept; the interpreter's folder comes first in PATH."""
    env, _, _ = json.loads(_start(run_dir).stdout)
    assert "SECRET_OF_LOGIN" not in env
    assert env["HOME"] == "/home/me"
    assert env["PATH"] == "/opt/env/bin:/usr/bin:/bin"


def test_the_file_of_values_is_gone_once_read(run_dir):
    """env.json, which may hold secrets, does not outlive the start."""
    _start(run_dir)
    assert not (run_dir / "env.json").exists()


def test_what_setup_lines_export_is_kept(run_dir):
    """Variables that setup lines add or change reach the ranks although they are on no list, others still do not."""
    done = _start(run_dir, setup=["export CUDA_ROOT='/opt/cuda 12'", "PATH=/opt/cuda/bin:$PATH"])
    env, _, _ = json.loads(done.stdout)
    assert env["CUDA_ROOT"] == "/opt/cuda 12"
    assert env["PATH"] == "/opt/env/bin:/opt/cuda/bin:/usr/bin:/bin"
    assert "SECRET_OF_LOGIN" not in env
    assert bootstrap.BEFORE not in env


def test_a_failing_setup_line_stops_the_start(run_dir):
    """A setup line that fails ends the start instead of being passed over."""
    done = _start(run_dir, setup=["false", "true"])
    assert done.returncode == 1
    assert done.stdout == ""


def test_a_failing_setup_line_names_its_host(run_dir):
    """What the start says is read back as the host and the exit code of the setup, whatever pdsh puts around it."""
    done = _start(run_dir, setup=["(exit 7)"])
    failure, code = launcher_died(1, f"node1: {done.stderr}pdsh@head: node1: ssh exited with exit code 7")
    assert (failure.host, failure.cause, code) == ("node1", "setup", 13)
    assert "exit code 7" in failure.message
