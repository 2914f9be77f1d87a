"""A terminal that follows a run it started: shows what it tells, answers, and turns Ctrl-C into requests."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING, Any

from llmtrain.errors import ExitCode, LauncherError, LlmtrainError, PreflightError
from llmtrain.launch.jobs import request_stop
from llmtrain.launch.verdict import parse_outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from llmtrain.launch.run import Tell
    from llmtrain.launch.rundir import RunDir
    from llmtrain.launch.supervise import Supervised
    from llmtrain.launch.supply import Agree
    from llmtrain.launch.verdict import Outcome

GIVE_UP = 3
"""So many signals end this command even if the supervisor does not answer."""
POLL_S = 0.2


class SupervisorBugError(Exception):
    """A bug in the supervisor; its message ends with the trace there."""


class _Signals:
    """How often and how this command has been signalled."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.sent = 0

    def note(self, number: int, _frame: object) -> None:
        self.numbers.append(number)

    def ask(self, ask: Agree, question: str) -> bool:
        """Ctrl-C at a question is a no, and a request to stop."""
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return ask(question)
        except KeyboardInterrupt:
            self.numbers.append(signal.SIGINT)
            return False
        finally:
            signal.signal(signal.SIGINT, before)

    def pass_on(self, run: Supervised, tell: Tell) -> None:
        """Tell the supervisor what is new."""
        while self.sent < len(self.numbers):
            number = self.numbers[self.sent]
            self.sent += 1
            if self.sent >= GIVE_UP:
                tell("detached", {})
                raise LauncherError(
                    "this command no longer waits; the run may still be ending",
                    where="head",
                    fix="llmtrain status last",
                )
            with contextlib.suppress(OSError):
                run.pipe.send(number)


def follow(run: Supervised, tell: Tell, ask: Agree, *, until: Callable[[str], bool] | None = None) -> Outcome | None:
    """Show a run until it ends.

    Args:
        run: the supervisor.
        tell: shows an event.
        ask: answers a question.
        until: an event after which nobody waits any longer.

    Returns:
        How it ended; None if it goes on without us.

    Raises:
        LlmtrainError: it could not start, or its supervisor is gone.
        SupervisorBugError: a bug of ours.
    """
    with _caught() as signals:
        while True:
            signals.pass_on(run, tell)
            try:
                if not run.pipe.poll(POLL_S):
                    continue
                what, values = run.pipe.recv()
            except (EOFError, OSError):
                raise _supervisor_gone(run) from None
            if what == "outcome":
                return parse_outcome(values)
            if what == "question":
                run.pipe.send(signals.ask(ask, values["question"]))
            else:
                _refuse(what, values)
                tell(what, values)
            if until is not None and until(what):
                return None


def _refuse(what: str, values: dict[str, Any]) -> None:
    if what == "error":
        error = PreflightError(values["error"], where=values["where"], fix=values["fix"])
        error.exit_code = ExitCode(values["exit_code"])
        error.findings = tuple(values["findings"])
        raise error
    if what == "bug":
        raise SupervisorBugError(values["message"]) from SupervisorBugError(values["trace"])


def _supervisor_gone(run: Supervised) -> LlmtrainError:
    how = "is gone"
    with contextlib.suppress(OSError):
        _, status = os.waitpid(run.pid, 0)
        how = f"was killed by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else how
    return LauncherError(
        f"the run's supervisor {how}: its hosts end the run by themselves",
        where="head",
        fix="llmtrain clean shows what is left; llmtrain resume last goes on from the last checkpoint",
    )


@contextlib.contextmanager
def _caught() -> Iterator[_Signals]:
    signals = _Signals()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, signals.note) for number in numbers}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def asking(run_dir: RunDir) -> Iterator[None]:
    """Turn Ctrl-C into requests to a run whose supervisor another process started."""
    count = 0

    def ask(_number: int, _frame: object) -> None:
        nonlocal count
        count += 1
        if count >= GIVE_UP:
            raise LauncherError(
                "this command no longer waits; the run may still be ending", where="head", fix="llmtrain status last"
            )
        with contextlib.suppress(LlmtrainError):
            request_stop(run_dir, now=count > 1)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
