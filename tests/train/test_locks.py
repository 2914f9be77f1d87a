from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid

from llmtrain.train import guardian
from llmtrain.train.locks import Locks

HOLD = (
    "import sys, time; from pathlib import Path; from llmtrain.train.locks import Locks\n"
    "print(Locks('theirs', Path(sys.argv[1])).take(['GPU-1']), flush=True); time.sleep(60)"
)


def hold(folder):
    """Another process that holds GPU-1."""
    other = subprocess.Popen([sys.executable, "-c", HOLD, folder], stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "{}\n"
    return other


def test_all_or_none_and_the_holder_is_named(tmp_path):
    """With one of two accelerators held by another process neither is taken, and its run, user and process are told."""
    with hold(tmp_path) as other:
        mine = Locks("mine", tmp_path)
        busy = mine.take(["GPU-0", "GPU-1"])
        assert set(busy) == {"GPU-1"}
        assert (busy["GPU-1"]["run"], busy["GPU-1"]["pid"]) == ("theirs", other.pid)
        assert Locks("third", tmp_path).take(["GPU-0"]) == {}
        other.kill()


def test_a_holder_that_was_killed_holds_nothing(tmp_path):
    """The kernel drops a lock with its process, by whatever signal it went; the file that stays means nothing."""
    with hold(tmp_path) as other:
        other.kill()
    assert (tmp_path / "llmtrain-GPU-1.lock").exists()
    assert Locks("mine", tmp_path).take(["GPU-1"]) == {}


def test_a_link_in_the_place_of_the_file_is_not_followed(tmp_path):
    """Whoever puts a link there cannot have a file of ours overwritten."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "llmtrain-GPU-1.lock").symlink_to(victim)
    try:
        Locks("mine", tmp_path).take(["GPU-1"])
    except OSError:
        pass
    else:
        raise AssertionError("the link was followed")
    assert victim.read_text() == "precious"


def test_a_file_that_holds_anything_tells_nothing(tmp_path):
    """What another program wrote into a lock it holds is no holder, and no error."""
    path = tmp_path / "llmtrain-GPU-1.lock"
    with hold(tmp_path) as other:
        for text in ("", "[1]", "\x00\xff", json.dumps("x" * 9000)):
            path.write_bytes(text.encode())
            assert Locks("mine", tmp_path).take(["GPU-1"]) == {"GPU-1": {}}
        other.kill()


def test_the_file_can_be_opened_by_every_user(tmp_path):
    """A strict umask does not keep colleagues out of the lock."""
    before = os.umask(0o077)
    try:
        Locks("mine", tmp_path).take(["GPU-1"])
    finally:
        os.umask(before)
    assert (tmp_path / "llmtrain-GPU-1.lock").stat().st_mode & 0o777 == 0o666


class Guard:
    """A real guardian of a run without ranks."""

    def __init__(self, folder, run):
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-u", guardian.__file__, folder, run, "60", "127.0.0.1_1"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def send(self, **command):
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def hear(self, *kinds):
        """The next event of one of these kinds."""
        for line in self.process.stdout:
            event = json.loads(line)
            if event["event"] in kinds:
                return event
        raise AssertionError(f"no {kinds}")

    def close(self):
        self.process.kill()
        self.process.communicate()


def test_a_guardian_holds_accelerators_until_it_is_gone(tmp_path):
    """The second of two runs is told who holds the accelerator, and has it once the first's guardian is killed."""
    gpu = f"GPU-{uuid.uuid4()}"
    first, second = Guard(tmp_path, "first"), Guard(tmp_path, "second")
    try:
        first.send(lock=[gpu])
        assert first.hear("locked", "busy")["event"] == "locked"
        second.send(lock=[gpu])
        event = second.hear("locked", "busy")
        assert event["holders"][gpu]["run"] == "first"
        first.process.kill()
        assert second.hear("locked", "busy")["event"] == "locked"
    finally:
        first.close()
        second.close()
