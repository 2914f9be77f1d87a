"""The supervisor of a run: a process in a session of its own, forked from ``llmtrain launch``.

It does everything from the first contact to the end. A terminal holds the other end of a pipe, is told what
happens, answers questions and passes Ctrl-C on; when it goes, the run goes on. Whoever comes later reads the run
folder and leaves requests there. Forked rather than started anew: what has been read, values of variables
included, stays in memory and passes through no file or command line.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llmtrain.errors import ExitCode, LlmtrainError, PreflightError
from llmtrain.launch.asked import Asked
from llmtrain.launch.events import EventLog
from llmtrain.launch.rundir import RunDir, write_record
from llmtrain.launch.verdict import Failure, Outcome
from llmtrain.process import start_time

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from llmtrain.launch.run import Tell
    from llmtrain.launch.supply import Agree

    Work = Callable[[Tell, Asked, Agree | None], Outcome]
    """What is supervised."""

Answers = Literal["yes", "ask", "none"]
LOOK_S = 0.3


@dataclass(frozen=True, kw_only=True)
class Supervised:
    """A supervisor as the process that started it sees it."""

    pid: int
    """Its process."""
    pipe: Connection
    """Events come out of it, requests and answers go in."""


def supervise(work: Work, *, answers: Answers, notify: str | None = None) -> Supervised:
    """Start a supervisor.

    Args:
        work: called there with what it tells, what is asked of it, and whom it may ask.
        answers: whether questions are answered with yes, by the terminal, or by nobody.
        notify: a shell command that gets every event.
    """
    ours, theirs = Pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        theirs.close()
        return Supervised(pid=pid, pipe=ours)
    code: int = ExitCode.BUG
    try:
        os.setsid()
        ours.close()
        _leave_terminal(os.devnull)
        code = _Supervisor(theirs, answers, notify).run(work)
    finally:
        os._exit(code)


def _leave_terminal(log: str) -> None:
    """Nothing of ours may hold the terminal, or a pipe that somebody reads to its end."""
    for target, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        name = os.devnull if target == 0 else log
        handle = os.open(name, flags | (os.O_CREAT | os.O_APPEND if name != os.devnull else 0), 0o600)
        os.dup2(handle, target)
        os.close(handle)


@dataclass
class _Supervisor:
    """The life of the process."""

    pipe: Connection
    answers: Answers
    notify: str | None
    asked: Asked = field(default_factory=Asked)
    replies: queue.Queue[bool] = field(default_factory=queue.Queue)
    run_dir: RunDir | None = None

    def run(self, work: Work) -> int:
        """Do it, and tell how it ended, whatever happens."""
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self.log = EventLog(self.pipe, self.notify)
        with self.asked.signals():  # before anybody can ask
            what, values, code = self._work(work)
            with self.asked.in_order():
                self._tell(what, values)
                self.log.close()
        return code

    def _work(self, work: Work) -> tuple[str, dict[str, Any], int]:
        """The last event, and the exit code."""
        try:
            threading.Thread(target=self._listen, daemon=True).start()
            threading.Thread(target=self._look, daemon=True).start()
            outcome = work(self._tell, self.asked, None if self.answers == "none" else self._agree)
            return "outcome", outcome.to_json(), int(outcome.exit_code)
        except LlmtrainError as error:
            self._record(error.error, error.exit_code, error.where, error.fix)
            return "error", render_error(error), int(error.exit_code)
        except BaseException as error:  # noqa: BLE001  the terminal writes the debug file
            text = "".join(traceback.format_exception(error))
            sys.stderr.write(text)
            message = f"{type(error).__name__}: {error}"
            self._record(f"a bug in llmtrain: {message}", ExitCode.BUG, None, None)
            return "bug", {"message": message, "trace": text}, int(ExitCode.BUG)

    def _tell(self, what: str, values: dict[str, Any]) -> None:
        self.log.tell(what, values)
        if what == "run_dir":
            self.run_dir = RunDir(Path(values["path"]))
            write_record(self.run_dir.supervisor, describe_self())
            self.log.open(self.run_dir.events)
            _leave_terminal(str(self.run_dir.path / "supervisor.log"))

    def _record(self, reason: str, code: ExitCode, where: str | None, fix: str | None) -> None:
        """An end that nobody has written down yet."""
        if self.run_dir is None or self.run_dir.outcome.exists():
            return
        failure = Failure(host=where, rank=None, cause="start", message=reason, advice=fix)
        outcome = Outcome(
            ok=False, exit_code=code, run_dir=str(self.run_dir.path), reason=reason, first_failure=failure
        )
        write_record(self.run_dir.outcome, outcome.to_json())

    def _agree(self, question: str) -> bool:
        if self.answers == "yes":
            self._tell("agreed", {"question": question})
            return True
        self._tell("question", {"question": question})
        return self.replies.get()

    def _listen(self) -> None:
        """What the terminal sends: answers, and requests to stop."""
        while True:
            try:
                message = self.pipe.recv()
            except (EOFError, OSError):
                self.replies.put(False)  # nobody is there to agree
                return
            if isinstance(message, bool):
                self.replies.put(message)
            else:
                self.asked.send(int(message), now=False)

    def _look(self) -> None:
        """Requests that others leave in the run folder."""
        while True:
            time.sleep(LOOK_S)
            if self.run_dir is not None and self.run_dir.request.exists():
                with contextlib.suppress(OSError, ValueError):
                    request = json.loads(self.run_dir.request.read_text(encoding="utf-8"))
                    self.run_dir.request.unlink()
                    self.asked.send(signal.SIGINT, now=bool(request["now"]))


def render_error(error: LlmtrainError) -> dict[str, Any]:
    """An error as plain values, from which the terminal makes it again."""
    values = {"error": error.error, "where": error.where, "fix": error.fix, "exit_code": int(error.exit_code)}
    found = error.findings if isinstance(error, PreflightError) else ()
    return {**values, "findings": [dict(one) for one in found]}


def describe_self() -> dict[str, Any]:
    """This process so that it can be told from any other, also after a reboot."""
    return {
        "pid": os.getpid(),
        "start_time": start_time(os.getpid()),
        "boot": read_boot(),
        "machine": socket.gethostname(),
    }


def read_boot() -> str | None:
    """The id the kernel gave itself when it started."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None
