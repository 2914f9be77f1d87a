from __future__ import annotations

import pytest

from llmtrain.errors import ExitCode, InputFileError
from llmtrain.launch.verdict import choose_first, explain
from llmtrain.train.failure import describe_failure


def _record(rank, kind, message="", **more):
    return {"rank": rank, "ok": False, "error": {"type": kind, "message": message, "where": None, "tail": None}, **more}


LOST_PEER = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:4242"


@pytest.mark.parametrize(
    "message",
    [
        LOST_PEER,
        "Connection reset by peer",
        "NCCL error: remote process exited or there was a network error",
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)",
        "recvValue failed on SocketImpl: TCPStore is gone",
    ],
)
def test_the_cause_is_found_behind_its_consequences(message):
    """A rank that lost its peers is not the first failure, even if its record came first."""
    records = [("a", _record(0, "RuntimeError", message)), ("b", _record(1, "ValueError", "bad row"))]
    assert choose_first(records)[0] == "b"


def test_the_first_of_equals_wins():
    """Among failures of their own the one that arrived first is named."""
    records = [("b", _record(1, "ValueError", "one")), ("a", _record(0, "ValueError", "two"))]
    assert choose_first(records)[0] == "b"
    assert choose_first([]) is None


@pytest.mark.parametrize(
    ("kind", "message", "cause", "code"),
    [
        ("ValueError", "bad row", "crash", ExitCode.RANK_FAILED),
        ("Killed", "the rank was killed by SIGKILL", "killed", ExitCode.RANK_FAILED),
        ("Exited", "ended with exit code 3", "crash", ExitCode.RANK_FAILED),
        ("OutOfMemory", "CUDA out of memory", "out-of-memory", ExitCode.OUT_OF_MEMORY),
        ("HostOutOfMemory", "the kernel killed the rank", "out-of-memory", ExitCode.OUT_OF_MEMORY),
        ("DiskFull", "No space left", "disk-full", ExitCode.DISK),
        ("RuntimeError", "unexpected pos 2048 vs 1940", "disk-full", ExitCode.DISK),
        ("NonFiniteLossError", "the loss is nan in step 3", "nonfinite", ExitCode.RANK_FAILED),
        ("NonFiniteGradientsError", "the gradients", "nonfinite", ExitCode.RANK_FAILED),
    ],
)
def test_each_cause_has_its_word_and_code(kind, message, cause, code):
    """Causes are told apart, each with a word for scripts and its exit code."""
    failure, exit_code = explain("gpu004", _record(3, kind, message, signal=9))
    assert (failure.cause, exit_code, failure.host, failure.rank) == (cause, code, "gpu004", 3)
    assert failure.message


def test_only_the_first_line_of_a_long_message_is_the_message():
    """A message of many lines is shortened to its first."""
    assert explain("a", _record(0, "ValueError", "first\nsecond"))[0].message == "first"


def test_a_fix_that_the_rank_knows_is_the_advice():
    """An error of ours on a rank comes back as error and fix, not as one long line."""
    error = describe_failure(InputFileError("no such template", where="run.json", fix="name one of chatml"))
    failure, _ = explain("a", {"rank": 0, "ok": False, "error": error})
    assert (failure.message, failure.advice) == ("no such template", "name one of chatml")
