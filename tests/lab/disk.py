"""What is on a host's private disk before its first boot."""

from __future__ import annotations

import shutil
import subprocess
import uuid
from pathlib import Path

from tests.lab.model import HEAD, LabOptions, address, host_names

FOLDERS = {
    "dev": 0o755,
    "etc": 0o755,
    "home": 0o755,
    "media": 0o755,
    "mnt": 0o755,
    "proc": 0o555,
    "root": 0o700,
    "root/.ssh": 0o700,
    "run": 0o755,
    "srv": 0o755,
    "sys": 0o555,
    "tmp": 0o1777,
    "var/cache": 0o755,
    "var/empty": 0o755,
    "var/lib": 0o755,
    "var/log": 0o755,
    "var/tmp": 0o1777,
}
SSHD_CONFIG = """\
Port 22
ListenAddress 0.0.0.0
HostKey /etc/ssh/ssh_host_ed25519_key
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
AcceptEnv LANG LC_*
Subsystem sftp /usr/lib/openssh/sftp-server
PidFile /run/sshd.pid
PrintMotd no
LogLevel VERBOSE
"""
SSH_CONFIG = "Host *\n    SendEnv LANG LC_*\n"


def write_key(path: Path, comment: str) -> None:
    """Make a new ed25519 key pair."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)], check=True)


def public_key(path: Path) -> str:
    """Type and key, without the comment."""
    return " ".join(path.with_name(path.name + ".pub").read_text().split()[:2])


def render_hosts(options: LabOptions, names: list[str], host: str, *, loopback_name: bool) -> str:
    """/etc/hosts of one host; the second network stays unnamed."""
    own = {host: "127.0.1.1"} if loopback_name else {}
    lines = [f"{own.get(name) or address(options, name)} {name}" for name in names]
    return "\n".join(["127.0.0.1 localhost", "::1 localhost ip6-localhost", *lines]) + "\n"


def render_known_hosts(options: LabOptions, keys: dict[str, str]) -> str:
    """One line a host, by name and by both addresses."""
    return "".join(
        f"{name},{address(options, name)},{address(options, name, 'eth1')} {key}\n" for name, key in keys.items()
    )


def copy_tree(source: str, target: Path) -> None:
    """A copy that shares no file with its source."""
    target.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "-a", "--reflink=auto", f"{source}/.", str(target)], check=True)


def install(disk: Path, host: str, keys: Path, nodes: int, options: LabOptions) -> None:
    """Make the disk of one host; `keys` holds `client`, `host-NAME` and their public halves."""
    for name, mode in FOLDERS.items():
        (disk / name).mkdir(parents=True, exist_ok=True)
        (disk / name).chmod(mode)
    install_etc(disk / "etc", host, nodes, options)
    install_ssh(disk, host, keys, nodes, options)
    for source, target in options.private_copies:
        copy_tree(source, disk / target.lstrip("/"))


def install_etc(etc: Path, host: str, nodes: int, options: LabOptions) -> None:
    """What differs from this machine's /etc: the host's own name, id and addresses. The rest shows through at boot."""
    (etc / "hosts").write_text(render_hosts(options, host_names(nodes), host, loopback_name=options.loopback_name))
    (etc / "hostname").write_text(f"{host}\n")
    (etc / "machine-id").write_text(f"{uuid.uuid4().hex}\n")
    (etc / "resolv.conf").touch()
    (etc / "shadow").touch(mode=0o600)
    (etc / "shadow").write_text(unlock_root(Path("/etc/shadow").read_text()))


def unlock_root(shadow: str) -> str:
    """Without PAM, sshd lets nobody into an account locked by `!`, not even with a key."""
    fields = [line.split(":") for line in shadow.splitlines()]
    return "".join(":".join(["root", "*", *f[2:]] if f[0] == "root" else f) + "\n" for f in fields)


def install_ssh(disk: Path, host: str, keys: Path, nodes: int, options: LabOptions) -> None:
    """The host's own key, the lab's client key as the only way in; the head alone holds that key."""
    etc, home = disk / "etc/ssh", disk / "root/.ssh"
    etc.mkdir()
    (etc / "sshd_config").write_text(SSHD_CONFIG)
    (etc / "ssh_config").write_text(SSH_CONFIG)
    install_key(keys / f"host-{host}", etc / "ssh_host_ed25519_key")
    shutil.copy(keys / "client.pub", home / "authorized_keys")
    (home / "authorized_keys").chmod(0o600)
    if host == HEAD:
        install_key(keys / "client", home / "id_ed25519")
        known = {name: public_key(keys / f"host-{name}") for name in host_names(nodes)}
        (home / "known_hosts").write_text(render_known_hosts(options, known))
    for name in (".bashrc", ".profile"):
        if (skeleton := Path("/etc/skel") / name).exists():
            shutil.copy(skeleton, disk / "root" / name)


def install_key(source: Path, target: Path) -> None:
    """Both halves of a key pair."""
    shutil.copy(source, target)
    target.chmod(0o600)
    shutil.copy(source.with_name(source.name + ".pub"), target.with_name(target.name + ".pub"))
