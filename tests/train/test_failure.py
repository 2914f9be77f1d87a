from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch

from llmtrain.errors import InputFileError
from llmtrain.train.failure import describe_failure


def fail(problem):
    """Describe a failure that was raised and caught."""
    with pytest.raises(type(problem)) as caught:
        raise problem
    return describe_failure(caught.value)


@pytest.mark.parametrize(
    ("problem", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "OutOfMemory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "OutOfMemory"),
        (MemoryError(), "OutOfMemory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "OutOfMemory"),
        (OSError(errno.ENOSPC, "No space left on device"), "DiskFull"),
        (RuntimeError("[enforce fail at inline_container.cc:603] . unexpected pos 2048 vs 1940"), "DiskFull"),
        (RuntimeError("basic_ios::clear: iostream error"), "DiskFull"),
        (ValueError("out of memory of former days"), "ValueError"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (InputFileError("bad"), "InputFileError"),
    ],
)
def test_type_says_what_kind_of_failure(problem, kind):
    """Memory and disk failures are told from the rest, whatever class they come in."""
    assert fail(problem)["type"] == kind


def test_own_errors_carry_place_and_fix():
    """An error of ours gives its own place, and its fix in the message."""
    told = fail(InputFileError("bad line", where="data.jsonl:7", fix="mend it"))
    assert told["message"] == "bad line; to fix it: mend it"
    assert told["where"] == "data.jsonl:7"


def test_place_is_outside_of_libraries():
    """The place is the innermost line that is not a library's."""
    with pytest.raises(ValueError, match="Expecting") as caught:
        json.loads("{")
    line = caught.value.__traceback__.tb_lineno
    assert describe_failure(caught.value)["where"] == f"{Path(__file__)}:{line}"


def test_tail_and_message_are_bounded():
    """A huge message is cut, and the tail holds the end of the traceback."""
    told = fail(ValueError("x" * 100_000 + "\nend"))
    assert len(told["message"]) == 2000
    assert told["tail"].endswith("\nend")
    assert len(told["tail"].splitlines()) <= 30
