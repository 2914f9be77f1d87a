"""What really travels for an order: the tree, checked beforehand, and the folders that it needs besides."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.cluster.local import LocalTransport
from llmtrain.errors import InputFileError
from llmtrain.sync.condaenv import (
    examine_environment,
    examine_interpreters,
    plan_environment,
    prepare_environment,
    prove,
    refuse_elsewhere,
)
from llmtrain.sync.distribute import run_sync
from llmtrain.sync.ops import examine_ops
from llmtrain.sync.request import SOURCE, HostReport, SyncReport
from llmtrain.sync.weights import check_weights

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmtrain.cluster.fleet import Fleet, Transport
    from llmtrain.sync.condaenv import Extra
    from llmtrain.sync.crew import Tell
    from llmtrain.sync.request import SyncRequest


@dataclass(frozen=True, kw_only=True)
class Cargo:
    """One order, ready to go."""

    request: SyncRequest
    """The tree itself."""
    extras: tuple[Extra, ...] = ()
    """Folders that go first, each to its own path."""


def prepare_cargo(request: SyncRequest, tell: Tell, *, relocate: bool = False) -> Cargo:
    """Check a tree of this machine, and make it ready.

    Raises:
        UsageError: an environment to another path, without ``relocate``.
        InputFileError: it is not there, or is not what it should be.
        DiskError: an archive cannot be unpacked.
    """
    path = Path(request.path)
    if not path.exists():
        raise InputFileError("there is nothing to copy", where=request.path, fix=f"ls {path.parent}")
    extras: tuple[Extra, ...] = ()
    notes: list[str] = []
    if request.what == "weights":
        notes = check_weights(path, request.exclude)
    elif request.what == "environment":
        path, extras, notes = prepare_environment(path, request.dest, relocate=relocate, force=request.force)
    _tell_all(tell, notes)
    return Cargo(request=replace(request, path=str(path)), extras=extras)


def examine_cargo(request: SyncRequest, source: Transport, tell: Tell) -> Cargo:
    """Check a tree of a host.

    Raises:
        UsageError: an environment to another path.
        InputFileError: it is no environment, or one with packages that live elsewhere.
        HostError: the host does not answer.
    """
    if request.what != "environment":
        return Cargo(request=request)
    refuse_elsewhere(request.path, request.dest)
    extras, notes = plan_environment(examine_environment(source, request.path), force=request.force)
    _tell_all(tell, notes)
    return Cargo(request=request, extras=extras)


def _tell_all(tell: Tell, notes: list[str]) -> None:
    for note in notes:
        tell("note", {"text": note})


def run_cargo(cargo: Cargo, fleet: Fleet, tell: Tell, *, source: Transport | None = None) -> SyncReport:
    """Bring all of it to all hosts; an environment is started there to prove that it works.

    Returns:
        One report; a host that failed on the way is in it.

    Raises:
        SyncError: the source cannot be read, or changed while it was copied.
    """
    request = cargo.request
    before: list[SyncReport] = []

    def left() -> tuple[str, ...]:
        return tuple(host for host in request.hosts if all(_is_good(one, host) for one in before))

    for extra in cargo.extras:
        hosts = tuple(host for host in left() if extra.hosts is None or host in extra.hosts)
        if extra.interpreter:
            hosts = examine_interpreters(extra, fleet, hosts, source or LocalTransport(SOURCE))
        if hosts:
            before.append(run_sync(_part(request, extra, hosts), fleet, tell, source=source))
    if not left():
        return _join(before, request.hosts)
    report = run_sync(replace(request, hosts=left()), fleet, tell, source=source)
    if request.what == "environment" and not request.dry_run:
        tell("note", {"text": f"starting the environment on {sum(one.ok for one in report.hosts)} hosts"})
        prove(report, fleet, request.dest)
    return _join([*before, report], request.hosts)


def _part(request: SyncRequest, extra: Extra, hosts: tuple[str, ...]) -> SyncRequest:
    """What goes along, by the same rules, but that nothing is deleted there."""
    there = replace(request, path=extra.path, dest=extra.dest, dests=extra.dests, hosts=hosts, exclude=extra.exclude)
    return replace(there, what="files", delete=False)


def add_ops(cargo: Cargo, fleet: Fleet, tell: Tell, *, prefix: str, node_dirs: Mapping[str, str | None]) -> Cargo:
    """Let the operations go along that were compiled here for an environment.

    Args:
        cargo: the environment.
        fleet: open transports to the hosts.
        tell: called for everything a person would want to see.
        prefix: where it is here.
        node_dirs: host -> working folder there, None for the usual one; "" -> the one here.
    """
    request = cargo.request
    if request.source_host is not None or prefix != request.dest:
        _tell_all(tell, ["compiled operations belong to one path on one machine; they do not go along"])
        return cargo
    extra, text = examine_ops(prefix, request.hosts, fleet, node_dirs)
    _tell_all(tell, [text])
    return cargo if extra is None else replace(cargo, extras=(*cargo.extras, extra))


def _is_good(report: SyncReport, host: str) -> bool:
    return all(one.ok for one in report.hosts if one.host == host)


def _join(reports: list[SyncReport], hosts: tuple[str, ...]) -> SyncReport:
    """The last report, with the bytes and seconds of the ones before."""
    last = reports[-1]
    if len(reports) == 1:
        return last
    joined = {host: HostReport(host=host, ok=True) for host in hosts}
    for report in reports:
        for one in report.hosts:
            sum_ = joined[one.host]
            joined[one.host] = replace(
                one,
                ok=one.ok,
                bytes_sent=one.bytes_sent + sum_.bytes_sent,
                bytes_reused=one.bytes_reused + sum_.bytes_reused,
                seconds=one.seconds + sum_.seconds,
            )
    last.hosts = list(joined.values())
    for name in ("head_bytes_sent", "transfer_seconds", "seconds", "total_bytes", "tree_bytes", "files"):
        setattr(last, name, sum(getattr(report, name) for report in reports))
    last.warnings = list(dict.fromkeys(text for report in reports for text in report.warnings))
    return last
