"""What is asked of a sync, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from llmtrain.errors import SyncError

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_PORTS = (20000, 29999)
SOURCE = "source"


@dataclass(frozen=True, kw_only=True)
class SyncRequest:
    """One tree to many hosts."""

    path: str
    """Absolute path of the file or folder that is copied, on the head or on ``source_host``."""
    dest: str
    """Absolute path it gets on every host."""
    hosts: tuple[str, ...]
    """Hosts that get it, in chain order."""
    source_host: str | None = None
    """Host that has it; None for this machine."""
    what: Literal["files", "weights", "environment"] = "files"
    """Weights follow links that leave the tree; an environment is not swapped while it is in use."""
    exclude: tuple[str, ...] = ()
    """Patterns of names, or of paths from the root, that do not travel."""
    delete: bool = False
    """Remove what only the destination has; only in trees llmtrain made."""
    checksum: bool = False
    """Read every file again instead of trusting size and time."""
    force: bool = False
    """Swap an environment although processes use it, and delete in trees llmtrain did not make."""
    dry_run: bool = False
    """Stop before anything is changed."""
    rate: float | None = None
    """Bytes per second that leave the source, and so travel along the chain."""
    streams: int | None = None
    """Connections each host pulls over; one for every four of its cores, at most four, if not given."""
    keep: int = 1
    """Old generations kept for ``--rollback``."""
    transport: Literal["auto", "tls", "ssh-hop", "star"] = "auto"
    """How bytes travel between hosts."""
    network: str | None = None
    """Subnet or interface for the bytes; the one SSH uses if not given."""
    ports: tuple[int, int] = DEFAULT_PORTS
    """Range the agents listen in while the sync lasts."""
    dests: Mapping[str, str] = field(default_factory=dict)
    """Destination on hosts where it is another path."""
    addresses: Mapping[str, str] = field(default_factory=dict)
    """Address of a host (or of "source") where it must not be found out."""

    pythons: Mapping[str, str] = field(default_factory=dict)
    """Interpreter of a host for its agent, where ``python3`` may not be found."""

    def dest_on(self, host: str) -> str:
        """Destination on a host."""
        return self.dests.get(host, self.dest)


@dataclass(kw_only=True)
class HostReport:
    """What one host got."""

    host: str
    """Its name."""
    ok: bool = False
    """The tree stands at the destination and is proven equal."""
    bytes_sent: int = 0
    """Bytes that arrived at this host."""
    bytes_reused: int = 0
    """Bytes it had already."""
    seconds: float = 0.0
    """From the first message to the end on this host."""
    error: str | None = None
    """Why not."""
    note: str = ""
    """What was special: unchanged, shares its file system, by which way it was reached."""

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return dict(self.__dict__)


@dataclass(kw_only=True)
class SyncReport:
    """What came of a sync."""

    hosts: list[HostReport]
    """In the order they were given."""
    head_bytes_sent: int = 0
    """Bytes that left the source."""
    transfer_seconds: float = 0.0
    """From the first request for a chunk until the last host had its last one."""
    seconds: float = 0.0
    """The whole sync."""
    root: str = ""
    """Digest of the tree."""
    total_bytes: int = 0
    """Bytes that some host lacked."""
    tree_bytes: int = 0
    """Bytes of all files of the tree."""
    files: int = 0
    """Entries of the tree."""
    planned: dict[str, dict[str, int]] = field(default_factory=dict)
    """Host -> ``bytes`` it lacks, ``disk_bytes`` that the new tree takes beside the old one."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Host -> what is added, changed, touched, removed there."""
    slow: list[str] = field(default_factory=list)
    """Hosts that were moved to the end of the chain."""
    warnings: list[str] = field(default_factory=list)
    """What a person should know."""

    @property
    def ok(self) -> bool:
        """Every host has it."""
        return all(host.ok for host in self.hosts)

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            **self.__dict__,
            "ok": self.ok,
            "exit_code": 0 if self.ok else 7,
            "hosts": [host.to_json() for host in self.hosts],
        }


def refuse_failures(report: SyncReport) -> None:
    """Raise if some host did not get the tree.

    Raises:
        SyncError: naming the first such host and how many more there are.
    """
    failed = [host for host in report.hosts if not host.ok]
    if failed:
        more = (
            f" (and {len(failed) - 1} more hosts: {', '.join(one.host for one in failed[1:6])})" if failed[1:] else ""
        )
        raise SyncError(f"{failed[0].error}{more}", where=failed[0].host, fix="mend it and run the same command again")
