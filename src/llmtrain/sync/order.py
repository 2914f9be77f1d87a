"""From the words of a command line to a sync: what, from where, to whom; and the report."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from llmtrain.cluster.fleet import Fleet, Transport, run_on_all
from llmtrain.cluster.local import LocalTransport
from llmtrain.errors import LlmtrainError, UsageError
from llmtrain.spec.hostfile import Cluster, read_hostfile
from llmtrain.spec.runspec import parse_ports, parse_rate
from llmtrain.sync.cargo import Cargo, add_ops, examine_cargo, prepare_cargo, run_cargo
from llmtrain.sync.distribute import run_rollback
from llmtrain.sync.request import DEFAULT_PORTS, HostReport, SyncReport, SyncRequest
from llmtrain.sync.weights import LEAN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmtrain.spec.runspec import RunSpec
    from llmtrain.sync.crew import Tell

What = Literal["files", "weights", "environment"]


@dataclass(frozen=True, kw_only=True)
class SyncOptions:
    """Options of the three commands."""

    dest: str | None = None
    """``--dest``."""
    exclude: tuple[str, ...] = ()
    """``--exclude``."""
    delete: bool = False
    """``--delete``."""
    rate: str | None = None
    """``--rate``."""
    transport: Literal["auto", "tls", "ssh-hop", "star"] = "auto"
    """``--transport``."""
    checksum: bool = False
    """``--checksum``."""
    streams: int | None = None
    """``--streams``."""
    keep: int = 1
    """``--keep``."""
    rollback: bool = False
    """``--rollback``."""
    force: bool = False
    """``--force``."""
    dry_run: bool = False
    """``--dry-run``."""
    relocate: bool = False
    """``--relocate``."""
    ops: bool = False
    """``--ops``."""
    lean: bool = False
    """``--profile lean``."""


def order_sync(what: What, words: Sequence[str], options: SyncOptions, spec: RunSpec, tell: Tell) -> SyncReport:
    """Carry out one of the commands ``sync``, ``sync-weights``, ``sync-env``.

    Args:
        what: which one.
        words: ``[SOURCE]``, or ``SOURCE DEST FIRST_HOST LAST_HOST`` as in older scripts.
        options: the command's options.
        spec: the run file and its hosts.
        tell: called for everything a person would want to see.

    Raises:
        LlmtrainError: nothing could be done; a failure of single hosts is in the report instead.
    """
    cluster = read_hostfile(_need_hosts(spec))
    request = make_request(what, words, options, spec, cluster)
    if not words:
        tell("note", {"text": "{}: {}".format(*choose_source(what, spec))})
    order = {"path": request.path, "dest": request.dest, "hosts": list(request.hosts)}
    tell("order", {**order, "file": cluster.origin, "rollback": options.rollback})
    cargo = Cargo(request=request)
    if request.source_host is None and not options.rollback:
        cargo = prepare_cargo(request, tell, relocate=options.relocate)
    fleet, failed = open_hosts(request.hosts)
    source: Transport | None = None
    try:
        if request.source_host is not None and not options.rollback:
            source = _connect(request.source_host)
            cargo = examine_cargo(request, source, tell)
        cargo = replace(cargo, request=replace(cargo.request, hosts=tuple(fleet)))
        if options.ops:
            cargo = add_ops(cargo, fleet, tell, prefix=request.path, node_dirs=node_dirs(spec, request.hosts))
        if not fleet.transports:
            report = SyncReport(hosts=[])
        elif options.rollback and failed:
            why = f"left as it is, because {next(iter(failed))} cannot be reached"
            report = SyncReport(hosts=[HostReport(host=name, error=why) for name in fleet])
        elif options.rollback:
            report = run_rollback(cargo.request, fleet, tell)
        else:
            report = run_cargo(cargo, fleet, tell, source=source)
    finally:
        fleet.close()
        if source is not None:
            source.close()
    missing = [HostReport(host=name, error=error.error) for name, error in failed.items()]
    report.hosts = sorted([*report.hosts, *missing], key=lambda one: request.hosts.index(one.host))
    return report


def _need_hosts(spec: RunSpec) -> str:
    if spec.hosts is None:
        raise UsageError(
            "--hosts HOSTFILE is missing, and no run file gives hosts",
            where="command line",
            fix="add --hosts HOSTFILE, or set LLMTRAIN_HOSTS",
        )
    return spec.hosts


def make_request(
    what: What, words: Sequence[str], options: SyncOptions, spec: RunSpec, cluster: Cluster
) -> SyncRequest:
    """What is asked for, with defaults filled in. Reads the environment, touches nothing.

    Raises:
        UsageError: no source, or words that do not go together.
    """
    source, dest, hosts = _read_words(words, cluster)
    source = source or choose_source(what, spec)[0]
    host, path = _split_host(source)
    path = os.path.abspath(os.path.expanduser(path)) if host is None else path  # noqa: PTH100, PTH111
    if not path.startswith("/"):
        raise UsageError("a source on a host must be an absolute path", where=source, fix=f"write {host}:/PATH")
    dest = dest or options.dest or _default_dest(path)
    return SyncRequest(
        path=path,
        dest=os.path.abspath(dest),  # noqa: PTH100
        hosts=hosts,
        source_host=host,
        what=what,
        exclude=(*options.exclude, *(LEAN if options.lean else ())),
        delete=options.delete,
        checksum=options.checksum,
        force=options.force,
        dry_run=options.dry_run,
        rate=None if options.rate is None else _read_rate(options.rate),
        streams=options.streams,
        keep=options.keep,
        transport=options.transport,
        network=spec.network,
        ports=parse_ports(spec.ports) if spec.ports else DEFAULT_PORTS,
    )


def _read_words(words: Sequence[str], cluster: Cluster) -> tuple[str | None, str | None, tuple[str, ...]]:
    names = cluster.names
    if len(words) <= 1:
        return (words[0] if words else None), None, names
    if len(words) == 2:
        return words[0], words[1], names
    if len(words) == 4:
        first, last = words[2], words[3]
        for name in (first, last):
            if name not in names:
                raise UsageError(f"{name} is not in the hostfile", where=cluster.origin, fix=f"one of {names[:8]}")
        span = names[names.index(first) : names.index(last) + 1]
        if not span:
            raise UsageError(f"{last} stands before {first}", where=cluster.origin, fix="swap the two")
        return words[0], words[1], span
    raise UsageError("too many words", where=" ".join(words), fix="SOURCE [DEST], or SOURCE DEST FIRST_HOST LAST_HOST")


def choose_source(what: What, spec: RunSpec) -> tuple[str, str]:
    """What a command without words copies, and why that. Reads the environment of this process.

    Raises:
        UsageError: nothing says what.
    """
    candidates = {
        "weights": [(spec.model.path, "model.path of the run file")],
        "environment": [
            (spec.environment, "environment of the run file"),
            (os.environ.get("VIRTUAL_ENV"), "the active environment, VIRTUAL_ENV"),
            (os.environ.get("CONDA_PREFIX"), "the active environment, CONDA_PREFIX"),
        ],
    }
    for path, reason in candidates.get(what, ()):
        if path:
            return path, reason
    wanted = {"weights": "model.path", "environment": "environment"}.get(what)
    hint = f"name it, or write {wanted} into llmtrain.yaml" if wanted else "name it"
    raise UsageError("no source is given", where="command line", fix=hint)


def _default_dest(path: str) -> str:
    return re.sub(r"\.(tar|tar\.gz|tgz|tar\.zst)$", "", path)


def _split_host(text: str) -> tuple[str | None, str]:
    host, colon, path = text.partition(":")
    return (host, path) if colon and "/" not in host else (None, text)


def _read_rate(text: str) -> float:
    try:
        return parse_rate(text)
    except ValueError as error:
        raise UsageError(str(error), where="--rate", fix="write for example 100M or 800mbit") from None


def node_dirs(spec: RunSpec, hosts: Sequence[str]) -> dict[str, str | None]:
    """Host -> its working folder as the run file says; "" for this machine. Pure."""
    own = {host: spec.per_host[host].node_dir for host in hosts if host in spec.per_host}
    return {"": spec.node_dir, **{host: own.get(host) or spec.node_dir for host in hosts}}


def open_hosts(names: Sequence[str]) -> tuple[Fleet, dict[str, LlmtrainError]]:
    """Connect to all hosts that answer."""
    results = run_on_all(names, _connect)
    return Fleet(results.good), results.failed


def _connect(name: str) -> Transport:
    if name == "localhost":
        return LocalTransport(name)
    from llmtrain.cluster.ssh import connect

    return connect(name)
