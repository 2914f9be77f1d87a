"""Measure every link between hosts, with every host busy and no link shared."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.cluster import pairprobe
from llmtrain.cluster.fleet import Command, run_on_all
from llmtrain.cluster.peers import Listening
from llmtrain.errors import HostError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from llmtrain.cluster.fleet import Fleet
    from llmtrain.cluster.peers import Peer

MAX_ROUNDS = 30
"""With more hosts than this each is still measured against this many others."""
MEASURE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class PairResult:
    """One direction between two hosts."""

    sender: str
    """Who sent."""
    receiver: str
    """Who received, and measured."""
    mbits: float
    """Megabits per second of payload, seen by the receiver; 0 if nothing arrived."""
    latency_ms: float | None
    """Median round trip; None if no datagram came back."""
    loss: float
    """Share of datagrams that did not come back."""


def plan_rounds(names: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Pairs of each round, every host in at most one: the circle method of tournaments.

    Both directions of a pair are two rounds, since answers would share the link with what is measured.
    """
    circle: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    rounds = []
    for _ in range(min(len(circle) - 1, MAX_ROUNDS)):
        half = len(circle) // 2
        pairs = [(a, b) for a, b in zip(circle[:half], reversed(circle[half:]), strict=True) if a and b]
        rounds += [pairs, [(b, a) for a, b in pairs]]
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return [pairs for pairs in rounds if pairs]


def measure_pairs(fleet: Fleet, peers: Mapping[str, Peer], tell: Callable[[str], None]) -> list[PairResult]:
    """Measure all pairs, round by round.

    Raises:
        HostFailuresError: on some host the measurement could not be started.
    """
    source = Path(pairprobe.__file__).read_text(encoding="utf-8")
    rounds = plan_rounds(list(peers))
    results = []
    with Listening(fleet) as listening:

        def start(name: str) -> dict[str, Any]:
            return listening.start(name, peers[name], f"{source}\n\nserve({peers[name].address!r})\n")

        ports = run_on_all(list(peers), start).all_good()
        for number, pairs in enumerate(rounds, start=1):
            tell(f"links: round {number} of {len(rounds)}")
            receivers = dict(pairs)

            def measure(sender: str, receivers: Mapping[str, str] = receivers) -> PairResult:
                receiver = receivers[sender]
                request = {"address": peers[receiver].address, **ports[receiver]}
                script = f"{source}\n\nmeasure({request!r})\n"
                argv = (peers[sender].python, "-I", "-")
                done = fleet[sender].run(Command(argv=argv, stdin=script.encode(), timeout_s=MEASURE_S))
                return _result(sender, receiver, done.stdout)

            results += list(run_on_all(list(receivers), measure).good.values())
    return results


def _result(sender: str, receiver: str, answer: bytes) -> PairResult:
    try:
        values = json.loads(answer.decode().strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise HostError("the link could not be measured", where=sender, fix=f"ssh -- {sender} uptime") from None
    return PairResult(
        sender=sender,
        receiver=receiver,
        mbits=values["mbits"],
        latency_ms=values["latency_ms"],
        loss=values["loss"],
    )
