"""Say why a rank failed: an exception as type, message, place and last lines (standard library only)."""

from __future__ import annotations

import errno
import sysconfig
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.errors import LlmtrainError

if TYPE_CHECKING:
    from types import TracebackType

OUT_OF_MEMORY = "OutOfMemory"
DISK_FULL = "DiskFull"
MAX_MESSAGE = 2000
MAX_TAIL_LINES = 30

_MEMORY_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory", "bad_alloc")
# What torch.save says when the disk is full; neither text mentions space.
_DISK_WORDS = ("unexpected pos", "basic_ios::clear: iostream error", "no space left on device")


def describe_failure(problem: BaseException) -> dict[str, str]:
    """The ``error`` of a done record: type, message, where, tail."""
    return {
        "type": _name_type(problem),
        "message": _describe_message(problem)[:MAX_MESSAGE],
        "where": _find_where(problem),
        "tail": "\n".join("".join(traceback.format_exception(problem)).rstrip().splitlines()[-MAX_TAIL_LINES:]),
    }


def _name_type(problem: BaseException) -> str:
    text = str(problem).lower()
    # torch.OutOfMemoryError is a RuntimeError whose class is named so in every accelerator's module.
    if isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError":
        return OUT_OF_MEMORY
    if isinstance(problem, RuntimeError) and any(words in text for words in _MEMORY_WORDS):
        return OUT_OF_MEMORY
    if isinstance(problem, OSError) and problem.errno == errno.ENOMEM:
        return OUT_OF_MEMORY
    if isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT):
        return DISK_FULL
    if isinstance(problem, (RuntimeError, OSError)) and any(words in text for words in _DISK_WORDS):
        return DISK_FULL
    return type(problem).__name__


def _describe_message(problem: BaseException) -> str:
    if not isinstance(problem, LlmtrainError):
        return str(problem) or type(problem).__name__
    return f"{problem.error}; to fix it: {problem.fix}" if problem.fix else problem.error


def _find_where(problem: BaseException) -> str:
    """The error's own place, else ``file:line`` of the innermost frame that is not a library's."""
    if isinstance(problem, LlmtrainError) and problem.where:
        return problem.where
    frames = list(_walk(problem.__traceback__))
    chosen = next((frame for frame in reversed(frames) if not _is_library(frame[0])), frames[-1] if frames else None)
    return f"{chosen[0]}:{chosen[1]}" if chosen else ""


def _walk(trace: TracebackType | None) -> list[tuple[str, int]]:
    return [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(trace)]


_LIBRARIES = tuple({Path(sysconfig.get_path(key)) for key in ("stdlib", "platstdlib", "purelib", "platlib")})


def _is_library(filename: str) -> bool:
    path = Path(filename)
    return filename.startswith("<") or any(path.is_relative_to(library) for library in _LIBRARIES)
