"""The commands ``plan`` and ``map``: what will happen, before it happens."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from llmtrain.plan.estimate import Estimate
    from llmtrain.plan.request import Request

RunFile = Annotated[str | None, typer.Argument(metavar="[RUN.yaml]", help="Run file; llmtrain.yaml here if it exists.")]
Hosts = Annotated[str | None, typer.Option("--hosts", metavar="HOSTFILE", help="One 'NAME slots=N' a line.")]
Cluster = Annotated[
    str | None, typer.Option("--cluster", metavar="HxSxACC", help="Hosts you do not have yet: 6x8xA100-80G.")
]
Config = Annotated[
    str | None, typer.Option("--config", metavar="NAME_OR_FILE", help="Preset, or DeepSpeed YAML or JSON file.")
]
Model = Annotated[str | None, typer.Option("--model", metavar="DIR_OR_JSON", help="Model directory or config.json.")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any key of the run file.")]
Assume = Annotated[
    list[str] | None, typer.Option("--assume", metavar="KEY=VALUE", help="host.ram=1TiB, link.inter=100Gbit, ...")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, all else on stderr.")]
Html = Annotated[str | None, typer.Option("--html", metavar="FILE", help="Write one self-contained page.")]


def plan(
    run_file: RunFile = None,
    model: Model = None,
    hosts: Hosts = None,
    cluster: Cluster = None,
    config: Config = None,
    sets: Sets = None,
    assume: Assume = None,
    compare: Annotated[bool, typer.Option("--compare", help="Estimate all configurations, best first.")] = False,
    trace: Annotated[bool, typer.Option("--trace", help="Trace activations of the real class (needs torch).")] = False,
    against: Annotated[
        str | None, typer.Option("--against", metavar="RUN", help="Put the step time a run had beside the estimate.")
    ] = None,
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Memory, speed and verdict of a run, before it starts."""
    from llmtrain.errors import UsageError
    from llmtrain.plan.choose import choose_setup, describe, smallest_changes
    from llmtrain.plan.estimate import estimate, estimate_json
    from llmtrain.report.estimates import cost_json, open_console, show_against, show_cost, show_estimate, show_ranking

    request = _request(run_file, model, hosts, cluster, config, sets, assume)
    console = open_console(aside=as_json)
    if compare or config == "auto":
        if against:
            raise UsageError("--against is about one configuration", fix="leave out --compare and --config auto")
        ranking = choose_setup(request.shape, request.setup, request.hardware)
        show_ranking(console, ranking)
        if as_json:
            rows = [{"configuration": describe(row.setup), **estimate_json(row)} for row in ranking.rows]
            _write({"reason": ranking.reason, "rows": rows})
        return
    found = estimate(request.shape, request.setup, request.hardware)
    beside = _against(against, found)
    changes = () if found.fit.verdict == "fits" else smallest_changes(found)
    show_estimate(console, found, changes, request.choices)
    steps = _max_steps(sets, run_file)
    show_cost(console, found, steps)
    if beside:
        show_against(console, beside)
    if trace:
        from llmtrain.launch.tracing import run_trace
        from llmtrain.report.estimates import show_trace

        show_trace(console, found, run_trace(found))
    if html:
        _write_html(html, request)
    if as_json:
        told = [{"setting": change.setting, "slowdown": change.slowdown} for change in changes]
        _write({**estimate_json(found), **cost_json(found, steps), **beside, "changes": told})


def show_map_command(
    run_file: RunFile = None,
    model: Model = None,
    hosts: Hosts = None,
    cluster: Cluster = None,
    config: Config = None,
    sets: Sets = None,
    assume: Assume = None,
    param: Annotated[str | None, typer.Option("--param", metavar="NAME", help="Only this tensor.")] = None,
    rank: Annotated[int | None, typer.Option("--rank", metavar="N", min=0, help="Only this rank.")] = None,
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Show which slice of which tensor lives on which rank. And what crosses which link."""
    from llmtrain.plan.shards import Placement, map_json
    from llmtrain.report.estimates import open_console
    from llmtrain.report.placement import show_map, show_rank, show_slice

    request = _request(run_file, model, hosts, cluster, config, sets, assume)
    placement = Placement(shape=request.shape, setup=request.setup, cluster=request.cluster)
    if rank is not None:
        placement.host_of(rank)
    console = open_console(aside=as_json)
    if param is not None:
        show_slice(console, placement, param, rank)
    elif rank is not None:
        show_rank(console, placement, rank)
    else:
        show_map(console, placement)
    if html:
        _write_html(html, request)
    if as_json:
        _write(map_json(placement))


def register(app: typer.Typer) -> None:
    """Add the two commands."""
    app.command(name="plan")(plan)
    app.command(name="map")(show_map_command)


def _request(
    run_file: str | None,
    model: str | None,
    hosts: str | None,
    cluster: str | None,
    config: str | None,
    sets: list[str] | None,
    assume: list[str] | None,
) -> Request:
    from llmtrain.plan.request import read_request
    from llmtrain.spec.runfile import read_run

    options: dict[str, tuple[str, Any]] = {
        "hosts": ("--hosts", hosts or os.environ.get("LLMTRAIN_HOSTS")),
        "config": ("--config", config),
        "model.path": ("--model", model),
    }
    spec = read_run(run_file, options=options, sets=sets or ())
    return read_request(spec, cluster=cluster, assumptions=assume or ())


def _against(name: str | None, found: Estimate) -> dict[str, Any]:
    """The measured step beside the estimated one; empty where no run was named."""
    if name is None:
        return {}
    from llmtrain.launch.against import read_measured

    run = read_measured(name, found.setup)
    return {
        "against": {
            "run": run.name,
            "steps": run.steps,
            "measured_seconds": run.seconds,
            "estimated_seconds": found.step.seconds,
            "error": found.step.seconds / run.seconds - 1,
        }
    }


def _max_steps(sets: list[str] | None, run_file: str | None) -> int | None:
    from llmtrain.spec.runfile import read_run

    return read_run(run_file, sets=sets or ()).training.max_steps


def _write_html(path: str, request: Request) -> None:
    from pathlib import Path

    from llmtrain.errors import UsageError
    from llmtrain.plan.estimate import estimate, estimate_json
    from llmtrain.plan.shards import Placement, map_json
    from llmtrain.report.page import render_page

    placement = Placement(shape=request.shape, setup=request.setup, cluster=request.cluster)
    found = estimate(request.shape, request.setup, request.hardware)
    try:
        Path(path).write_text(render_page(map_json(placement), estimate_json(found)), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"the page cannot be written: {error.strerror}", where=path, fix="name another file") from None
    print(f"wrote {path}", file=sys.stderr)


def _write(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document, indent=2) + "\n")
