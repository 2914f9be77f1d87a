"""Runs as people see them: the list, one run with its hosts and ranks, what dead runs have left."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from llmtrain.report.errors import clean

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from llmtrain.launch.jobs import RunStatus
    from llmtrain.launch.leftovers import Leftover, Leftovers

WATCH_S = 1.0
WIDE = 400
SILENT_S = 10.0
"""Silence of a host that is worth a word."""


def show_runs(runs: Sequence[RunStatus], *, hidden: int) -> None:
    """One line a run, the newest last."""
    console = _console()
    if not runs:
        console.print("no runs yet", markup=False)
        return
    table = _table("run", "status", "begun", "step", "loss", "left", "end", whole=True)
    for run in runs:
        outcome = run.outcome
        step = outcome.get("last_step", run.state.get("step"))
        loss = outcome.get("final_loss", run.state.get("loss"))
        begun = time.strftime("%m-%d %H:%M", time.localtime(run.begun))
        left = _duration(run.state.get("left_s")) if run.status == "running" else ""
        cells = (run.run_id, run.status, begun, _steps(step, run.state), _number(loss), left, outcome.get("reason", ""))
        table.add_row(*(Text(clean(str(cell)).splitlines()[0] if cell else "") for cell in cells))
    _keep_whole(table)
    if not console.is_terminal:  # nobody's screen is too narrow
        console.width = WIDE
    console.print(table, soft_wrap=False)
    if hidden:
        console.print(f"and {hidden} older ones: --all", markup=False)


def show_status(run: RunStatus) -> None:
    """One run."""
    _console().print(render_status(run))


def watch_status(read: Callable[[], RunStatus]) -> None:
    """The same, again and again until the run has ended or somebody presses Ctrl-C."""
    run = read()
    try:
        with Live(render_status(run), console=_console(), auto_refresh=False, transient=False) as live:
            while run.status == "running":
                time.sleep(WATCH_S)
                run = read()
                live.update(render_status(run), refresh=True)
    except KeyboardInterrupt:
        return


def render_status(run: RunStatus) -> Group:
    """What is known of a run, as a few lines and a table of its ranks."""
    state, outcome = run.state, run.outcome
    lines = [f"{run.run_id}: {run.status}", f"folder: {run.path}"]
    if run.status == "running" or not outcome:
        rate = state.get("tokens_per_s")
        parts = [
            f"{state.get('phase', 'starting')}",
            f"step {_steps(state.get('step'), state)}",
            f"loss {_number(state.get('loss'))}" if state.get("loss") is not None else "",
            f"{rate:,.0f} tokens/s" if rate else "",
            f"{state['step_s']:.3g} s a step" if state.get("step_s") else "",
            f"{_duration(state.get('left_s'))} left" if state.get("left_s") is not None else "",
        ]
        lines.append("  ".join(part for part in parts if part))
    if outcome:
        lines.append(f"end: {outcome.get('reason', '')} (exit code {outcome.get('exit_code')})")
        lines += [f"{key}: {outcome[key]}" for key in ("output", "saved") if outcome.get(key)]
    if run.status == "orphaned":
        lines.append("its supervisor is gone; hosts end such a run by themselves: llmtrain clean, llmtrain resume")
    texts = [Text(clean(line)) for line in lines]
    hosts = state.get("hosts") or []
    return Group(*texts, *([_ranks_table(hosts, live=run.status == "running")] if hosts else []))


def _ranks_table(hosts: Sequence[Mapping[str, Any]], *, live: bool) -> Table:
    table = _table("host", "memory free", "rank", "phase", "step", "memory")
    for host in hosts:
        memory = host.get("memory") or {}
        free = "" if memory.get("total") is None else f"{_size(memory['available'])} of {_size(memory['total'])}"
        if not host["alive"]:
            free = "lost"
        elif live and (host.get("silent_s") or 0) > SILENT_S:
            free = f"silent for {host['silent_s']:.0f} s"
        for number, rank in enumerate(host["ranks"]):
            name, room = (host["name"], free) if number == 0 else ("", "")
            phase = {True: "done", False: "failed", None: rank["phase"]}[rank["ok"]]
            cells = (name, room, str(rank["rank"]), phase, str(rank["step"]), _size(rank.get("rss")))
            table.add_row(*(Text(clean(cell)) for cell in cells))
    return table


def show_leftovers(found: Leftovers, *, quiet: bool) -> None:
    """What is there of dead runs."""
    console = _console(quiet=quiet)
    if not found.found and not found.failed:
        console.print("nothing is left of dead runs", markup=False)
    for one in found.found:
        parts = []
        if one.processes:
            parts.append(f"{len(one.processes)} processes ({', '.join(map(str, one.processes[:8]))})")
        if one.folder:
            kept = f", with checkpoints {', '.join(one.checkpoints)}" if one.checkpoints else ""
            parts.append(f"folder {one.folder}{kept}")
        console.print(clean(f"{one.host}: {one.run_id}: {'; '.join(parts)}"), markup=False)
    for name, error in found.failed.items():
        console.print(clean(f"{name}: {error.error}; fix: {error.fix}"), markup=False)


def ask_to_clean(found: Sequence[Leftover], *, folders: bool) -> bool:
    """Ask on a terminal; nobody there means no."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    count = sum(len(one.processes) for one in found)
    extra = f" and remove {sum(one.folder is not None for one in found)} folders" if folders else ""
    sys.stderr.write(f"end {count} processes{extra}? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in {"y", "yes"}


def _console(*, quiet: bool = False) -> Console:
    return Console(stderr=quiet, highlight=False, soft_wrap=True)


def _table(*columns: str, whole: bool = False) -> Table:
    """With ``whole``, one line a row: the last column gets what is left of the width."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        cut = whole and column == columns[-1]
        table.add_column(column, overflow="ellipsis" if cut else "fold", no_wrap=whole, min_width=0 if cut else None)
    return table


def _keep_whole(table: Table) -> None:
    """Only the last column may be cut: a run's name is there to be copied."""
    for column in table.columns[:-1]:
        column.min_width = max(len(str(cell)) for cell in (column.header, *column.cells))


def _steps(step: object, state: Mapping[str, Any]) -> str:
    steps = state.get("max_steps")
    return f"{step or 0}/{steps}" if steps else str(step or "")


def _number(value: Any) -> str:
    return "" if value is None else f"{value:.4f}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _size(count: float | None) -> str:
    if count is None:
        return ""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
