"""A chain of agents on this machine: each "host" is a loopback address and a folder."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from llmtrain.cluster.fleet import Fleet
from llmtrain.cluster.local import LocalTransport
from llmtrain.sync.distribute import run_rollback, run_sync
from llmtrain.sync.request import SyncReport, SyncRequest

HOSTS = ("h1", "h2")


def request(source: Path, base: Path, hosts: tuple[str, ...] = HOSTS, **options) -> SyncRequest:
    """A sync of `source` to `BASE/HOST/tree` on every host."""
    addresses = {host: f"127.0.0.{number}" for number, host in enumerate(hosts, start=2)}
    return SyncRequest(
        path=str(source),
        dest=str(base / "nowhere"),
        hosts=hosts,
        dests={host: str(base / host / "tree") for host in hosts},
        addresses={**addresses, "source": "127.0.0.1"},
        **options,
    )


def sync(source: Path, base: Path, hosts: tuple[str, ...] = HOSTS, tell=lambda what, values: None, **options):
    """Carry it out."""
    fleet = Fleet({host: LocalTransport(host) for host in hosts})
    return run_sync(request(source, base, hosts, **options), fleet, tell)


def roll_back(source: Path, base: Path, hosts: tuple[str, ...] = HOSTS) -> SyncReport:
    """The tree before, on all hosts."""
    fleet = Fleet({host: LocalTransport(host) for host in hosts})
    return run_rollback(request(source, base, hosts), fleet, lambda what, values: None)


def describe(root: Path) -> dict[bytes, tuple]:
    """Every attribute of every entry of a tree that a copy must have; paths as bytes."""
    found: dict[bytes, tuple] = {}
    inodes: dict[int, bytes] = {}

    def add(path: bytes, name: bytes) -> None:
        info = os.lstat(path)
        mode = stat.S_IMODE(info.st_mode)
        if stat.S_ISLNK(info.st_mode):
            found[name] = ("link", os.readlink(path))  # noqa: PTH115  bytes
        elif stat.S_ISDIR(info.st_mode):
            found[name] = ("dir", mode, info.st_mtime_ns)
            for entry in sorted(os.listdir(path)):  # noqa: PTH208  bytes
                add(path + b"/" + entry, name + b"/" + entry)
        else:
            first = inodes.setdefault(info.st_ino, name)
            found[name] = ("file", mode, info.st_mtime_ns, Path(os.fsdecode(path)).read_bytes(), first)

    add(os.fsencode(root), b"")
    return found
