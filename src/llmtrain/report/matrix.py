"""Measured links as a matrix, on a terminal and as HTML."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from llmtrain.report.errors import clean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from llmtrain.cluster.pairs import PairResult

WIDE = 16
"""Hosts beyond which a matrix does not fit a terminal."""
PAGE = """<!doctype html>
<meta charset="utf-8">
<title>llmtrain: links</title>
<style>
body {{ font: 14px sans-serif; margin: 2em }}
td, th {{ padding: .3em .6em; text-align: right }}
</style>
<h1>Links between {count} hosts</h1>
<p>Mbit/s of payload from the row's host to the column's; hover for latency and loss.</p>
<table>
{rows}
</table>
"""


def show_matrix(console: Console, pairs: Sequence[PairResult], order: Sequence[str]) -> None:
    """Mbit/s from row to column; nothing where nothing was measured, worst pairs only where there are too many."""
    hosts = [host for host in order if host in _hosts(pairs)]
    if not hosts:
        return
    if len(hosts) > WIDE:
        for one in sorted(pairs, key=lambda one: one.mbits)[:10]:
            console.print(clean(f"{one.sender} -> {one.receiver}: {_words(one)}"), markup=False)
        return
    found = {(one.sender, one.receiver): one for one in pairs}
    table = Table(box=None, pad_edge=False)
    table.add_column("Mbit/s")
    for host in hosts:
        table.add_column(clean(host), justify="right")
    for sender in hosts:
        cells = [_cell(found.get((sender, receiver))) for receiver in hosts]
        table.add_row(Text(clean(sender)), *cells)
    console.print(table)


def render_html(pairs: Sequence[PairResult]) -> str:
    """A page of its own; green is fast, red is slow, on a scale of factors."""
    hosts = _hosts(pairs)
    found = {(one.sender, one.receiver): one for one in pairs}
    most = max((one.mbits for one in pairs), default=1.0)
    head = "".join(f"<th>{html.escape(host)}" for host in hosts)
    rows = [f"<tr><th>{head}"]
    for sender in hosts:
        cells = "".join(_html_cell(found.get((sender, receiver)), most) for receiver in hosts)
        rows.append(f"<tr><th>{html.escape(sender)}{cells}")
    return PAGE.format(count=len(hosts), rows="\n".join(rows))


def _hosts(pairs: Sequence[PairResult]) -> list[str]:
    return list(dict.fromkeys(name for one in pairs for name in (one.sender, one.receiver)))


def _cell(one: PairResult | None) -> Text:
    if one is None:
        return Text("-", style="dim")
    return Text(f"{one.mbits:.1f}" if one.mbits < 100 else f"{one.mbits:.0f}", style="red" if one.loss > 0.01 else "")


def _words(one: PairResult) -> str:
    latency = "no echo" if one.latency_ms is None else f"{one.latency_ms:.2f} ms"
    return f"{one.mbits:.1f} Mbit/s, {latency}, {one.loss:.1%} lost"


def _html_cell(one: PairResult | None, most: float) -> str:
    if one is None:
        return "<td>-"
    share = max(0.0, min(1.0, (one.mbits / most) ** 0.5 if most else 0.0))
    return f'<td style="background: hsl({share * 120:.0f} 70% 75%)" title="{_words(one)}">{one.mbits:.1f}'
