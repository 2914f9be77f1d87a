"""How a host can be reached: directly, through the sshd of the one before, else through the head."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from llmtrain.sync.request import SOURCE

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

STAR_AT_ONCE = 4
"""Copies that leave the head side by side where hosts cannot reach each other."""
LOOK_BACK = 8
"""Earlier hosts a host tries to reach; if it reaches none of these it is fed on its own."""


@dataclass(frozen=True, kw_only=True)
class Reach:
    """What one host can open a connection to."""

    tls: tuple[str, ...]
    """Hosts, or "source", whose port of the sync answers."""
    ssh: tuple[str, ...]
    """Hosts whose sshd answers."""


@dataclass(frozen=True, kw_only=True)
class Ways:
    """Who is fed how."""

    chain: tuple[str, ...]
    """Hosts in a row that reach each other, one way or the other."""
    direct: tuple[str, ...]
    """Hosts that reach only the source."""
    star: tuple[str, ...]
    """Hosts that reach nobody: the head's SSH connection carries the bytes."""
    hops: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Host of the chain -> hosts it reaches only through their sshd."""
    away: frozenset[str] = frozenset()
    """Hosts of the chain that the source reaches only through the head's SSH connection."""

    @property
    def hopping(self) -> bool:
        """Whether some bytes go through a sshd between hosts."""
        return any(self.hops.values())

    def without(self, lost: Container[str]) -> Ways:
        """The same, less the hosts that failed."""

        def left(hosts: Sequence[str]) -> tuple[str, ...]:
            return tuple(host for host in hosts if host not in lost)

        return replace(self, chain=left(self.chain), direct=left(self.direct), star=left(self.star))


def choose_ways(order: Sequence[str], reach: Mapping[str, Reach], wanted: str) -> Ways:
    """Put every host that reaches a host of the chain into the chain, the others where they can be fed. Pure.

    Args:
        order: hosts as given.
        reach: host -> what it can open a connection to.
        wanted: what ``--transport`` says; ``star`` sends everything through the head, ``ssh-hop`` nothing around
            SSH, ``tls`` nothing through it.
    """
    if wanted == "star":
        return Ways(chain=(), direct=(), star=tuple(order))
    tls = {host: set(found.tls) if wanted != "ssh-hop" else set() for host, found in reach.items()}
    ssh = {host: set(found.ssh) if wanted != "tls" else set() for host, found in reach.items()}
    chain: list[str] = []
    direct: list[str] = []
    star: list[str] = []
    for host in order:
        before = chain[-1] if chain else SOURCE
        if before in tls[host] | ssh[host] or (not chain and wanted != "tls"):
            chain.append(host)
        elif SOURCE in tls[host]:
            direct.append(host)
        else:
            star.append(host)
    return Ways(
        chain=tuple(chain),
        direct=tuple(direct),
        star=tuple(star),
        hops={host: tuple(one for one in chain[:at] if one not in tls[host]) for at, host in enumerate(chain)},
        away=frozenset(host for host in chain if SOURCE not in tls[host]),
    )


def render_ways(ways: Ways, ports: tuple[int, int], total: int) -> str:
    """What it costs that hosts cannot reach each other, and what would help; "" where it costs nothing."""
    apart = [*ways.direct, *ways.star]
    hopping = [host for host in ways.chain if ways.hops.get(host)]
    texts = []
    if apart:
        copies = len(apart) + bool(ways.chain)
        through = " through SSH" if ways.star else ""
        texts.append(
            f"{', '.join(apart[:8])} cannot reach the host before on ports {ports[0]}-{ports[1]}: {copies} copies "
            f"({copies * total / 1e9:.2f} GB) leave the source{through}, instead of one ({total / 1e9:.2f} GB); "
            "open the ports between the hosts"
        )
    if hopping:
        texts.append(
            f"{', '.join(hopping[:8])} {'receive' if len(hopping) > 1 else 'receives'} through the sshd of the host "
            f"before, since ports {ports[0]}-{ports[1]} are closed there: one copy leaves the source, "
            "each byte is encrypted twice"
        )
    return "; ".join(texts)
