"""Collectives of one micro batch and of one optimizer step, by kind, with their bytes.

Held equal to what a real run's hooks count by ``tests/plan/test_real_zero.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from llmtrain.plan.gather import plan_gathers
from llmtrain.plan.partition import persistent, plan_flat_groups, slice_of

if TYPE_CHECKING:
    from llmtrain.plan.setup import Setup
    from llmtrain.plan.shape import ModelShape

Kind = Literal["all-gather", "reduce-scatter", "all-reduce"]


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One kind of collective in one part of a step."""

    kind: Kind
    """Operation."""
    what: str
    """What it carries."""
    size_bytes: int
    """Bytes of the whole tensors, over all calls: gathered, or to be reduced."""
    calls: int
    """How many calls; 0 where it was not counted."""
    per_step: bool
    """Once per optimizer step instead of once per micro batch."""
    repeats: int
    """How often in one optimizer step."""
    local: bool = False
    """Stays inside hosts (hpZ)."""

    @property
    def step_bytes(self) -> int:
        """Bytes of whole tensors in one optimizer step."""
        return self.size_bytes * self.repeats

    def ring_bytes(self, ranks: int) -> float:
        """Bytes that each rank sends in one optimizer step, with a ring."""
        return (2 if self.kind == "all-reduce" else 1) * self.step_bytes * (ranks - 1) / ranks


def plan_traffic(shape: ModelShape, setup: Setup) -> tuple[Collective, ...]:
    """Everything that ranks exchange in one optimizer step."""
    if setup.ranks == 1:
        return ()
    return _stage3(shape, setup) if setup.stage == 3 else _stage012(shape, setup)


def _stage012(shape: ModelShape, setup: Setup) -> tuple[Collective, ...]:
    reduced = setup.traffic_width * shape.total
    each = setup.stage == 2
    repeats = setup.accumulation if each else 1
    calls = _reduce_calls(shape, setup)
    found = [
        Collective(
            kind="all-reduce",
            what="gradients",
            size_bytes=reduced,
            calls=calls,
            per_step=not each,
            repeats=repeats,
        )
    ]
    if setup.stage:
        groups = plan_flat_groups(shape, setup)
        found.append(
            Collective(
                kind="all-gather",
                what="updated weights",
                size_bytes=setup.width * sum(group.total for group in groups),
                calls=len(groups),
                per_step=True,
                repeats=1,
            )
        )
    return tuple(found)


def _reduce_calls(shape: ModelShape, setup: Setup) -> int:
    """Stages 1 and 2 send a bucket in pieces: slices of one owner join, and a piece ends once it is over the limit."""
    items = list(reversed(shape.parameters))
    if not setup.stage:
        return len(plan_buckets([item.numel for item in items], setup.reduce_bucket))
    owners = _owners(shape, setup)
    calls = 0
    index = 0
    for size in plan_buckets([item.numel for item in items], setup.reduce_bucket):
        taken, slices = 0, list[tuple[int, int]]()
        while taken < size:
            slices += owners[items[index].name]
            taken += items[index].numel
            index += 1
        calls += _pieces(slices, setup.reduce_bucket)
    return calls


def _owners(shape: ModelShape, setup: Setup) -> dict[str, list[tuple[int, int]]]:
    """Tensor -> (owner, numbers) of its slices."""
    found: dict[str, list[tuple[int, int]]] = {}
    for group in plan_flat_groups(shape, setup):
        for item, start in zip(group.parameters, group.starts, strict=True):
            at, end, parts = start, start + item.numel, list[tuple[int, int]]()
            while at < end:
                owner = at // group.share
                stop = min(end, (owner + 1) * group.share)
                parts.append((owner, stop - at))
                at = stop
            found[item.name] = parts
    return found


def _pieces(slices: list[tuple[int, int]], limit: int) -> int:
    joined: list[tuple[int, int]] = []
    for owner, size in slices:
        if joined and joined[-1][0] == owner:
            joined[-1] = (owner, joined[-1][1] + size)
        else:
            joined.append((owner, size))
    pieces = held = 0
    for _, size in joined:
        held += size
        if held > limit:
            pieces, held = pieces + 1, 0
    return pieces + (held > 0)


def plan_buckets(sizes: list[int], limit: int) -> list[int]:
    """How gradients that become ready in this order fill buckets of ``limit`` numbers; a larger one goes alone."""
    buckets: list[int] = []
    held = 0
    for size in sizes:
        if held and held + size > limit:
            buckets.append(held)
            held = 0
        held += size
    return [*buckets, held] if held else buckets


def _stage3(shape: ModelShape, setup: Setup) -> tuple[Collective, ...]:
    gathers = plan_gathers(shape, setup)
    half = 0.5 if setup.quantized_weights else 1.0
    ranks = setup.ranks
    padded = sum(slice_of(item, ranks) * ranks for item in shape.parameters)
    kept = persistent(shape, setup)
    reduced = [slice_of(item, ranks) * ranks for item in reversed(shape.parameters)]
    buckets = plan_buckets(reduced, setup.reduce_bucket)
    forward, backward = int(gathers.forward * setup.width * half), int(gathers.backward * setup.width * half)
    hpz = setup.hpz > 1
    found = [
        Collective(
            kind="all-gather",
            what="weights, forward",
            size_bytes=forward,
            calls=gathers.calls,
            per_step=False,
            repeats=1 if hpz else setup.accumulation,
        ),
        Collective(
            kind="all-gather",
            what="weights, backward",
            size_bytes=backward,
            calls=0,
            per_step=False,
            repeats=setup.accumulation,
            local=hpz,
        ),
        Collective(
            kind="reduce-scatter",
            what="gradients",
            size_bytes=int(setup.traffic_width * padded * (0.25 if setup.quantized_gradients else 1)),
            calls=len(buckets),
            per_step=False,
            repeats=setup.accumulation,
        ),
        Collective(
            kind="all-gather",
            what="weights kept whole",
            size_bytes=setup.width * sum(slice_of(item, ranks) * ranks for item in kept),
            calls=len(kept),
            per_step=True,
            repeats=1,
        ),
    ]
    if hpz and setup.accumulation > 1:
        found.append(
            Collective(
                kind="all-gather",
                what="weights, later forwards",
                size_bytes=forward,
                calls=gathers.calls,
                per_step=False,
                repeats=setup.accumulation - 1,
                local=True,
            )
        )
    return tuple(item for item in found if item.size_bytes)
