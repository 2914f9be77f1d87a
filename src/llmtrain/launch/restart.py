"""Whether a failed run is started again, when, and on which hosts. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmtrain.spec.hostfile import Host

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmtrain.launch.verdict import Outcome
    from llmtrain.spec.hostfile import Cluster

CURABLE = {"killed", "host-lost", "host-frozen", "launcher", "stall", "xid", "start"}
"""Causes that may be gone the next time."""
LONGEST_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Again:
    """A decision."""

    ok: bool
    """Whether to start again."""
    reason: str
    """Why, or why not."""


def judge_again(outcome: Outcome, *, used: int, allowed: int, begun_at: int, fruitless: int) -> Again:
    """Whether starting again may help.

    Args:
        outcome: how the attempt ended.
        used: restarts so far.
        allowed: restarts the user allows.
        begun_at: step the attempt began after.
        fruitless: attempts in a row before this one that did no step.
    """
    failure = outcome.first_failure
    if outcome.ok or failure is None:
        return Again(ok=False, reason="it did not fail")
    if used >= allowed:
        return Again(ok=False, reason=f"{allowed} restarts are used up" if allowed else "--max-restarts is 0")
    got_on = outcome.last_step > begun_at
    if not got_on and fruitless >= 1:
        return Again(ok=False, reason="two attempts in a row did no step")
    if failure.cause in CURABLE:
        return Again(ok=True, reason=f"{failure.cause} may not come again")
    if failure.cause == "crash" and outcome.last_step > begun_at + 1:
        return Again(ok=True, reason=f"it crashed after {outcome.last_step - begun_at} good steps")
    return Again(ok=False, reason=f"starting again does not cure this: {failure.cause}")


def choose_pause(used: int, first_s: float) -> float:
    """Seconds before the next attempt: twice as long each time."""
    return float(min(LONGEST_S, first_s * 2**used))


def choose_hosts(cluster: Cluster, lost: Sequence[str], spares: Sequence[str]) -> tuple[Cluster, dict[str, str]]:
    """The cluster with spares in the places of lost hosts, as far as there are any; and who replaces whom."""
    free = [name for name in spares if name not in cluster.names]
    swapped = dict(zip([name for name in cluster.names if name in lost], free, strict=False))
    hosts = tuple(
        Host(name=swapped[host.name], slots=host.slots) if host.name in swapped else host for host in cluster.hosts
    )
    return replace(cluster, hosts=hosts), swapped
