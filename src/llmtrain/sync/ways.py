"""How a host can be reached by its predecessor: directly, else from the source, else through the head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmtrain.sync.request import SOURCE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WAYS = ("chain", "direct", "star")
STAR_AT_ONCE = 4
"""Copies that leave the head side by side where hosts cannot reach each other."""


@dataclass(frozen=True, kw_only=True)
class Ways:
    """Who is fed how."""

    chain: tuple[str, ...]
    """Hosts in a row that reach each other."""
    direct: tuple[str, ...]
    """Hosts that reach only the source."""
    star: tuple[str, ...]
    """Hosts that reach neither: the head's SSH connection carries the bytes."""


def choose_ways(order: Sequence[str], reach: Mapping[str, Sequence[str]], wanted: str) -> Ways:
    """Put every host that reaches a host of the chain into the chain, the others where they can be fed. Pure.

    Args:
        order: hosts as given.
        reach: host -> hosts (and "source") it can open a connection to.
        wanted: what ``--transport`` says; ``star`` sends everything through the head.
    """
    if wanted == "star":
        return Ways(chain=(), direct=(), star=tuple(order))
    chain: list[str] = []
    direct: list[str] = []
    star: list[str] = []
    for host in order:
        before = chain[-1] if chain else SOURCE
        if before in reach.get(host, ()):
            chain.append(host)
        elif SOURCE in reach.get(host, ()):
            direct.append(host)
        else:
            star.append(host)
    return Ways(chain=tuple(chain), direct=tuple(direct), star=tuple(star))


def render_ways(ways: Ways, ports: tuple[int, int], total: int) -> str:
    """What it costs that hosts cannot reach each other, and what would help."""
    copies = len(ways.direct) + len(ways.star) + bool(ways.chain)
    apart = ", ".join([*ways.direct, *ways.star][:8])
    through = " through SSH" if ways.star else ""
    return (
        f"{apart} cannot reach the host before on ports {ports[0]}-{ports[1]}: {copies} copies "
        f"({copies * total / 1e9:.2f} GB) leave the source{through}, instead of one ({total / 1e9:.2f} GB); "
        "open the ports between the hosts"
    )
