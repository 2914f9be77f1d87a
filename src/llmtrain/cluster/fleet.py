"""Commands to many hosts at once, bounded and with deadlines; a failed host is a value, not an exception."""

from __future__ import annotations

import shlex
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from llmtrain.errors import HostError, LlmtrainError

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator, Mapping, Sequence

FAN_OUT = 32
"""Hosts spoken to at once: more gains nothing (100 hosts: 6.0 s at 32, 5.7 s at 100) and trips sshd's MaxStartups."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Command:
    """One program to run on a host."""

    argv: tuple[str, ...]
    """Program and arguments; the only text that reaches a shell, quoted by :func:`render_shell`."""
    stdin: bytes = b""
    """What it reads; values and secrets go here, never into ``argv``."""
    timeout_s: float = 30.0
    """Seconds until it counts as hung."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a command ended."""

    code: int
    """Exit status; 128 + signal where a signal ended it."""
    stdout: bytes
    """All it wrote to standard output."""
    stderr: bytes
    """All it wrote to standard error."""

    def tail(self) -> str:
        """The last line of standard error, or of standard output, for a message."""
        text = (self.stderr or self.stdout).decode("utf-8", "replace").strip()
        return text.splitlines()[-1] if text else f"exit code {self.code}"


class Channel(Protocol):
    """A process on a host that lives as long as we hold it: its standard input ends when we are gone."""

    def write(self, data: bytes) -> None:
        """Send bytes to its standard input; OSError when it is gone."""

    def read(self) -> bytes:
        """The next bytes of its standard output; empty at its end."""

    def close(self) -> None:
        """End its standard input and forget it."""


class Transport(Protocol):
    """The way to one host."""

    name: str
    """The host's name in the hostfile."""

    def run(self, command: Command) -> Result:
        """Run a command to its end; HostError if the host does not answer in time."""

    def start(self, argv: tuple[str, ...]) -> Channel:
        """Start a process that lives as long as its channel."""

    def bulk(self, argv: tuple[str, ...]) -> subprocess.Popen[bytes]:
        """Start a process for bulk data, with pipes for its three streams."""

    def close(self) -> None:
        """Leave the host."""


START_MARK = b"llmtrain-start-5e0c"


def render_marked(argv: Sequence[str]) -> str:
    """Shell text that prints :data:`START_MARK` and becomes the program: what came before is a greeting, not its."""
    return f"printf %s {START_MARK.decode()}; exec {render_shell(argv)}"


def render_shell(argv: Sequence[str]) -> str:
    """The one place where shell text is made: every argument quoted."""
    return shlex.join(argv)


class HostFailuresError(HostError):
    """Some hosts failed; every success and every failure is kept."""

    def __init__(self, failures: Mapping[str, LlmtrainError]) -> None:
        first_name, first = next(iter(failures.items()))
        others = f" (and {len(failures) - 1} more: {', '.join(list(failures)[1:6])})" if len(failures) > 1 else ""
        super().__init__(f"{first.error}{others}", where=first.where or first_name, fix=first.fix)
        self.failures = dict(failures)
        self.exit_code = first.exit_code


@dataclass(frozen=True)
class HostResults(Generic[T]):
    """Host name -> what it answered, or why it did not, in the order the hosts were given."""

    values: dict[str, T | LlmtrainError]

    @property
    def good(self) -> dict[str, T]:
        """Hosts that answered."""
        return {name: value for name, value in self.values.items() if not isinstance(value, LlmtrainError)}

    @property
    def failed(self) -> dict[str, LlmtrainError]:
        """Hosts that did not."""
        return {name: value for name, value in self.values.items() if isinstance(value, LlmtrainError)}

    def all_good(self) -> dict[str, T]:
        """Every answer.

        Raises:
            HostFailuresError: at least one host failed; holds all failures.
        """
        if self.failed:
            raise HostFailuresError(self.failed)
        return self.good


def run_on_all(names: Sequence[str], task: Callable[[str], T], *, fan_out: int = FAN_OUT) -> HostResults[T]:
    """Call ``task`` for each host, at most ``fan_out`` at once, and collect answers and failures.

    Only :class:`LlmtrainError` counts as a host's failure; anything else is a bug and is raised.
    """
    if not names:
        return HostResults({})

    def guarded(name: str) -> T | LlmtrainError:
        try:
            return task(name)
        except LlmtrainError as error:
            return error

    pool = ThreadPoolExecutor(max_workers=min(fan_out, len(names)), thread_name_prefix="host")
    try:
        return HostResults(dict(zip(names, pool.map(guarded, names), strict=True)))
    finally:
        # All have answered, unless a signal cut us short; then nobody waits for a slow host.
        pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True)
class Fleet:
    """Open transports to the hosts of a cluster, in rank order."""

    transports: dict[str, Transport]

    def __getitem__(self, name: str) -> Transport:
        return self.transports[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.transports)

    def run(self, command: Callable[[str], Command] | Command) -> HostResults[Result]:
        """Run a command, or one made for each host, on all hosts."""
        make = command if callable(command) else lambda _name: command
        return run_on_all(list(self.transports), lambda name: self.transports[name].run(make(name)))

    def close(self) -> None:
        """Leave all hosts."""
        for transport in self.transports.values():
            transport.close()
