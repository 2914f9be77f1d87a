"""``llmtrain check`` and ``llmtrain who``: read the options, call one function, print, exit."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from llmtrain.launch.check import Subject

Text = str | None
Names = list[str] | None
RunFile = Annotated[Text, typer.Argument(metavar="[RUN.yaml]", help="Run file; llmtrain.yaml here if it exists.")]
Hosts = Annotated[Text, typer.Option("--hosts", metavar="HOSTFILE", help="One 'NAME slots=N' a line.")]
Config = Annotated[Text, typer.Option("--config", metavar="NAME_OR_FILE", help="Preset, or DeepSpeed file.")]
Model = Annotated[Text, typer.Option("--model", metavar="DIR", help="Compare this model on all hosts.")]
Data = Annotated[Text, typer.Option("--data", metavar="PATH", help="Compare this data on all hosts.")]
Include = Annotated[Text, typer.Option("--include", metavar="SPEC", help="Only these: 'a:0,1@b'.")]
Exclude = Annotated[Text, typer.Option("--exclude", metavar="SPEC", help="All but these.")]
NumHosts = Annotated[int | None, typer.Option("--num-hosts", metavar="N", help="The first N hosts.")]
MasterPort = Annotated[
    int | None, typer.Option("--master-port", metavar="P", min=1024, max=65535, help="Must be free on the first host.")
]
Sets = Annotated[Names, typer.Option("--set", metavar="KEY=VALUE", help="Any key of the run file.")]
Envs = Annotated[Names, typer.Option("--env", metavar="K=V", help="Variable of the ranks.")]
Only = Annotated[Names, typer.Option("--only", metavar="NAMES", help="Only these checks; several behind commas.")]
Skip = Annotated[Names, typer.Option("--skip", metavar="NAMES", help="All but these checks.")]
Deep = Annotated[bool, typer.Option("--deep", help="Read every byte of model and data instead of samples.")]
Links = Annotated[bool, typer.Option("--links", help="Measure every pair of hosts; takes seconds per host.")]
Html = Annotated[Text, typer.Option("--html", metavar="FILE", help="Write the measured links as a page, too.")]
Warm = Annotated[bool, typer.Option("--warm", help="Compile on all hosts now what ranks would compile.")]
Accept = Annotated[
    bool, typer.Option("--accept-new-host-keys", help="Make unknown host keys known; never changed ones.")
]
Fix = Annotated[bool, typer.Option("--fix", help="Offer to adopt unknown host keys and to compile; asks each time.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, all else on stderr.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(check)
    app.command()(who)


def check(
    run_file: RunFile = None,
    hosts: Hosts = None,
    config: Config = None,
    model: Model = None,
    data: Data = None,
    include: Include = None,
    exclude: Exclude = None,
    num_hosts: NumHosts = None,
    master_port: MasterPort = None,
    sets: Sets = None,
    envs: Envs = None,
    only: Only = None,
    skip: Skip = None,
    deep: Deep = False,
    links: Links = False,
    html: Html = None,
    warm: Warm = False,
    accept_new_host_keys: Accept = False,
    fix: Fix = False,
    as_json: AsJson = False,
) -> None:
    """Find what would stop a run, on every host, with its fix."""
    from llmtrain.cluster.findings import parse_names
    from llmtrain.launch.check import Scope, run_check
    from llmtrain.launch.job import Selection
    from llmtrain.launch.remedy import Remedies, remedy
    from llmtrain.report.check import Checking, check_json, write_page
    from llmtrain.report.sync import SyncLive

    names = parse_names(only or (), option="--only"), parse_names(skip or (), option="--skip")
    scope = Scope(only=names[0], skip=names[1], deep=deep, links=links or html is not None)
    selection = Selection(include=include, exclude=exclude, num_hosts=num_hosts, master_port=master_port)
    subject = _read(run_file, {"hosts": hosts, "config": config, "model": model, "data": data}, (sets, envs), selection)
    checking = Checking()
    report = run_check(subject, scope, checking.tell)
    allowed = Remedies(keys=accept_new_host_keys, ops=warm, ask=checking.confirm if fix else None)
    live = SyncLive()
    try:
        mended = remedy(subject, report, allowed, live.tell)
    finally:
        live.close()
    if mended:
        report = run_check(subject, scope, checking.tell)
    checking.show(report, quiet=as_json)
    if html is not None:
        write_page(html, report.pairs)
    _finish(check_json(report) if as_json else None, int(report.exit_code))


def who(hosts: Hosts = None, sets: Sets = None, as_json: AsJson = False) -> None:
    """Show who computes on the hosts. User, process, accelerator, run."""
    from llmtrain.launch.job import Selection
    from llmtrain.launch.who import find_users
    from llmtrain.report.check import show_uses, uses_json

    uses = find_users(_read(None, {"hosts": hosts}, (sets, None), Selection()))
    show_uses(uses, quiet=as_json)
    document = uses_json(uses)
    _finish(document if as_json else None, document["exit_code"])


def _read(run_file: Text, named: dict[str, Text], sets: tuple[Names, Names], selection: Any) -> Subject:
    from llmtrain.launch.check import read_subject
    from llmtrain.spec.runfile import read_run

    options = {
        "hosts": ("--hosts", named["hosts"] or os.environ.get("LLMTRAIN_HOSTS")),
        "config": ("--config", named.get("config")),
        "model.path": ("--model", named.get("model")),
        "data.path": ("--data", named.get("data")),
    }
    return read_subject(read_run(run_file, options=options, sets=sets[0] or (), envs=sets[1] or ()), selection)


def _finish(document: dict[str, Any] | None, code: int) -> None:
    if document is not None:
        sys.stdout.write(json.dumps(document, indent=2, default=str) + "\n")
    raise typer.Exit(code)
