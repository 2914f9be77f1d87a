"""Errors and findings as people see them, and what a bug of ours leaves behind."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from llmtrain import __version__
from llmtrain.errors import ExitCode, LlmtrainError, PreflightError


def show_error(error: LlmtrainError) -> None:
    """Print ``error:``, ``where:`` and ``fix:`` to standard error."""
    print(clean(str(error)), file=sys.stderr)


def error_json(error: LlmtrainError) -> dict[str, Any]:
    """The twin of :func:`show_error` for ``--json``."""
    document = {
        "ok": False,
        "exit_code": int(error.exit_code),
        "reason": error.error,
        "error": error.error,
        "where": error.where,
        "fix": error.fix,
    }
    if isinstance(error, PreflightError) and error.findings:
        document["findings"] = [dict(finding) for finding in error.findings]
    return document


def clean(text: str) -> str:
    """Text of hosts and files without control characters: they could rewrite what stands on the terminal."""
    return "".join(char for char in text if char in "\n\t" or (ord(char) >= 32 and not 0x7F <= ord(char) < 0xA0))


def show_bug(error: BaseException) -> ExitCode:
    """Write a debug file about a fault of ours and say where it is."""
    lines = [
        f"llmtrain {__version__}, Python {platform.python_version()}, {platform.platform()}",
        f"command: {Path(sys.argv[0]).name} {' '.join(sys.argv[1:2])} ...",
        "".join(traceback.format_exception(error)),
    ]
    handle, name = tempfile.mkstemp(prefix="llmtrain-bug-", suffix=".txt")
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        stream.write("\n".join(lines))
    print(f"error: a bug in llmtrain: {type(error).__name__}: {clean(str(error))}\nwhere: {name}", file=sys.stderr)
    print("fix: report it with that file; it holds no values of yours but what the message shows", file=sys.stderr)
    return ExitCode.BUG
