"""Hosts reached over SSH: paramiko for questions and control channels, OpenSSH children for bulk data."""

from __future__ import annotations

import contextlib
import random
import shlex
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import paramiko

from llmtrain.cluster.fleet import START_MARK, Command, Result, render_marked, render_shell
from llmtrain.cluster.sshconfig import SshTarget, read_target, ssh_argv
from llmtrain.errors import HostError

if TYPE_CHECKING:
    from collections.abc import Callable

CONNECT_S = 10.0
KEEPALIVE_S = 5
ATTEMPTS = 4
MAX_NOISE = 4096
_TCP_USER_TIMEOUT_MS = 20_000


def connect(name: str) -> SshTransport:
    """Open an SSH connection to a host, as OpenSSH would.

    A refused handshake (sshd's MaxStartups) is tried again with growing, jittered pauses.

    Raises:
        HostError: unreachable, unknown or changed host key, refused login.
    """
    target = read_target(name)
    for attempt in range(1, ATTEMPTS + 1):
        begun = time.monotonic()
        try:
            return SshTransport(target, _open(target))
        except _BusyError as error:
            # One that drops us is busy; one that keeps us waiting hangs, and would the next time.
            if attempt == ATTEMPTS or time.monotonic() - begun > CONNECT_S / 2:
                raise SshError("ssh", str(error), where=name, fix=f"run: ssh -v -- {name} true") from None
            time.sleep(random.uniform(0.2, 0.6) * 2**attempt)  # noqa: S311  spreading retries needs no secrecy
    raise AssertionError("unreachable")


class SshError(HostError):
    """A host that cannot be entered; ``check`` says at which step, in the words of :data:`findings.CHECKS`."""

    def __init__(self, check: str, error: str, *, where: str, fix: str, new_key: str | None = None) -> None:
        super().__init__(error, where=where, fix=fix)
        self.check = check
        self.new_key = new_key
        """The line for known_hosts that would make an unknown (never a changed) key known."""


class _BusyError(Exception):
    """The server dropped the connection before it spoke; worth another try."""


class _UnknownKeyError(Exception):
    """The host offered a key that no known_hosts file holds."""

    def __init__(self, key: paramiko.PKey) -> None:
        super().__init__("unknown host key")
        self.key = key


class _RefuseUnknown(paramiko.MissingHostKeyPolicy):
    """Accepts nothing, and says what was offered."""

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:  # noqa: ARG002
        raise _UnknownKeyError(key)


def _open(target: SshTarget) -> paramiko.SSHClient:
    client = paramiko.SSHClient()
    client.set_missing_host_key_policy(_RefuseUnknown())
    for path in target.known_hosts:
        with contextlib.suppress(OSError, paramiko.SSHException):
            client.load_host_keys(path)
    sock = _socket(target)
    # With an alias, or a proxy, the name paramiko looks up must still be the one OpenSSH uses.
    name, port = (target.host_key_alias, 22) if target.host_key_alias else (target.address, target.port)
    try:
        client.connect(
            name,
            port=port,
            username=target.user,
            sock=sock,
            key_filename=list(target.identity_files) or None,  # type: ignore[arg-type]  # the stub forgets lists
            allow_agent=target.use_agent,
            look_for_keys=False,
            timeout=CONNECT_S,
            banner_timeout=CONNECT_S,
            auth_timeout=CONNECT_S,
            channel_timeout=CONNECT_S,
        )
    except Exception as error:  # noqa: BLE001  _explain returns what it does not know unchanged
        client.close()
        sock.close()
        raise _explain(error, target) from None
    transport = client.get_transport()
    if transport is None:
        raise HostError("the connection closed at once", where=target.name, fix=f"run: ssh -v -- {target.name} true")
    transport.set_keepalive(KEEPALIVE_S)
    return client


def _socket(target: SshTarget) -> Any:
    if target.proxy is not None:
        return paramiko.ProxyCommand(shlex.join(target.proxy))
    try:
        sock = socket.create_connection((target.address, target.port), timeout=CONNECT_S)
    except socket.gaierror:
        raise SshError(
            "dns",
            "the name does not resolve",
            where=target.name,
            fix=f"add {target.name} to /etc/hosts or DNS, or 'HostName ADDRESS' to ~/.ssh/config",
        ) from None
    except (TimeoutError, OSError) as error:
        raise SshError(
            "connect",
            f"no connection to {target.address} port {target.port}: {error.strerror or 'timed out'}",
            where=target.name,
            fix=f"check that the host is up and sshd listens: ssh -v -- {target.name} true",
        ) from None
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _TCP_USER_TIMEOUT_MS)
    return sock


def _explain(error: Exception, target: SshTarget) -> Exception:  # noqa: PLR0911  a table of causes
    name = target.name
    if isinstance(error, HostError):
        return error
    if isinstance(error, paramiko.BadHostKeyException):
        return SshError(
            "host-key",
            f"the host key has CHANGED: known {_print(error.expected_key)}, offered {_print(error.key)}",
            where=name,
            fix=f"ssh-keygen -R {shlex.quote(target.key_name)}  # only if the host was reinstalled",
        )
    if isinstance(error, _UnknownKeyError):
        line = f"{target.key_name} {error.key.get_name()} {error.key.get_base64()}"
        unknown = f"the host key is unknown: {_print(error.key)}"
        return SshError("host-key", unknown, where=name, fix=_trust(target), new_key=line)
    if isinstance(error, paramiko.AuthenticationException):
        tried = ", ".join(_describe_key(path) for path in target.identity_files) or "no key file"
        agent = " and the agent's keys" if target.use_agent else ""
        return SshError(
            "login",
            f"login as {target.user} refused (tried {tried}{agent})",
            where=name,
            fix=f"ssh-copy-id -- {name}",
        )
    text = str(error)
    if isinstance(error, (EOFError, ConnectionResetError)) or "banner" in text or "Connection reset" in text:
        return _BusyError(f"the host accepts connections but ssh does not answer ({text or 'closed'})")
    if isinstance(error, (paramiko.SSHException, OSError)):
        return SshError("ssh", f"ssh failed: {text or type(error).__name__}", where=name, fix=f"ssh -v -- {name} true")
    return error


def _describe_key(path: str) -> str:
    """A key file, and why it may not have been good for anything."""
    try:
        mode = Path(path).stat().st_mode
        paramiko.PKey.from_path(path)
    except paramiko.PasswordRequiredException:
        return f"{path} needs a passphrase: ssh-add"
    except Exception as error:  # noqa: BLE001  paramiko raises all kinds for files that are no keys
        return f"{path} cannot be read: {error}"
    return f"{path} is readable by others: chmod 600" if mode & 0o077 else path


def _trust(target: SshTarget) -> str:
    """The command that makes a host key known, with what to do before."""
    compare = "# after comparing it on the host: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub"
    if target.proxy or target.host_key_alias:  # ssh-keyscan knows neither; ssh asks, and then writes it down
        return f"ssh -o StrictHostKeyChecking=ask -- {target.name} true  {compare}"
    port = "" if target.port == 22 else f"-p {target.port} "
    return f"ssh-keyscan {port}-- {target.address} >> ~/.ssh/known_hosts  {compare}"


def _print(key: paramiko.PKey) -> str:
    return f"{key.get_name()} {key.fingerprint}"


class SshChannel:
    """A process on the host that ends when this channel, or this program, does."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel
        self._noise: bytes | None = b""

    def write(self, data: bytes) -> None:
        """Send bytes to the process; OSError when it is gone."""
        self._channel.sendall(data)

    def read(self) -> bytes:
        """The next bytes it wrote; empty at the end or when the connection is lost."""
        data = self._receive()
        while data and self._noise is not None:
            # Start-up files of the login's shell may print; the process speaks after the mark.
            noise, found, data = (self._noise + data).partition(START_MARK)
            self._noise = None if found else noise[-MAX_NOISE:]
            data = data or self._receive()
        return data

    def _receive(self) -> bytes:
        try:
            return self._channel.recv(65536)
        except (OSError, EOFError, paramiko.SSHException):
            return b""

    def close(self) -> None:
        """End its standard input and drop the channel."""
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._channel.close()


class SshTransport:
    """One host over one SSH connection."""

    def __init__(self, target: SshTarget, client: paramiko.SSHClient) -> None:
        self.name = target.name
        self.target = target
        self._client = client

    def run(self, command: Command) -> Result:
        """Run a command to its end.

        Raises:
            HostError: the connection is gone, or the deadline has passed.
        """
        deadline = time.monotonic() + command.timeout_s
        channel = self._exec(render_shell(command.argv), command.timeout_s)
        try:
            if command.stdin:
                _feed(channel, command.stdin)
            channel.shutdown_write()
            stdout = _drain(channel, channel.recv, deadline)
            stderr = _drain(channel, channel.recv_stderr, deadline)
            if not channel.status_event.wait(max(0.1, deadline - time.monotonic())):
                raise self._hung(command)
            if channel.exit_status < 0 and not self._is_active():
                raise OSError("the connection ended first")  # noqa: TRY301
            return Result(code=channel.exit_status, stdout=stdout, stderr=stderr)
        except TimeoutError:
            raise self._hung(command) from None
        except (OSError, EOFError, paramiko.SSHException) as error:
            raise self._lost(error) from None
        finally:
            channel.close()

    def start(self, argv: tuple[str, ...]) -> SshChannel:
        """Start a process that lives as long as its channel; what it writes to stderr is dropped."""
        channel = self._exec(render_marked(argv) + " 2>/dev/null", CONNECT_S)
        channel.settimeout(None)
        return SshChannel(channel)

    def bulk(self, argv: tuple[str, ...]) -> subprocess.Popen[bytes]:
        """Start a process for bulk data through an OpenSSH child, which is several times faster than paramiko."""
        command = ssh_argv(self.name, render_shell(argv))
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)

    def close(self) -> None:
        """Close the connection; processes held by its channels end."""
        self._client.close()

    def _exec(self, command: str, timeout_s: float) -> paramiko.Channel:
        transport = self._client.get_transport()
        try:
            if transport is None or not self._is_active():
                raise OSError("the connection is closed")  # noqa: TRY301
            channel = transport.open_session(timeout=min(timeout_s, CONNECT_S))
            channel.settimeout(timeout_s)
            channel.exec_command(command)
        except (OSError, EOFError, paramiko.SSHException) as error:
            raise self._lost(error) from None
        return channel

    def _is_active(self) -> bool:
        transport = self._client.get_transport()
        return transport is not None and transport.is_active()

    def _hung(self, command: Command) -> HostError:
        return HostError(
            f"{command.argv[0]} did not end within {command.timeout_s:.0f} s",
            where=self.name,
            fix=f"see whether the host hangs: ssh -- {self.name} uptime",
        )

    def _lost(self, error: Exception) -> HostError:
        return HostError(
            f"the connection was lost ({error or type(error).__name__})",
            where=self.name,
            fix=f"ssh -- {self.name} uptime",
        )


def _feed(channel: paramiko.Channel, data: bytes) -> None:
    """Send what the command reads; one that ends without reading all of it says itself why."""
    try:
        channel.sendall(data)
    except TimeoutError:
        raise
    except OSError:
        if not channel.closed:
            raise


def _drain(channel: paramiko.Channel, receive: Callable[[int], bytes], deadline: float) -> bytes:
    parts: list[bytes] = []
    while True:
        channel.settimeout(max(0.05, deadline - time.monotonic()))
        part = receive(65536)
        if not part:
            return b"".join(parts)
        parts.append(part)
