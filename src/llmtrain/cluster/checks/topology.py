"""How the accelerators inside a host are linked, and hosts that differ in it. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from llmtrain.cluster.checks.majority import odd_ones
from llmtrain.cluster.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Mapping

Links = dict[tuple[str, str], str]
"""Pair of accelerators -> link, as of ``cluster.nvidia.parse_topology``."""


def describe_links(links: Links) -> str:
    """Kinds of links and how many pairs have each: ``NV4 4 pairs, SYS 24 pairs``."""
    pairs = {tuple(sorted(pair)): link for pair, link in links.items()}
    counts = Counter(pairs.values())
    if len(counts) == 1:
        return f"{next(iter(counts))} between all {len({name for pair in pairs for name in pair})}"
    order = sorted(counts, key=lambda link: (not link.startswith("NV"), link))
    return ", ".join(f"{link} {counts[link]} pair{'s' if counts[link] > 1 else ''}" for link in order)


def judge_topology(found: Mapping[str, Links]) -> list[Finding]:
    """A host whose accelerators are linked otherwise than on most hosts: a step waits for the slowest host.

    Args:
        found: host -> links inside it; hosts with fewer than two accelerators are not among them.
    """
    return [
        Finding(
            host=host,
            check="links",
            level="warn",
            saw=f"accelerators inside: {has}",
            wanted=f"{wanted}, as on most hosts",
            fix=f"ssh -- {host} nvidia-smi nvlink -s  # a link that is down? or --exclude {host}",
        )
        for host, has, wanted in odd_ones({host: describe_links(links) for host, links in found.items() if links})
    ]
