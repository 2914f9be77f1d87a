"""Start a run and show it: shared by ``launch`` and ``resume``."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import typer

if TYPE_CHECKING:
    from llmtrain.launch.job import Selection
    from llmtrain.report.live import Live
    from llmtrain.spec.runspec import RunSpec
    from llmtrain.spec.script import Script


def start_and_follow(
    spec: RunSpec, selection: Selection, script: Script | None, *, yes: bool, detach: bool, as_json: bool
) -> NoReturn:
    """Read what is here, start a supervisor for the rest, and show what it tells until the run ends."""
    from llmtrain.launch.attach import follow
    from llmtrain.launch.run import carry_out, read_wanted
    from llmtrain.launch.supervise import supervise
    from llmtrain.report.live import Live, show_outcome

    wanted = read_wanted(spec, selection, script)
    live = Live()
    run = supervise(
        lambda tell, asked, agree: carry_out(wanted, tell, asked, agree),
        answers="yes" if yes else "ask" if live.can_ask else "none",
        notify=spec.notify,
    )
    try:
        outcome = follow(run, live.tell, live.ask, until=(lambda what: what == "run_dir") if detach else None)
    finally:
        live.close()
    if outcome is None:
        _say_detached(live, wanted.run_id, as_json=as_json)
    show_outcome(live, outcome)
    finish(outcome.to_json() if as_json else None, int(outcome.exit_code))


def _say_detached(live: Live, run_id: str, *, as_json: bool) -> NoReturn:
    from llmtrain.launch.jobs import read_logout_rule

    rule = read_logout_rule()
    if rule:
        live.say(f"warning: {rule}")
    if not as_json:
        typer.echo(run_id)
    finish({"ok": True, "exit_code": 0, "run_id": run_id} if as_json else None, 0)


def finish(document: dict[str, Any] | None, code: int) -> NoReturn:
    """Print the one JSON document, if asked for, and end."""
    if document is not None:
        sys.stdout.write(json.dumps(document, indent=2, default=str) + "\n")
    raise typer.Exit(code)
