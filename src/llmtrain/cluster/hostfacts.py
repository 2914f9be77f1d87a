"""Runs on a host: what kind of machine it is, as one JSON document.

One stdlib-only file for Python 3.6 and later, sent over SSH to the interpreter that the ranks would use
(``python -I -``), so that it sees what they would see. Also imported here, for the digest of a tree.
"""

import hashlib
import json
import os
import platform
import socket
import struct
import subprocess
import sys
import time
from typing import Any, Dict, List, Optional, Set

Json = Dict[str, Any]

MARK = "llmtrain-facts-7c1d"
PACKAGES = (
    "torch",
    "deepspeed",
    "transformers",
    "accelerate",
    "trl",
    "peft",
    "peft",
    "datasets",
    "pydantic",
    "pyyaml",
    "flash_attn",
    "ninja",
)
SAMPLE = 1 << 20


def read(path: str, default: str = "") -> str:
    try:
        with open(path, errors="replace") as stream:
            return stream.read().strip()
    except OSError:
        return default


def interfaces() -> List[Json]:
    found = []
    rdma = rdma_interfaces()
    for name in sorted(os.listdir("/sys/class/net")):
        base = "/sys/class/net/" + name
        speed = read(base + "/speed", "-1")
        found.append(
            {
                "name": name,
                "ipv4": ipv4(name),
                "up": read(base + "/operstate") in ("up", "unknown"),
                "speed_mbits": int(speed) if speed.lstrip("-").isdigit() and int(speed) > 0 else None,
                "mtu": int(read(base + "/mtu", "0") or 0),
                "loopback": read(base + "/type") == "772",
                "bridge": os.path.isdir(base + "/bridge"),
                "physical": os.path.exists(base + "/device"),
                "rdma": name in rdma,
            }
        )
    return found


def rdma_interfaces() -> Set[str]:
    names = set()  # type: Set[str]
    base = "/sys/class/infiniband"
    for device in os.listdir(base) if os.path.isdir(base) else ():
        net = os.path.join(base, device, "device", "net")
        names.update(os.listdir(net) if os.path.isdir(net) else ())
    return names


def ipv4(name: str) -> Optional[str]:
    """Address and prefix length through ioctls, since minimal hosts lack iproute2."""
    import fcntl

    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            address = fcntl.ioctl(sock.fileno(), 0x8915, request)[20:24]
            mask = fcntl.ioctl(sock.fileno(), 0x891B, request)[20:24]
        except OSError:
            return None
    prefix = bin(struct.unpack("!I", mask)[0]).count("1")
    return "%s/%d" % (socket.inet_ntoa(address), prefix)


def packages() -> Dict[str, Optional[str]]:
    versions = {}  # type: Dict[str, Optional[str]]
    try:
        from importlib.metadata import PackageNotFoundError, version
    except ImportError:
        return versions
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except (PackageNotFoundError, TypeError, KeyError):  # the last two: a folder of it is left, without its data
            versions[name] = None
    return versions


def environment_digest() -> Optional[str]:
    """What was installed, by the records that pip and conda leave: quick, and the same wherever it was copied to."""
    try:
        from importlib.metadata import distributions
    except ImportError:
        return None
    found = set()
    for one in distributions():
        lines = sorted(line for line in (one.read_text("RECORD") or "").splitlines() if ".pyc" not in line)
        record = hashlib.sha256("\n".join(lines).encode("utf-8", "replace")).hexdigest()
        found.add("%s %s %s" % (one.metadata["Name"], one.version, record))
    meta = os.path.join(sys.prefix, "conda-meta")
    found.update(os.listdir(meta) if os.path.isdir(meta) else ())
    return hashlib.sha256("\n".join([platform.python_version()] + sorted(found)).encode()).hexdigest()


def accelerators() -> List[Json]:
    """One entry per NVIDIA GPU; fields the driver does not know are None."""
    query = "index,name,uuid,memory.total,memory.used,compute_cap,driver_version"
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=" + query, "--format=csv,noheader,nounits"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=15,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode != 0:
        return []
    rows = [[part.strip() for part in line.split(",")] for line in done.stdout.decode("utf-8", "replace").splitlines()]
    keys = query.split(",")
    return [
        {key: (None if "N/A" in value else value) for key, value in zip(keys, row)}
        for row in rows
        if len(row) == len(keys)
    ]


def memory() -> Json:
    values = {}
    for line in read("/proc/meminfo").splitlines():
        key, _, rest = line.partition(":")
        values[key] = int(rest.split()[0]) * 1024
    limits = [
        read("/sys/fs/cgroup/memory.max", "max"),
        read("/sys/fs/cgroup/memory/memory.limit_in_bytes", "max"),
    ]
    limit = min([int(text) for text in limits if text.isdigit()] or [1 << 62])
    return {
        "total_bytes": min(values.get("MemTotal", 0), limit),
        "available_bytes": min(values.get("MemAvailable", 0), limit),
    }


def disk(path: str) -> Json:
    """Free space where ``path`` is or would be, and whether it can be written."""
    probe = path
    while not os.path.exists(probe) and probe != "/":
        probe = os.path.dirname(probe)
    stat = os.statvfs(probe)
    return {
        "path": path,
        "existing": probe,
        "free_bytes": stat.f_bavail * stat.f_frsize,
        "free_inodes": stat.f_favail,
        "writable": os.access(probe, os.W_OK | os.X_OK) and os.path.isdir(probe),
    }


def file_digest(path: str, size: int, deep: bool = False) -> str:
    """SHA-256 of the size and of three samples: enough to tell copies apart, quick for 100 GB. Of all, if deep."""
    digest = hashlib.sha256(str(size).encode())
    with open(path, "rb") as stream:
        if deep:
            for block in iter(lambda: stream.read(SAMPLE), b""):
                digest.update(block)
            return digest.hexdigest()
        for offset in sorted({0, max(0, size // 2 - SAMPLE // 2), max(0, size - SAMPLE)}):
            stream.seek(offset)
            digest.update(stream.read(SAMPLE))
    return digest.hexdigest()


def tree_digest(path: str, deep: bool = False) -> Json:
    """What stands at ``path``: ``{"kind", "files": {relative path: [size, sampled digest]}}``."""
    if os.path.isfile(path):
        size = os.path.getsize(path)
        return {"kind": "file", "files": {"": [size, file_digest(path, size, deep)]}}
    if not os.path.isdir(path):
        return {"kind": "missing", "files": {}}
    files = {}
    for folder, _, names in os.walk(path, followlinks=True):
        for name in names:
            full = os.path.join(folder, name)
            if os.path.isfile(full):
                size = os.path.getsize(full)
                files[os.path.relpath(full, path)] = [size, file_digest(full, size, deep)]
    return {"kind": "dir", "files": files}


def free_ports(first: int, last: int, count: int) -> List[int]:
    """Ports of the range that nobody listens on, spread over it."""
    import random

    free = []
    for port in random.sample(range(first, last + 1), min(64, last - first + 1)):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            try:
                sock.bind(("", port))
            except OSError:
                continue
        free.append(port)
        if len(free) == count:
            break
    return free


def own_address() -> Optional[str]:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def facts(request: Json) -> Json:
    home = os.path.expanduser("~")
    node_dir = request.get("node_dir") or os.path.join(home, ".llmtrain")
    first, last = request.get("ports") or (20000, 29999)
    return {
        "hostname": socket.gethostname(),
        "machine_id": read("/etc/machine-id"),
        "boot_id": read("/proc/sys/kernel/random/boot_id"),
        "uid": os.getuid(),
        "home": home,
        "ssh_address": (os.environ.get("SSH_CONNECTION") or "- - - -").split()[2],
        "own_address": own_address(),
        "kernel": platform.release(),
        "glibc": platform.libc_ver()[1],
        "machine": platform.machine(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "prefix": sys.prefix,
        "packages": packages(),
        "environment": environment_digest(),
        "accelerators": accelerators(),
        "other_accelerators": [name for name in ("kfd", "davinci_manager", "accel") if os.path.exists("/dev/" + name)],
        "cpus": sorted(os.sched_getaffinity(0)),
        "memory": memory(),
        "shm": disk("/dev/shm"),
        "node_dir": disk(node_dir),
        "interfaces": interfaces(),
        "free_ports": free_ports(first, last, 4),
        "trees": {path: tree_digest(path, request.get("deep", False)) for path in request.get("trees", ())},
        "time": time.time(),
    }


def answer(request: Json, more: Optional[Json] = None) -> None:
    found = facts(request)
    found["details"] = more
    sys.stdout.write("\n%s%s%s\n" % (MARK, json.dumps(found), MARK))
