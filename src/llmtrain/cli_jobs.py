"""``jobs``, ``status``, ``logs``, ``attach``, ``stop``, ``resume`` and ``clean``."""

from __future__ import annotations

import json
import re
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from llmtrain.cli_follow import finish, start_and_follow
from llmtrain.errors import ExitCode, LauncherError, UsageError

if TYPE_CHECKING:
    from llmtrain.launch.rundir import RunDir

RUN = typer.Argument(metavar="RUN", help="Id, the beginning of one, a run folder, or 'last'.")
Run = Annotated[str, RUN]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, all else on stderr.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for function in (jobs, status, logs, attach, stop, resume, clean):
        app.command()(function)


def jobs(
    everything: Annotated[bool, typer.Option("--all", "-a", help="Also those that ended long ago.")] = False,
    as_json: AsJson = False,
) -> None:
    """List your runs: what runs, and how the last ones ended."""
    from llmtrain.launch.jobs import read_runs
    from llmtrain.report.jobs import show_runs

    runs = read_runs()
    shown = runs if everything else runs[-20:]
    if as_json:
        finish({"runs": [run.to_json() for run in shown]}, 0)
    show_runs(shown, hidden=len(runs) - len(shown))


def status(
    run: Run = "last",
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Stay, and show it anew every second.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show a run: hosts, ranks, step, loss, speed, memory."""
    from llmtrain.launch.jobs import find_run, read_status
    from llmtrain.report.jobs import show_status, watch_status

    run_dir = find_run(run)
    if as_json:
        finish(read_status(run_dir).to_json(), 0)
    if watch:
        watch_status(lambda: read_status(run_dir))
    else:
        show_status(read_status(run_dir))


def logs(
    run: Run = "last",
    host: Annotated[str | None, typer.Option("--host", metavar="H", help="Only of this host.")] = None,
    rank: Annotated[int | None, typer.Option("--rank", metavar="N", min=0, help="Only of this rank.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    grep: Annotated[str | None, typer.Option("--grep", metavar="RE", help="Only lines that hold this.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print what the ranks of a run print."""
    from llmtrain.launch.jobs import find_run
    from llmtrain.launch.tail import LogChoice, read_logs
    from llmtrain.report.errors import clean as clean_text

    try:
        pattern = re.compile(grep) if grep else None
    except re.error as error:
        raise UsageError(f"not a pattern: {error}", where="--grep", fix="write a regular expression") from None
    choice = LogChoice(host=host, rank=rank, pattern=pattern)
    try:
        for name, line in read_logs(find_run(run), choice, follow=follow):
            text = json.dumps({"log": name, "line": line}) if as_json else clean_text(f"{name} | {line}")
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
    except KeyboardInterrupt:
        raise typer.Exit(int(ExitCode.INTERRUPTED)) from None


def attach(run: Run = "last", as_json: AsJson = False) -> None:
    """Follow a run as its launch does. Ctrl-C asks it to save and stop, twice stops it now."""
    from llmtrain.launch.jobs import find_run

    _attach(find_run(run), as_json=as_json)


def _attach(run_dir: RunDir, *, as_json: bool) -> None:
    from llmtrain.launch.attach import asking
    from llmtrain.launch.tail import attach as follow
    from llmtrain.report.live import Live, show_outcome

    live = Live()
    try:
        with asking(run_dir):
            outcome = follow(run_dir, live.tell)
    finally:
        live.close()
    if outcome is None:
        raise LauncherError(
            "the run's supervisor is gone: its hosts end the run by themselves",
            where=run_dir.path.name,
            fix="llmtrain clean shows what is left; llmtrain resume goes on from the last checkpoint",
        )
    show_outcome(live, outcome)
    finish(outcome.to_json() if as_json else None, int(outcome.exit_code))


def stop(
    run: Run,
    now: Annotated[bool, typer.Option("--now", help="Without saving.")] = False,
    as_json: AsJson = False,
) -> None:
    """Ask a run to save and stop, and wait until it has."""
    from llmtrain.launch.jobs import find_run, request_stop, wait_end

    run_dir = find_run(run)
    request_stop(run_dir, now=now)
    typer.echo(f"{run_dir.path.name}: {'stopping' if now else 'saving and stopping'}", err=True)
    outcome = wait_end(run_dir)
    reason = outcome.get("reason", "its supervisor went without a word")
    typer.echo(f"{run_dir.path.name}: {reason}", err=True)
    left = outcome.get("exit_code") == ExitCode.LEFTOVER or not outcome
    code = int(ExitCode.LEFTOVER) if left else 0
    finish({"ok": code == 0, "exit_code": code, "outcome": outcome} if as_json else None, code)


def resume(
    run: Run = "last",
    hosts: Annotated[str | None, typer.Option("--hosts", metavar="HOSTFILE", help="Other hosts.")] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key.")] = None,
    envs: Annotated[list[str] | None, typer.Option("--env", metavar="K=V", help="Variable of the ranks.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Bring what hosts lack without asking.")] = False,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Print the new run's id and return.")] = False,
    as_json: AsJson = False,
) -> None:
    """Go on from the last checkpoint of a run that ended."""
    from llmtrain.launch.again import plan_resume, read_order
    from llmtrain.launch.jobs import find_run
    from llmtrain.report.live import Live
    from llmtrain.spec.runfile import parse_variables

    run_dir = find_run(run)
    asked = read_order(run_dir, envs=parse_variables(envs or ()), sets=sets or ())
    order = plan_resume(run_dir, asked, hosts, Live().tell)
    typer.echo(f"resuming from {order.spec.training.resume}", err=True)
    start_and_follow(order.spec, order.selection, None, yes=yes, detach=detach, as_json=as_json)


def clean(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="Only this run, also if it ended well.")] = None,
    folders: Annotated[bool, typer.Option("--folders", help="Run folders on hosts too, with checkpoints.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Find what dead runs left on hosts; end it if you agree."""
    from llmtrain.launch.jobs import find_run, read_runs, read_status
    from llmtrain.launch.leftovers import choose_dead, end_leftovers, find_leftovers
    from llmtrain.report.jobs import ask_to_clean, show_leftovers

    runs = [read_status(find_run(run))] if run else choose_dead(read_runs())
    if any(one.status == "running" for one in runs):
        raise UsageError("the run is running", where=run, fix=f"llmtrain stop {run}")
    found = find_leftovers(runs)
    begun = time.monotonic()
    show_leftovers(found, quiet=as_json)
    removable = [one for one in found.found if one.processes or folders]
    if removable and (yes or ask_to_clean(removable, folders=folders)):
        found = end_leftovers(
            [one for one in runs if one.run_id in {item.run_id for item in removable}], folders=folders
        )
        typer.echo(f"done in {time.monotonic() - begun:.1f} s", err=True)
    left = any(one.processes for one in found.found)
    code = int(ExitCode.LEFTOVER) if left else int(ExitCode.HOST) if found.failed else 0
    finish({**found.to_json(), "exit_code": code} if as_json else None, code)
