"""What OpenSSH would do for a host, asked from OpenSSH itself (``ssh -G``), and the configuration given to pdsh.

paramiko reads ssh_config differently from OpenSSH in several places (``Include``, ``Match``, ``ProxyJump``), so
OpenSSH's own answer is the only truth here, and both transports follow it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

from llmtrain.errors import HostError

SAFE_OPTIONS: tuple[tuple[str, str], ...] = (
    ("BatchMode", "yes"),
    ("StrictHostKeyChecking", "yes"),
    ("ConnectTimeout", "10"),
    ("ServerAliveInterval", "5"),
    # Half a minute: pdsh's connections must not give a link up before the watch does (launch/watch.py, LOST_S).
    ("ServerAliveCountMax", "6"),
    ("ForwardAgent", "no"),
    ("ForwardX11", "no"),
    ("ClearAllForwardings", "yes"),
    ("ControlMaster", "no"),
    ("ControlPath", "none"),
    ("RequestTTY", "no"),
    ("LogLevel", "ERROR"),
)
"""Options laid over the user's own: nothing asks, no unknown key is accepted, a dead host is noticed in 15 s."""
_OWN_SESSION = ("setsid",)
"""A Ctrl-C at the terminal must not end the connection over which we stop the run."""


@dataclass(frozen=True, kw_only=True)
class SshTarget:
    """OpenSSH's settings for one host."""

    name: str
    """The name it was asked about."""
    address: str
    """``HostName`` after the user's configuration."""
    port: int
    """TCP port of its sshd."""
    user: str
    """Login name."""
    identity_files: tuple[str, ...]
    """Private keys that exist, in the order OpenSSH tries them."""
    use_agent: bool
    """Whether keys of the agent are tried."""
    known_hosts: tuple[str, ...]
    """Host-key files that exist, the user's first."""
    host_key_alias: str | None
    """Name the host key is stored under, if not the host's own."""
    proxy: tuple[str, ...] | None
    """argv of a process whose standard streams are the connection, for ProxyJump and ProxyCommand."""

    @property
    def key_name(self) -> str:
        """The name under which known_hosts files hold this host's key."""
        if self.host_key_alias:
            return self.host_key_alias
        return self.address if self.port == 22 else f"[{self.address}]:{self.port}"


def parse_ssh_g(name: str, text: str) -> dict[str, list[str]]:
    """``ssh -G`` output as lower-case key -> values in order."""
    settings: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        settings.setdefault(key.lower(), []).append(value.strip())
    if "hostname" not in settings:
        raise HostError("ssh -G gave no answer", where=name, fix=f"run: ssh -G -- {name}")
    return settings


def make_target(name: str, settings: dict[str, list[str]]) -> SshTarget:
    """Read the settings that matter; files that do not exist are left out."""
    first = {key: values[0] for key, values in settings.items() if values}
    address, port, user = first["hostname"], int(first.get("port", "22")), first.get("user", "")
    alias = first.get("hostkeyalias", "none")
    return SshTarget(
        name=name,
        address=address,
        port=port,
        user=user,
        identity_files=_existing(settings.get("identityfile", [])),
        use_agent=first.get("identityagent", "SSH_AUTH_SOCK").lower() != "none",
        known_hosts=_existing(
            [
                path
                for key in ("userknownhostsfile", "globalknownhostsfile")
                for line in settings.get(key, [])
                for path in line.split()
            ]
        ),
        host_key_alias=None if alias == "none" else alias,
        proxy=_proxy(first, address, port, user, name),
    )


def _existing(paths: list[str]) -> tuple[str, ...]:
    expanded = [os.path.expanduser(path) for path in paths]  # noqa: PTH111  a str goes to paramiko
    return tuple(path for path in expanded if Path(path).is_file())


def _proxy(first: dict[str, str], address: str, port: int, user: str, name: str) -> tuple[str, ...] | None:
    jump = first.get("proxyjump", "none")
    if jump not in {"none", ""}:
        *earlier, last = jump.split(",")
        via = ("-J", ",".join(earlier)) if earlier else ()
        options = tuple(
            part for key, value in SAFE_OPTIONS if key != "ClearAllForwardings" for part in option(key, value)
        )
        return (*_OWN_SESSION, "ssh", *options, *via, "-W", f"[{address}]:{port}", "--", _destination(last))
    command = first.get("proxycommand", "none")
    if command in {"none", ""}:
        return None
    tokens = {"%h": address, "%p": str(port), "%r": user, "%n": name, "%%": "%"}
    for token, value in tokens.items():
        command = command.replace(token, value)
    return (*_OWN_SESSION, "/bin/sh", "-c", f"exec {command}")


def _destination(jump: str) -> str:
    """A jump host as a destination: what ``-J`` reads as ``user@host:port``, ssh itself reads only as a URI."""
    if jump.startswith("ssh://") or not re.search(r":\d+$", jump):
        return jump
    return f"ssh://{jump}"


def option(key: str, value: str) -> tuple[str, str]:
    """An ``-o KEY=VALUE`` pair for OpenSSH."""
    return "-o", f"{key}={value}"


def read_target(name: str) -> SshTarget:
    """Ask OpenSSH about a host.

    Raises:
        HostError: no ``ssh`` here, or the user's ssh configuration is broken.
    """
    try:
        done = subprocess.run(["ssh", "-G", "--", name], capture_output=True, text=True, timeout=10, check=False)
    except FileNotFoundError:
        raise HostError("no ssh program on this machine", where="head", fix="apt-get install openssh-client") from None
    except subprocess.TimeoutExpired:
        raise HostError("ssh -G does not answer", where=name, fix=f"run: ssh -G -- {name}") from None
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "unknown reason"
        raise HostError(f"ssh cannot read its configuration: {reason}", where=name, fix=f"run: ssh -G -- {name}")
    return make_target(name, parse_ssh_g(name, done.stdout))


def render_ssh_config() -> str:
    """A private ssh configuration for pdsh: our options on top (the first value wins), the user's own below."""
    ours = "".join(f"  {key} {value}\n" for key, value in SAFE_OPTIONS)
    return f"Host *\n{ours}Match all\nInclude ~/.ssh/config\nMatch all\nInclude /etc/ssh/ssh_config\n"


def ssh_argv(name: str, remote: str) -> list[str]:
    """The argv of an OpenSSH client for bulk data; ``remote`` is shell text for the host.

    AES-GCM moves half as much again as the default cipher on machines with AES instructions.
    """
    options = [part for key, value in SAFE_OPTIONS for part in option(key, value)]
    return ["ssh", "-T", *options, *option("Ciphers", "^aes128-gcm@openssh.com"), "--", name, remote]


def render_command(argv: list[str]) -> str:
    """A command as a person would type it, for messages."""
    return shlex.join(argv)
