"""PID 1 of one host: build its root, start its sshd, reap its orphans, switch off in time.

Started by `unshare` with the host's node.json and the file descriptor to say `ready` on.
Uses no other module of the lab, so that it starts fast.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC = 1, 32, 4096, 16384
MNT_DETACH = 2
SYSTEM = ("usr", "opt", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
DEVICE_LINKS = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
SSHD_PID = Path("/run/sshd.pid")
SSHD_START_S = 10.0
libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    """Raise what libc had to say."""
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), what)


def mount(source: str, target: str | Path, kind: str = "", flags: int = 0, data: str = "") -> None:
    """The system call."""
    arguments = (source.encode(), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), data.encode())
    check(libc.mount(*arguments), f"mount {source} {target}")


def bind(source: Path, target: Path, *, readonly: bool) -> None:
    """Show a directory or file of this machine in the host."""
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch(exist_ok=True)
    mount(str(source), target, flags=MS_BIND)
    if readonly:
        mount("none", target, flags=MS_REMOUNT | MS_BIND | MS_RDONLY)


def record_identity(path: str) -> None:
    """/proc is still the machine's, so this is the pid that the machine sees."""
    pid, _, rest = Path("/proc/self/stat").read_text().partition(" ")
    start_time = int(rest.rpartition(")")[2].split()[19])
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    Path(path).write_text(json.dumps({"pid": int(pid), "start_time": start_time, "boot_id": boot_id}))


def bind_system(root: Path) -> None:
    """Programs and libraries, read-only; merged-/usr links stay links."""
    for name in SYSTEM:
        source, target = Path("/") / name, root / name
        if source.is_symlink():
            with contextlib.suppress(FileExistsError):
                target.symlink_to(source.readlink())
        elif source.is_dir():
            bind(source, target, readonly=True)


def mount_etc(target: Path, work: Path) -> None:
    """The host's own files over this machine's /etc; writes go to the host's disk.

    Before anything is bound over the disk: an overlay wants both its folders on one mount.
    """
    work.mkdir(exist_ok=True)
    try:
        os.setxattr(target / "ssh", "trusted.overlay.opaque", b"y")
        layers = f"lowerdir=/etc,upperdir={target},workdir={work}"
        mount("overlay", target, "overlay", data=layers)
    except OSError:  # the lab lies on an overlay itself, as in a container: no second one on top
        copy_missing(Path("/etc"), target)


def copy_missing(source: Path, target: Path) -> None:
    """Copy what the target does not have yet."""
    missing = [str(entry) for entry in source.iterdir() if not os.path.lexists(target / entry.name)]
    if missing:
        subprocess.run(["/bin/cp", "-a", "--", *missing, str(target)], check=True)


def mount_devices(root: Path, shm_mb: int) -> None:
    """A small /dev of its own, with its own terminals and shared memory; GPUs if there are any."""
    dev = root / "dev"
    mount("tmpfs", dev, "tmpfs", data="mode=755")
    for node in [*(Path("/dev") / name for name in DEVICES), *Path("/dev").glob("nvidia*")]:
        if node.is_char_device():
            bind(node, dev / node.name, readonly=False)
    for name, target in DEVICE_LINKS.items():
        (dev / name).symlink_to(target)
    (dev / "pts").mkdir()
    mount("devpts", dev / "pts", "devpts", data="newinstance,mode=620,gid=5,ptmxmode=666")
    (dev / "shm").mkdir()
    mount("tmpfs", dev / "shm", "tmpfs", data=f"mode=1777,size={shm_mb}m")


def mount_kernel(root: Path) -> None:
    """/proc and /sys of the new namespaces; the cgroup tree read-only; a boot id of its own."""
    mount("proc", root / "proc", "proc")
    mount("sysfs", root / "sys", "sysfs", MS_RDONLY)
    cgroups = root / "sys/fs/cgroup"
    mount("/sys/fs/cgroup", cgroups, flags=MS_BIND | MS_REC)
    places = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for place in places:
        if place == str(cgroups) or place.startswith(f"{cgroups}/"):
            mount("none", place, flags=MS_REMOUNT | MS_BIND | MS_RDONLY)
    mount("tmpfs", root / "run", "tmpfs", data="mode=755")
    for name in ("sshd", "lock"):
        (root / "run" / name).mkdir()
    (root / "run/boot_id").write_text(f"{uuid.uuid4()}\n")
    mount(str(root / "run/boot_id"), root / "proc/sys/kernel/random/boot_id", flags=MS_BIND)


def enter(root: Path) -> None:
    """Make it the root; nothing of the machine's own tree stays reachable."""
    os.chdir(root)
    check(libc.pivot_root(b".", b"."), "pivot_root")
    check(libc.umount2(b".", MNT_DETACH), "umount of the old root")
    os.chdir("/")


def start_sshd() -> None:
    """The daemon writes its pid file once it listens."""
    environ = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    subprocess.run(["/usr/sbin/sshd", "-E", "/var/log/sshd.log"], env=environ, check=True)
    deadline = time.monotonic() + SSHD_START_S
    while not SSHD_PID.exists():
        if time.monotonic() > deadline:
            raise TimeoutError("sshd does not listen: " + Path("/var/log/sshd.log").read_text())
        time.sleep(0.005)


def reap_until(deadline: float) -> None:
    """The life of a PID 1."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the kernel keeps default-action signals away from a PID 1
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        signal.sigtimedwait({signal.SIGCHLD}, left)


def main(config_path: str, ready_fd: int) -> None:
    """Boot, say `ready`, live."""
    config = json.loads(Path(config_path).read_text())
    record_identity(config["identity"])
    os.umask(0o022)
    deadline = time.monotonic() + config["ttl_s"]
    check(libc.sethostname(config["name"].encode(), len(config["name"])), "sethostname")
    root = Path(config["disk"])
    mount_etc(root / "etc", root.parent / "etc-work")
    mount(str(root), root, flags=MS_BIND | MS_REC)
    bind_system(root)
    mount_devices(root, config["shm_mb"])
    mount_kernel(root)
    for share in config["shares"]:
        bind(Path(share), root / share[1:], readonly=True)
    enter(root)
    start_sshd()
    os.write(ready_fd, b"ready\n")
    os.close(ready_fd)
    reap_until(deadline)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
