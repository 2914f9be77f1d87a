"""Links that are much slower than their siblings, or lose packets. Pure."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from llmtrain.cluster.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmtrain.cluster.pairs import PairResult

SLOW = 0.1
"""Share of its siblings' rate below which a link is slow."""
LOSSY = 0.015
"""Share of lost datagrams from which a link is flaky: three of two hundred."""


def judge_links(results: Sequence[PairResult]) -> list[Finding]:
    """A host whose every link is bad is one finding; else each bad pair is."""
    hosts = list(dict.fromkeys(name for one in results for name in (one.sender, one.receiver)))
    best = {host: max(one.mbits for one in results if host in {one.sender, one.receiver}) for host in hosts}
    least = {host: min(one.loss for one in results if host in {one.sender, one.receiver}) for host in hosts}
    usual = {host: median([best[other] for other in hosts if other != host]) for host in hosts}
    slow = [host for host in hosts if best[host] < SLOW * usual[host]]
    lossy = [host for host in hosts if least[host] >= LOSSY] if len(hosts) > 2 else []
    findings = [
        *(
            _finding(host, f"{best[host]:.1f} Mbit/s at best", f"{usual[host]:.0f} Mbit/s, as other hosts")
            for host in slow
        ),
        *(_finding(host, f"{least[host]:.1%} of packets lost", "no loss") for host in lossy),
    ]
    for one in results:
        if {one.sender, one.receiver} & {*slow, *lossy}:
            continue
        expected = min(best[one.sender], best[one.receiver])
        if one.mbits < SLOW * expected:
            saw = f"{one.mbits:.1f} Mbit/s to {one.receiver}"
            findings.append(_finding(one.sender, saw, f"{expected:.0f} Mbit/s, as between others"))
        elif one.loss >= LOSSY:
            findings.append(_finding(one.sender, f"{one.loss:.1%} of packets to {one.receiver} lost", "no loss"))
    return findings


def _finding(host: str, saw: str, wanted: str) -> Finding:
    return Finding(
        host=host,
        check="links",
        level="warn",
        saw=saw,
        wanted=wanted,
        fix=f"ssh -- {host} ethtool -S INTERFACE  # errors, cable, duplex, switch port; or --exclude {host}",
    )
