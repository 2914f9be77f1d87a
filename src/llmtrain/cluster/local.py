"""This machine as a host: the same questions and channels without sshd."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess

from llmtrain.cluster.fleet import Command, Result
from llmtrain.errors import HostError

KEPT = ("HOME", "USER", "LOGNAME", "SHELL", "PATH", "LANG", "LC_ALL", "TMPDIR")
"""What a process here is given of our environment: about what sshd would give it."""


def login_env() -> dict[str, str]:
    """The environment a process gets on this machine."""
    return {key: os.environ[key] for key in KEPT if key in os.environ}


class LocalChannel:
    """A process here that ends when its standard input does."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def write(self, data: bytes) -> None:
        """Send bytes to the process; OSError when it is gone."""
        if self._process.stdin is None or self._process.stdin.closed:
            raise BrokenPipeError("the channel is closed")
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def read(self) -> bytes:
        """The next bytes it wrote; empty at the end."""
        if self._process.stdout is None:
            return b""
        return os.read(self._process.stdout.fileno(), 65536)

    def close(self) -> None:
        """End its standard input, and wait a little for it to leave."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
            if self._process.stdout is not None:
                self._process.stdout.close()


class LocalTransport:
    """This machine, reached through child processes."""

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, command: Command) -> Result:
        """Run a command to its end; HostError when it cannot start or does not end in time."""
        try:
            done = subprocess.run(
                command.argv,
                input=command.stdin,
                capture_output=True,
                timeout=command.timeout_s,
                check=False,
                env=login_env(),
                start_new_session=True,
            )
        except FileNotFoundError:
            return Result(code=127, stdout=b"", stderr=f"{command.argv[0]}: not found".encode())
        except PermissionError:
            return Result(code=126, stdout=b"", stderr=f"{command.argv[0]}: permission denied".encode())
        except subprocess.TimeoutExpired:
            raise HostError(
                f"{command.argv[0]} did not end within {command.timeout_s:.0f} s",
                where=self.name,
                fix="see whether this machine is overloaded: uptime",
            ) from None
        code = done.returncode if done.returncode >= 0 else 128 - done.returncode
        return Result(code=code, stdout=done.stdout, stderr=done.stderr)

    def start(self, argv: tuple[str, ...]) -> LocalChannel:
        """Start a process that lives as long as its channel."""
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=login_env(),
            start_new_session=True,
        )
        return LocalChannel(process)

    def bulk(self, argv: tuple[str, ...]) -> subprocess.Popen[bytes]:
        """Start a process with pipes for its three streams."""
        pipe = subprocess.PIPE
        return subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, env=login_env(), start_new_session=True)

    def close(self) -> None:
        """Nothing is held open."""


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """End a child that leads its own session, and everything it started there."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
