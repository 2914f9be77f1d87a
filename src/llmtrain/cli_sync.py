"""The commands ``sync``, ``sync-weights`` and ``sync-env``: read the input, call one function, print, exit."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

if TYPE_CHECKING:
    from llmtrain.sync.order import SyncOptions, What

Words = Annotated[
    list[str] | None, typer.Argument(metavar="[SOURCE]", help="PATH or HOST:PATH; or SOURCE DEST FIRST_HOST LAST_HOST.")
]
Hosts = Annotated[str | None, typer.Option("--hosts", metavar="HOSTFILE", help="One 'NAME slots=N' a line.")]
Dest = Annotated[str | None, typer.Option("--dest", metavar="PATH", help="Where it goes; the same path as here.")]
Exclude = Annotated[list[str] | None, typer.Option("--exclude", metavar="PATTERN", help="Names that do not travel.")]
Delete = Annotated[bool, typer.Option("--delete", help="Remove what only the destination has.")]
Rate = Annotated[str | None, typer.Option("--rate", metavar="LIMIT", help="At most this, such as 100M or 800mbit.")]
Way = Annotated[
    Literal["auto", "tls", "ssh-hop", "star"], typer.Option("--transport", help="How bytes travel between hosts.")
]
Streams = Annotated[
    int | None, typer.Option("--streams", metavar="K", min=1, max=16, help="Connections a host pulls over.")
]
Checksum = Annotated[bool, typer.Option("--checksum", help="Read all files again; trust no size and time.")]
Keep = Annotated[int, typer.Option("--keep", metavar="N", min=0, help="Old trees kept for --rollback.")]
Rollback = Annotated[bool, typer.Option("--rollback", help="Bring the last old tree back, on all hosts.")]
Force = Annotated[bool, typer.Option("--force", help="Swap what is in use; --delete in trees of others.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would travel, and stop.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, all else on stderr.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("sync")(sync)
    app.command("sync-weights")(sync_weights)
    app.command("sync-env")(sync_env)


def sync(
    words: Words = None,
    hosts: Hosts = None,
    dest: Dest = None,
    exclude: Exclude = None,
    delete: Delete = False,
    rate: Rate = None,
    transport: Way = "auto",
    streams: Streams = None,
    checksum: Checksum = False,
    keep: Keep = 1,
    rollback: Rollback = False,
    force: Force = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Bring a file or folder to all hosts in the time of one."""
    from llmtrain.sync.order import SyncOptions

    options = SyncOptions(
        dest=dest,
        exclude=tuple(exclude or ()),
        delete=delete,
        rate=rate,
        transport=transport,
        streams=streams,
        checksum=checksum,
        keep=keep,
        rollback=rollback,
        force=force,
        dry_run=dry_run,
    )
    _run("files", words, hosts, options, as_json=as_json)


def sync_weights(
    words: Words = None,
    hosts: Hosts = None,
    dest: Dest = None,
    exclude: Exclude = None,
    profile: Annotated[
        Literal["all", "lean"], typer.Option("--profile", help="lean leaves out pickles, .git, optimizer files.")
    ] = "all",
    delete: Delete = False,
    rate: Rate = None,
    transport: Way = "auto",
    streams: Streams = None,
    checksum: Checksum = False,
    keep: Keep = 1,
    rollback: Rollback = False,
    force: Force = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Bring a model to all hosts, checked before and after."""
    from llmtrain.sync.order import SyncOptions

    options = SyncOptions(
        dest=dest,
        exclude=tuple(exclude or ()),
        delete=delete,
        rate=rate,
        transport=transport,
        streams=streams,
        checksum=checksum,
        keep=keep,
        rollback=rollback,
        force=force,
        dry_run=dry_run,
        lean=profile == "lean",
    )
    _run("weights", words, hosts, options, as_json=as_json)


def sync_env(
    words: Words = None,
    hosts: Hosts = None,
    dest: Dest = None,
    exclude: Exclude = None,
    relocate: Annotated[bool, typer.Option("--relocate", help="Rewrite it for another path given by --dest.")] = False,
    ops: Annotated[bool, typer.Option("--ops", help="Compiled DeepSpeed operations of this machine go along.")] = False,
    delete: Delete = False,
    rate: Rate = None,
    transport: Way = "auto",
    streams: Streams = None,
    checksum: Checksum = False,
    keep: Keep = 1,
    rollback: Rollback = False,
    force: Force = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Bring a conda, venv or uv environment, and prove it works. To all hosts, at the same path or another."""
    from llmtrain.sync.order import SyncOptions

    options = SyncOptions(
        dest=dest,
        exclude=tuple(exclude or ()),
        delete=delete,
        rate=rate,
        transport=transport,
        streams=streams,
        checksum=checksum,
        keep=keep,
        rollback=rollback,
        force=force,
        dry_run=dry_run,
        relocate=relocate,
        ops=ops,
    )
    _run("environment", words, hosts, options, as_json=as_json)


def _run(what: What, words: list[str] | None, hosts: str | None, options: SyncOptions, *, as_json: bool) -> NoReturn:
    from llmtrain.report.sync import SyncLive, show_sync
    from llmtrain.spec.runfile import read_run
    from llmtrain.sync.order import order_sync

    given: dict[str, tuple[str, Any]] = {"hosts": ("--hosts", hosts or os.environ.get("LLMTRAIN_HOSTS"))}
    spec = read_run(None, options=given, sets=(), envs=())
    live = SyncLive()
    try:
        report = order_sync(what, words or (), options, spec, live.tell)
    finally:
        live.close()
    show_sync(live, report, dry_run=options.dry_run, rollback=options.rollback)
    document = report.to_json()
    if as_json:
        sys.stdout.write(json.dumps(document, indent=2, default=str) + "\n")
    raise typer.Exit(document["exit_code"])
