"""Findings as a table, alike ones of many hosts in one line, and as JSON."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from llmtrain.cluster.checks.software import parity
from llmtrain.cluster.checks.topology import describe_links
from llmtrain.errors import DiskError
from llmtrain.report.errors import clean
from llmtrain.report.hostset import fold_hosts
from llmtrain.report.matrix import render_html, show_matrix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmtrain.cluster.findings import Finding
    from llmtrain.cluster.pairs import PairResult
    from llmtrain.launch.check import CheckReport
    from llmtrain.launch.who import Use, Uses

STYLES = {"fail": "bold red", "unknown": "magenta", "warn": "yellow", "ok": "green"}


@dataclass(frozen=True, kw_only=True)
class Line:
    """One finding of one or many hosts."""

    hosts: tuple[str, ...]
    """Who has it."""
    finding: Finding
    """What it is; the host's name is written HOST where there are several."""


def merge_findings(findings: Sequence[Finding]) -> list[Line]:
    """Findings that differ in nothing but the host, as one; order stays."""
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for one in findings:
        texts = (_anonymous(text, one.host) for text in (one.saw, one.wanted, one.fix))
        groups.setdefault((one.check, one.level, *texts), []).append(one)
    lines = []
    for key, members in groups.items():
        first = members[0]
        if len(members) > 1:
            first = type(first)(
                host=first.host, check=first.check, level=first.level, saw=key[2], wanted=key[3], fix=key[4]
            )
        lines.append(Line(hosts=tuple(member.host for member in members), finding=first))
    return lines


def _anonymous(text: str, host: str) -> str:
    return re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-]|\.\w)", "HOST", text)


class Checking:
    """Shows a check: what happens on standard error, findings on standard output."""

    def __init__(self) -> None:
        self.begun = time.monotonic()
        self.out = Console(highlight=False, soft_wrap=True)
        self.err = Console(stderr=True, highlight=False, soft_wrap=True)

    def tell(self, what: str, values: dict[str, Any]) -> None:
        """Take one event."""
        if what == "contact":
            self.err.print(
                clean(f"looking at {len(values['hosts'])} hosts: {fold_hosts(values['hosts'])}"), markup=False
            )
        elif what == "stage":
            self.err.print(clean(values["text"]), markup=False)

    def confirm(self, question: str) -> bool:
        """Ask on the terminal; without one the answer is no."""
        if not sys.stdin.isatty():
            self.err.print(clean(f"not done, since nobody can be asked: {question}"), markup=False)
            return False
        self.err.print(clean(f"{question} [y/N] "), markup=False, end="")
        return sys.stdin.readline().strip().lower() in {"y", "yes"}

    def show(self, report: CheckReport, *, quiet: bool) -> None:
        """The findings, and the sum of them; on standard error if standard output is for JSON."""
        console = self.err if quiet else self.out
        lines = merge_findings(report.findings)
        if not quiet:
            _show_parity(console, parity(list(report.facts.values())), report.hosts)
            show_matrix(console, report.pairs, report.hosts)
            _show_topology(console, report)
            for one in report.sweep:
                text = (
                    f"{one['op']:<11}{one['bytes']:>9} bytes  algbw {one['algbw']:.3f}  busbw {one['busbw']:.3f} GB/s"
                )
                console.print(text, markup=False)
            for line in lines:
                _show_line(console, line)
        levels = [line.finding.level for line in lines]
        words = [f"{levels.count(level)} {level}" for level in ("fail", "unknown", "warn") if level in levels]
        verdict = ", ".join(words) if words else "nothing to complain about"
        who = f"{len(report.hosts)} host{'s' if len(report.hosts) > 1 else ''} ({clean(fold_hosts(report.hosts))})"
        console.print(f"{who}: {verdict}, in {time.monotonic() - self.begun:.1f} s", markup=False)


def _show_topology(console: Console, report: CheckReport) -> None:
    """Hosts whose accelerators are linked alike share a line."""
    groups: dict[str, list[str]] = {}
    for host, links in report.topology.items():
        if links:
            groups.setdefault(describe_links(links), []).append(host)
    for text, hosts in groups.items():
        console.print(clean(f"accelerators inside {fold_hosts(hosts)}: {text}"), markup=False)


def _show_line(console: Console, line: Line) -> None:
    """Lines are not broken: a fix is there to be copied."""
    one = line.finding
    level = Text(f"{one.level:<8}", style=STYLES[one.level])
    console.print(Text.assemble(level, (clean(fold_hosts(line.hosts)), "bold"), "  ", (one.check, "cyan")))
    for label, text in (("saw", one.saw), ("wanted", one.wanted), ("fix", one.fix)):
        console.print(Text(f"        {label + ':':<8}{clean(text)}"))


def show_uses(uses: Uses, *, quiet: bool) -> None:
    """Who computes where, and which hosts did not answer."""
    console = Console(highlight=False, soft_wrap=True)
    if not quiet:
        table = Table(box=None, pad_edge=False)
        for column in ("host", "user", "pid", "accelerator", "run", "rank", "age", "command"):
            table.add_column(column)
        for one in uses.uses:
            table.add_row(*(Text(clean(cell)) for cell in _use_cells(one)))
        console.print(table if uses.uses else "nobody computes on these hosts")
    for host, error in uses.failed.items():
        print(clean(f"warning: {host}: {error.error}"), file=sys.stderr)


def _use_cells(one: Use) -> tuple[str, ...]:
    gpus = ",".join(map(str, one.accelerators)) or "-"
    age = "-" if one.seconds is None else f"{one.seconds // 3600}:{one.seconds // 60 % 60:02}:{one.seconds % 60:02}"
    rank = "-" if one.rank is None else str(one.rank)
    return one.host, one.user or "?", str(one.pid), gpus, one.run or "-", rank, age, one.command[:60]


def uses_json(uses: Uses) -> dict[str, Any]:
    """The twin of :func:`show_uses`."""
    failed = {host: error.error for host, error in uses.failed.items()}
    return {
        "ok": not failed,
        "exit_code": 6 if failed else 0,
        "uses": [asdict(one) for one in uses.uses],
        "failed": failed,
    }


def check_json(report: CheckReport) -> dict[str, Any]:
    """The twin of :func:`show_check`; findings are one per host."""
    network = report.network
    return {
        "ok": report.exit_code == 0,
        "exit_code": int(report.exit_code),
        "hosts": list(report.hosts),
        "findings": [asdict(finding) for finding in report.findings],
        "network": {name: asdict(link) for name, link in network.links.items()} if network else None,
        "software": {
            name: {"python": item.python, "glibc": item.glibc, "kernel": item.details.kernel, **item.packages}
            for name, item in report.facts.items()
        },
        "topology": {
            host: {" ".join(pair): link for pair, link in links.items()} for host, links in report.topology.items()
        },
        "links": [asdict(one) for one in report.pairs],
        "collectives": [dict(one) for one in report.sweep],
    }


def _show_parity(console: Console, rows: dict[str, dict[str, str]], hosts: Sequence[str]) -> None:
    """Versions that differ, one line each; what agrees everywhere in one line together."""
    alike = [f"{name} {next(iter(set(row.values())))}" for name, row in rows.items() if len(set(row.values())) == 1]
    if alike:
        known = [word for word in alike if not word.endswith(" -")]
        console.print(clean(f"same everywhere: {', '.join(known)}"), markup=False)
    for name, row in rows.items():
        if len(set(row.values())) > 1:
            groups = {value: [host for host in hosts if row.get(host) == value] for value in row.values()}
            text = "; ".join(f"{value} on {fold_hosts(members)}" for value, members in groups.items())
            console.print(clean(f"{name}: {text}"), markup=False)


def write_page(path: str, pairs: Sequence[PairResult]) -> None:
    """Write the measured links as HTML.

    Raises:
        DiskError: the file cannot be written.
    """
    try:
        Path(path).write_text(render_html(pairs), encoding="utf-8")
    except OSError as error:
        raise DiskError(f"cannot be written: {error.strerror}", where=path, fix="--html another file") from None
