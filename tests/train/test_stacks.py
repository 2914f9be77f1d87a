"""What a host can say about ranks that stand still, and about its accelerators."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmtrain.process import start_time
from llmtrain.train.kernellog import KernelLog
from llmtrain.train.stacks import read_stacks

SLEEPER = """
import faulthandler, signal, sys, time
faulthandler.register(signal.SIGUSR2, open(sys.argv[1], "w"), all_threads=True)
print("ready", flush=True)
def wait_for_godot():
    time.sleep(60)
wait_for_godot()
"""


@pytest.fixture
def rank(tmp_path):
    """A process that answers as a rank does, and its start record."""
    (tmp_path / "stacks").mkdir()
    argv = [sys.executable, "-c", SLEEPER, str(tmp_path / "stacks/3.txt")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        yield process, {"pid": process.pid, "start_time": start_time(process.pid)}
        process.kill()


def test_a_rank_says_what_it_is_doing(rank, tmp_path):
    """Its stacks come back as text, and it goes on."""
    process, record = rank
    found = read_stacks(tmp_path, {3: record})
    assert "in wait_for_godot" in found[3]["text"]
    assert found[3]["state"] == "S"
    assert process.poll() is None


def test_a_stopped_rank_is_told_by_its_state(rank, tmp_path, monkeypatch):
    """A process that is stopped says nothing, but that it is stopped is seen."""
    monkeypatch.setenv("PATH", "/nowhere")
    process, record = rank
    process.send_signal(signal.SIGSTOP)
    while "T" not in read_state(process.pid):
        time.sleep(0.01)
    assert read_stacks(tmp_path, {3: record})[3]["state"] == "T"


def read_state(pid):
    """The line of /proc that holds a process's state."""
    return Path(f"/proc/{pid}/status").read_text().split("State:")[1].splitlines()[0]


def test_a_process_without_a_handler_is_left_alone(tmp_path, monkeypatch):
    """The signal would end it, so it is not sent."""
    monkeypatch.setenv("PATH", "/nowhere")
    with subprocess.Popen(["/bin/sleep", "60"]) as process:
        found = read_stacks(tmp_path, {0: {"pid": process.pid, "start_time": start_time(process.pid)}})
        assert process.poll() is None
        assert found[0]["text"] == ""
        process.kill()


def test_only_new_lines_about_accelerators_are_reported(tmp_path):
    """What stood in the log before the run, and what is about other things, is left out."""
    path = tmp_path / "kmsg"
    path.write_text("6,1,1,-;NVRM: Xid (PCI:0000:01:00): 13, old\n")
    log = KernelLog(str(path))
    assert log.read() == []
    for line in ("6,2,2,-;usb 1-1: new device\n", "6,3,3,-;NVRM: Xid (PCI:0000:01:00): 79, new\n"):
        with path.open("a") as stream:
            stream.write(line)
        found = log.read()
    assert found == ["NVRM: Xid (PCI:0000:01:00): 79, new"]
    assert KernelLog(str(tmp_path / "missing")).read() == []
