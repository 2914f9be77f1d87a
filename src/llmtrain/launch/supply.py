"""What hosts lack and a launch brings. An environment, and whatever replaces something, is asked for first."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.cluster.fleet import Command, Fleet
from llmtrain.errors import PreflightError, SyncError
from llmtrain.launch.asking import DEFAULT_PORTS
from llmtrain.launch.stage import sync_in_turn
from llmtrain.spec.runspec import parse_ports, parse_rate
from llmtrain.sync.cargo import add_ops, prepare_cargo, run_cargo
from llmtrain.sync.distribute import run_sync
from llmtrain.sync.order import node_dirs
from llmtrain.sync.request import SyncRequest, refuse_failures

if TYPE_CHECKING:
    from llmtrain.launch.job import Job
    from llmtrain.launch.prepare import LaunchPlan
    from llmtrain.spec.runspec import RunSpec
    from llmtrain.sync.request import SyncReport

Agree = Callable[[str], bool]
"""Asked with one question; None instead of it where nobody can be asked."""
Tell = Callable[[str, dict[str, Any]], None]
CHANGED = ("added", "changed", "touched")
"""Kinds of differences that a copy would end; what only a host has stays."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """Something that would be brought."""

    text: str
    """What would happen, as a sentence without its end."""
    hosts: tuple[str, ...]
    """To whom."""
    command: str
    """What brings it without a launch."""


def settle(wish: Wish, agree: Agree | None) -> None:
    """Go on only if somebody agrees.

    Raises:
        PreflightError: nobody can be asked, or the answer was no.
    """
    if agree is not None and agree(f"{wish.text}?"):
        return
    why = "and there is no terminal to ask on" if agree is None else "and the answer was no"
    raise PreflightError(
        f"needed before the launch: {wish.text}, {why}",
        where=wish.hosts[0],
        fix=f"llmtrain launch --yes ...; or {wish.command}",
    )


def settle_replacements(plan: LaunchPlan, hostfile: str, agree: Agree | None) -> None:
    """Ask before anything on a host is replaced; the old one stays there for ``llmtrain sync --rollback``.

    Raises:
        PreflightError: nobody can be asked, or the answer was no.
    """
    for path in dict.fromkeys(path for _, path in plan.replaced):
        hosts = tuple(host for host, replaced in plan.replaced if replaced == path)
        text = f"replace {path}, which differs on {render_hosts(hosts)} (theirs is kept: llmtrain sync --rollback)"
        settle(Wish(text=text, hosts=hosts, command=_render_command("sync", path, hostfile)), agree)


def supply_environment(job: Job, fleet: Fleet, agree: Agree | None, tell: Tell, *, dry_run: bool) -> None:
    """Bring the environment of the run file to hosts that lack it, before they are asked anything in it.

    Raises:
        PreflightError: nobody agreed, or a dry run would need it.
        SyncError: it did not arrive everywhere.
        InputFileError: what is at that path here is no environment that can be copied.
    """
    spec, prefix = job.spec, job.spec.environment
    if prefix is None or spec.sync.environment == "never" or job.local or not Path(prefix, "bin/python").exists():
        return
    users = [name for name in job.cluster.names if job.python_on(name) == f"{prefix}/bin/python"]
    lacking = _lacking(fleet, users, prefix)
    request = environment_request(spec, tuple(users))
    differing = _differing(request, fleet, lacking, tell) if spec.sync.environment == "same" else ()
    hosts = tuple(name for name in users if name in {*lacking, *differing})
    if not hosts:
        return
    why = " and ".join(
        f"{what} {render_hosts(names)}"
        for what, names in (("missing on", lacking), ("different on", differing))
        if names
    )
    command = _render_command("sync-env", prefix, job.cluster.origin)
    if dry_run and lacking:
        raise PreflightError(
            f"the environment {prefix} is {why}, and without it nothing can be said about a run there",
            where=lacking[0],
            fix=f"{command}; a launch brings it too",
        )
    if dry_run:
        tell("sync", {"what": "note", "values": {"text": f"the environment {prefix} is {why}: a launch brings it"}})
        return
    text = f"bring the environment {prefix} ({read_bytes(prefix) / 2**30:.2f} GiB), {why}"
    settle(Wish(text=text, hosts=hosts, command=command), agree)
    _bring(spec, environment_request(spec, hosts), fleet, tell, command)


def _bring(spec: RunSpec, request: SyncRequest, fleet: Fleet, tell: Tell, command: str) -> None:
    def show(what: str, values: dict[str, Any]) -> None:
        tell("sync", {"what": what, "values": values})

    def wait(host: str) -> None:
        tell("copy_wait", {"host": host, "path": request.path})

    cargo = prepare_cargo(request, show)
    cargo = add_ops(cargo, fleet, show, prefix=request.path, node_dirs=node_dirs(spec, request.hosts))

    def sync(hosts: tuple[str, ...]) -> SyncReport:
        return run_cargo(replace(cargo, request=replace(cargo.request, hosts=hosts)), fleet, show)

    try:
        tell("synced", {"report": sync_in_turn(request.hosts, sync, wait)})
    except SyncError as error:
        raise SyncError(
            error.error, where=error.where, fix=f"{command}  # it has --force, and names every host"
        ) from None


def environment_request(spec: RunSpec, hosts: tuple[str, ...]) -> SyncRequest:
    """The environment to these hosts, over the run file's network and ports."""
    prefix = spec.environment or ""
    return SyncRequest(
        path=prefix,
        dest=prefix,
        hosts=hosts,
        what="environment",
        network=spec.network,
        ports=parse_ports(spec.ports) if spec.ports else DEFAULT_PORTS,
        rate=parse_rate(spec.sync.rate) if spec.sync.rate else None,
    )


def read_bytes(folder: str) -> int:
    """Bytes of all files of a folder of this machine."""
    return sum(
        os.lstat(os.path.join(here, name)).st_size  # noqa: PTH118  tens of thousands of files
        for here, _, names in os.walk(folder)
        for name in names
    )


def _lacking(fleet: Fleet, names: Sequence[str], prefix: str) -> tuple[str, ...]:
    """Hosts that answer and have nothing there; the others are named by the checks that follow."""
    command = Command(argv=("test", "-e", prefix))
    answers = Fleet({name: fleet[name] for name in names}).run(command).good
    return tuple(name for name in names if name in answers and answers[name].code == 1)


def _differing(request: SyncRequest, fleet: Fleet, lacking: Sequence[str], tell: Tell) -> tuple[str, ...]:
    """Hosts whose environment is not the one here, by content."""
    hosts = tuple(name for name in request.hosts if name not in lacking)
    if not hosts:
        return ()
    tell("sync", {"what": "note", "values": {"text": f"comparing {request.path} with {render_hosts(hosts)}"}})
    report = run_sync(replace(request, hosts=hosts, dry_run=True), fleet, lambda _what, _values: None)
    refuse_failures(report)
    changed = {host for host, changes in report.changes.items() if any(changes[key][0] for key in CHANGED)}
    return tuple(name for name in hosts if name in changed)


def _render_command(command: str, path: str, hostfile: str) -> str:
    return shlex.join(("llmtrain", command, path, "--hosts", hostfile))


def render_hosts(hosts: Sequence[str]) -> str:
    """Names of hosts, the first eight of them."""
    return ", ".join(hosts[:8]) + (f" and {len(hosts) - 8} more" if len(hosts) > 8 else "")
