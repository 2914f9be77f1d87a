"""A sync as people see it: one bar, one line per host, a table at the end. Everything goes to stderr."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from llmtrain.report.errors import clean
from llmtrain.sync.request import SOURCE

if TYPE_CHECKING:
    from llmtrain.sync.request import HostReport, SyncReport

PLAIN_EVERY_S = 10.0
WORDS = {"added": "added", "changed": "changed", "touched": "touched", "removed": "only there (goes with --delete)"}
"""Kinds of differences, as people read them."""
MAX_LINES = 40
"""Hosts with a line of their own while bytes travel; more would not fit on a terminal."""


class SyncLive:
    """Shows what a sync tells."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.progress: Progress | None = None
        self.tasks: dict[str, TaskID] = {}
        self.wanted: dict[str, int] = {}
        self.received: dict[str, int] = {}
        self.begun = time.monotonic()
        self.last_line = self.begun

    def tell(self, what: str, values: dict[str, Any]) -> None:
        """Take one event of the sync."""
        handler = getattr(self, f"_on_{what}", None)
        if handler is not None:
            handler(values)

    def say(self, text: str) -> None:
        """One line above the bars."""
        (self.progress.console if self.progress else self.console).print(clean(text), markup=False)

    def close(self) -> None:
        """Take the bars away."""
        if self.progress:
            self.progress.stop()
            self.progress = None

    def _on_order(self, values: dict[str, Any]) -> None:
        hosts = values["hosts"]
        more = f" and {len(hosts) - 8} more" if len(hosts) > 8 else ""
        what = f"{values['path']} -> {values['dest']}"
        if values["rollback"]:
            what = f"{values['dest']} -> the tree before"
        self.say(f"{what} on {', '.join(hosts[:8])}{more} ({values['file']})")

    def _on_note(self, values: dict[str, Any]) -> None:
        self.say(values["text"])

    def _on_scanned(self, values: dict[str, Any]) -> None:
        self.say(f"source: {values['files']} entries, {size(values['bytes'])}")

    def _on_planned(self, values: dict[str, Any]) -> None:
        self.wanted = {name: count for name, count in values["hosts"].items() if count}
        self.begun = time.monotonic()
        if not self.wanted:
            self.say("no bytes to send")
            return
        disk = f"; {size(values['disk'])} of disk beside the old tree" if values["disk"] else ""
        if chained := len(self.wanted) - values["plain"]:
            self.say(f"to send: {size(values['bytes'])} once along a chain of {chained}{disk}")
        if self.console.is_terminal:
            self.progress = Progress(
                TextColumn("{task.description:>12}"),
                BarColumn(bar_width=24),
                TextColumn("{task.percentage:>3.0f}%  {task.fields[text]}"),
                console=self.console,
                transient=True,
            )
            self.tasks["*"] = self.progress.add_task("all hosts", total=sum(self.wanted.values()), text="")
            for name in list(self.wanted)[:MAX_LINES]:
                self.tasks[name] = self.progress.add_task(clean(name), total=self.wanted[name], text="waiting")
            self.progress.start()

    def _on_progress(self, values: dict[str, Any]) -> None:
        name = values["host"]
        self.received[name] = min(values["received"], self.wanted.get(name, 0))
        done, total = sum(self.received.values()), max(1, sum(self.wanted.values()))
        passed = max(0.001, time.monotonic() - self.begun)
        left = (total - done) * passed / max(1, done)
        slowest = max(self.received.values(), default=0) / passed
        text = f"{size(slowest)}/s, {left:.0f} s left"
        if self.progress:
            self.progress.update(self.tasks["*"], completed=done, text=text)
            if name in self.tasks:
                far = values["lag"] > 8 and values["peer"] != SOURCE  # the source has everything from the start
                lag = f"{values['lag']} chunks behind {values['peer']}" if far else f"<- {values['peer']}"
                self.progress.update(self.tasks[name], completed=self.received[name], text=clean(lag))
        elif time.monotonic() - self.last_line > PLAIN_EVERY_S:
            self.last_line = time.monotonic()
            self.say(f"{done / total:.0%} of {size(total)}, {text}")

    def _on_trouble(self, values: dict[str, Any]) -> None:
        what = "asking it again" if values["again"] else "going on with the next"
        self.say(f"{values['host']}: {values['peer']} gave no good answer ({values['problem']}); {what}")

    def _on_moved(self, values: dict[str, Any]) -> None:
        self.say(f"{values['host']} is slow and moves to the end of the chain")

    def _on_way(self, values: dict[str, Any]) -> None:
        self.say(values["text"])

    def _on_end(self, _values: dict[str, Any]) -> None:
        self.close()

    def _on_failed(self, values: dict[str, Any]) -> None:
        self.say(f"{values['host']}: failed: {values['error']}")


def show_sync(live: SyncLive, report: SyncReport, *, dry_run: bool = False, rollback: bool = False) -> None:
    """The end of a sync: a table, and what a loop of copies would have taken."""
    live.close()
    live.console.print(_plan_table(report) if dry_run and not rollback else _table(report, rollback=rollback))
    for warning in report.warnings:
        live.say(f"warning: {warning}")
    good, hosts = sum(host.ok for host in report.hosts), len(report.hosts)
    if dry_run:
        _show_changes(live, report)
    elif rollback:
        live.say(f"{good} of {hosts} hosts are back to the tree before; another --rollback undoes it")
    else:
        live.say(f"{good} of {hosts} hosts are equal to the source, proven by digest; {report.seconds:.1f} s")
        _show_serial(live, report)


def _table(report: SyncReport, *, rollback: bool) -> Table:
    numbers = () if rollback else ("sent", "reused", "seconds", "rate")
    table = _new_table("host", "state", numbers=numbers)
    for host in report.hosts:
        # A few bytes over the seconds of the whole transfer are no rate.
        slow = not host.ok or report.transfer_seconds <= 0 or host.bytes_sent < 1 << 20
        rate = "-" if slow else f"{size(host.bytes_sent / report.transfer_seconds)}/s"
        cells = (size(host.bytes_sent), size(host.bytes_reused), f"{host.seconds:.1f}", rate)
        table.add_row(clean(host.host), _state(host), *cells[: len(numbers)])
    return table


def _plan_table(report: SyncReport) -> Table:
    table = _new_table("host", "state", numbers=("would get", "disk needed"))
    for host in report.hosts:
        planned = report.planned.get(host.host)
        cells = ("-", "-") if planned is None else (size(planned["bytes"]), size(planned["disk_bytes"]))
        table.add_row(clean(host.host), _state(host), *cells)
    return table


def _new_table(*words: str, numbers: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in words:
        table.add_column(column, overflow="fold")
    for column in numbers:
        table.add_column(column, justify="right", overflow="fold")
    return table


def _state(host: HostReport) -> Text:
    return Text(clean((host.note or "equal") if host.ok else f"FAILED: {host.error}"))


def _show_serial(live: SyncLive, report: SyncReport) -> None:
    seconds = report.transfer_seconds
    most = max([report.head_bytes_sent, *(host.bytes_sent for host in report.hosts)], default=0)
    if seconds > 0.5 and most > 1 << 20:
        serial = sum(host.bytes_sent for host in report.hosts) * seconds / most
        sent = size(report.head_bytes_sent)
        live.say(f"{sent} left the source in {seconds:.1f} s; one copy after another: {serial:.0f} s")


def _show_changes(live: SyncLive, report: SyncReport) -> None:
    shown: dict[str, list[str]] = {}
    for host, changes in report.changes.items():
        text = "; ".join(
            f"{count} {WORDS[what]}: {', '.join(path or '.' for path in paths[:5])}{' ...' if count > 5 else ''}"
            for what, (count, paths) in changes.items()
            if count
        )
        shown.setdefault(text or "nothing", []).append(host)
    for text, hosts in shown.items():
        live.say(f"{', '.join(hosts)}: {text}")
    live.say("dry run: nothing was changed")


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"
