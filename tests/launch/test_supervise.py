"""A supervisor in a process of its own, and the terminal that started it."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from llmtrain.errors import ExitCode, LauncherError, PreflightError, StoppedError
from llmtrain.launch.attach import SupervisorBugError, follow
from llmtrain.launch.supervise import supervise
from llmtrain.launch.verdict import Outcome

GOOD = Outcome(ok=True, exit_code=ExitCode.OK, run_dir="/r", reason="done")


def start(work, answers="none"):
    """A supervisor, followed; what it told, what it asked, and how it ended."""
    told, asked = [], []

    def ask(question):
        asked.append(question)
        return True

    run = supervise(work, answers=answers)
    return told, asked, lambda: follow(run, lambda *event: told.append(event), ask), run


def test_events_and_questions_cross_the_pipe():
    """The terminal sees every event, answers the question, and gets the outcome."""

    def work(tell, asked, agree):
        tell("start", {"world_size": 2})
        return GOOD if agree("bring it?") else None

    told, asked, end, _ = start(work, "ask")
    assert end() == GOOD
    assert (told, asked) == ([("start", {"world_size": 2})], ["bring it?"])


def test_it_has_a_session_of_its_own(tmp_path):
    """Neither Ctrl-C nor a hang-up of the terminal reaches it."""

    def work(tell, asked, agree):
        (tmp_path / "session").write_text(f"{os.getsid(0)} {os.getpid()}")
        return GOOD

    start(work)[2]()
    session, pid = map(int, (tmp_path / "session").read_text().split())
    assert session == pid != os.getsid(0)


def test_errors_arrive_with_their_code_and_findings():
    """An error there is the same error here."""

    def work(tell, asked, agree):
        error = PreflightError("no room", where="node1", fix="df -h")
        error.findings = ({"host": "node1"},)
        raise error

    with pytest.raises(PreflightError, match="no room") as caught:
        start(work)[2]()
    assert (caught.value.exit_code, caught.value.findings) == (ExitCode.PREFLIGHT, ({"host": "node1"},))


def test_a_bug_arrives_with_its_trace():
    """What went wrong there is told here, for the debug file."""

    def work(tell, asked, agree):
        return 1 / 0

    with pytest.raises(SupervisorBugError, match="ZeroDivisionError") as caught:
        start(work)[2]()
    assert "in work" in str(caught.value.__cause__)


def test_a_killed_supervisor_is_noticed():
    """A supervisor that is gone without a word ends the command with its signal named."""

    def work(tell, asked, agree):
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(LauncherError, match="killed by signal 9"):
        start(work)[2]()


def test_a_request_before_ranks_run_ends_it_at_once():
    """The first request cuts short what is done before any rank runs."""

    def work(tell, asked, agree):
        time.sleep(60)

    _, _, end, run = start(work)
    run.pipe.send(int(signal.SIGINT))
    with pytest.raises(Exception, match="stopped by SIGINT") as caught:
        end()
    assert caught.value.exit_code == StoppedError(signal.SIGINT).exit_code


def test_a_run_goes_on_when_its_terminal_is_gone(tmp_path):
    """With the pipe closed questions are answered with no, and the work goes on to its end."""

    def work(tell, asked, agree):
        answer = agree("bring it?")
        (tmp_path / "part").write_text(json.dumps(answer))
        (tmp_path / "part").rename(tmp_path / "end")
        return GOOD

    run = supervise(work, answers="ask")
    run.pipe.close()
    os.waitpid(run.pid, 0)
    assert json.loads((tmp_path / "end").read_text()) is False
