"""What can go wrong, as one tree; every leaf knows its exit code.

    LlmtrainError
    ├── UsageError          2   options that do not go together, a missing option
    ├── InputFileError      3   a hostfile, run file, preset, data or model that cannot be used
    ├── PreflightError      4   a check before the launch failed on some host
    ├── DoesNotFitError     5   the run certainly does not fit into memory
    ├── HostError           6   a host cannot be reached or used (outside check and preflight)
    ├── SyncError           7   a copy failed or could not be verified
    ├── RankFailedError     8   a rank ended with an error
    ├── HostLostError       9   a host vanished during the run
    ├── StalledError       10   no progress
    ├── OutOfMemoryError   11   a rank or a host ran out of memory
    ├── DiskError          12   a disk is full or not writable
    ├── LauncherError      13   DeepSpeed's launcher or pdsh died
    ├── LeftoverError      14   stopped, but some process could not be verified gone
    └── StoppedError      130   the user stopped it (143 by SIGTERM)

Exit code 0 is success, 1 a bug of ours (a debug file is written), 15 saved and ready to requeue.
See docs/architecture.md.
"""

from __future__ import annotations

import signal
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class ExitCode(IntEnum):
    """Exit codes of every llmtrain command; scripts may rely on them."""

    OK = 0
    BUG = 1
    USAGE = 2
    INPUT = 3
    PREFLIGHT = 4
    DOES_NOT_FIT = 5
    HOST = 6
    SYNC = 7
    RANK_FAILED = 8
    HOST_LOST = 9
    STALLED = 10
    OUT_OF_MEMORY = 11
    DISK = 12
    LAUNCHER = 13
    LEFTOVER = 14
    SAVED = 15
    INTERRUPTED = 130
    TERMINATED = 143


class LlmtrainError(Exception):
    """A mistake or a failure that a person can act on.

    Args:
        error: what is wrong, in one line.
        where: the host, or ``file:line``, it is about.
        fix: the command to run or the change to make.
    """

    exit_code: ExitCode = ExitCode.BUG

    def __init__(self, error: str, *, where: str | None = None, fix: str | None = None) -> None:
        super().__init__(error)
        self.error = error
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        lines = [f"error: {self.error}"]
        if self.where:
            lines.append(f"where: {self.where}")
        if self.fix:
            lines.append(f"fix: {self.fix}")
        return "\n".join(lines)


class UsageError(LlmtrainError):
    """Options that do not go together, or one that is missing."""

    exit_code = ExitCode.USAGE


class InputFileError(LlmtrainError):
    """A file of the user's cannot be used as it is."""

    exit_code = ExitCode.INPUT


class PreflightError(LlmtrainError):
    """A check before the launch failed on some host."""

    exit_code = ExitCode.PREFLIGHT
    findings: tuple[Mapping[str, str], ...] = ()
    """Everything that was found, worst first, as in the report of ``llmtrain check --json``."""


class DoesNotFitError(LlmtrainError):
    """The run certainly does not fit into memory."""

    exit_code = ExitCode.DOES_NOT_FIT


class HostError(LlmtrainError):
    """A host cannot be reached or used."""

    exit_code = ExitCode.HOST


class SyncError(LlmtrainError):
    """A copy failed or could not be verified."""

    exit_code = ExitCode.SYNC


class RankFailedError(LlmtrainError):
    """A rank ended with an error."""

    exit_code = ExitCode.RANK_FAILED


class HostLostError(LlmtrainError):
    """A host vanished during the run."""

    exit_code = ExitCode.HOST_LOST


class StalledError(LlmtrainError):
    """The run makes no progress."""

    exit_code = ExitCode.STALLED


class OutOfMemoryError(LlmtrainError):
    """A rank or a host ran out of memory."""

    exit_code = ExitCode.OUT_OF_MEMORY


class DiskError(LlmtrainError):
    """A disk is full or cannot be written."""

    exit_code = ExitCode.DISK


class LauncherError(LlmtrainError):
    """DeepSpeed's launcher or pdsh died."""

    exit_code = ExitCode.LAUNCHER


class LeftoverError(LlmtrainError):
    """The run was stopped, but some process could not be verified gone."""

    exit_code = ExitCode.LEFTOVER


class StoppedError(LlmtrainError):
    """The user stopped the command by a signal."""

    exit_code = ExitCode.INTERRUPTED

    def __init__(self, number: int) -> None:
        name = signal.Signals(number).name
        super().__init__(f"stopped by {name}", where="head", fix="run the same command again")
        if number == signal.SIGTERM:
            self.exit_code = ExitCode.TERMINATED
