"""How DeepSpeed 0.19 divides parameters and optimizer states over ranks, number by number.

Source: ``runtime/zero/partition_parameters.py`` and ``stage3.py`` (stage 3), ``stage_1_and_2.py`` (stages 1 and 2).
Held equal to real runs by ``tests/plan/test_real_zero.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmtrain.plan.setup import Setup
    from llmtrain.plan.shape import ModelShape, Parameter

START_ALIGNMENT = 2
"""Stages 1 and 2 pad each group to a multiple of this times the ranks (``nccl_start_alignment_factor``)."""


def ceil_div(value: int, parts: int) -> int:
    """``value / parts`` rounded up."""
    return -(-value // parts)


@dataclass(frozen=True, kw_only=True)
class FlatGroup:
    """One optimizer group in stages 1 and 2: all its parameters in one vector, cut in equal ranges."""

    parameters: tuple[Parameter, ...]
    """In order of the vector."""
    starts: tuple[int, ...]
    """Where each begins."""
    share: int
    """Numbers each rank owns."""
    ranks: int
    """Ranks."""

    @property
    def total(self) -> int:
        """Numbers in the vector, padding included."""
        return self.share * self.ranks

    @property
    def padding(self) -> int:
        """Numbers at the end that belong to no parameter."""
        return self.total - self.starts[-1] - self.parameters[-1].numel

    def owned_by(self, rank: int) -> tuple[tuple[Parameter, int, int], ...]:
        """Parameters that reach into a rank's range, each with the first and last+1 of its own numbers there."""
        low, high = rank * self.share, (rank + 1) * self.share
        found = []
        for item, start in zip(self.parameters, self.starts, strict=True):
            first, last = max(low, start), min(high, start + item.numel)
            if first < last:
                found.append((item, first - start, last - start))
        return tuple(found)

    def held_by(self, rank: int) -> int:
        """Numbers of the gradients a rank keeps: whole tensors, also those it owns only a part of, and padding."""
        return sum(item.numel for item, _, _ in self.owned_by(rank)) + self.padding_of(rank)

    def padding_of(self, rank: int) -> int:
        """Numbers of a rank's range that belong to no parameter."""
        return self.share - sum(last - first for _, first, last in self.owned_by(rank))


def plan_flat_groups(shape: ModelShape, setup: Setup) -> tuple[FlatGroup, ...]:
    """Stages 1 and 2."""
    found = []
    for group in shape.groups(split=setup.two_groups):
        ends = list(accumulate(item.numel for item in group))
        share = ceil_div(ends[-1], START_ALIGNMENT * setup.ranks) * START_ALIGNMENT
        starts = (0, *ends[:-1])
        found.append(FlatGroup(parameters=group, starts=starts, share=share, ranks=setup.ranks))
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class SubGroup:
    """Stage 3: parameters whose slices one rank steps together."""

    parameters: tuple[Parameter, ...]
    """In order."""
    numel: int
    """Numbers of one rank's slices."""
    on_host: bool
    """Its optimizer states are on the host (or NVMe), not on the accelerator."""


def slice_of(item: Parameter, ranks: int) -> int:
    """Numbers of a parameter that each rank holds, padding included (stage 3)."""
    return ceil_div(item.numel, ranks)


def plan_sub_groups(shape: ModelShape, setup: Setup) -> tuple[SubGroup, ...]:
    """Stage 3: a sub-group closes once it has reached the size, so it may end up above it."""
    parts: list[tuple[tuple[Parameter, ...], int]] = []
    for group in shape.groups(split=setup.two_groups):
        parts += _close_by_size(group, setup)
    first_on_host = int((1 - setup.optimizer_ratio) * len(parts)) if setup.optimizer != "none" else len(parts)
    return tuple(
        SubGroup(parameters=items, numel=numel, on_host=index >= first_on_host)
        for index, (items, numel) in enumerate(parts)
    )


def _close_by_size(group: tuple[Parameter, ...], setup: Setup) -> list[tuple[tuple[Parameter, ...], int]]:
    total = sum(slice_of(item, setup.ranks) for item in group)
    if setup.sub_group >= total:
        return [(group, total)]
    parts: list[tuple[tuple[Parameter, ...], int]] = []
    items: list[Parameter] = []
    numel = 0
    for item in group:
        items.append(item)
        numel += slice_of(item, setup.ranks)
        if numel >= setup.sub_group or item is group[-1]:
            parts.append((tuple(items), numel))
            items, numel = [], 0
    return parts


def persistent(shape: ModelShape, setup: Setup) -> tuple[Parameter, ...]:
    """Stage 3: parameters small enough to be kept whole on every rank besides their slices."""
    return tuple(item for item in shape.parameters if item.numel <= setup.persist) if setup.stage == 3 else ()


def share_of_rank(shape: ModelShape, setup: Setup) -> int:
    """Numbers of the model that one rank owns in its optimizer, padding included."""
    if setup.stage == 3:
        return sum(group.numel for group in plan_sub_groups(shape, setup))
    if setup.stage in (1, 2):
        return sum(group.share for group in plan_flat_groups(shape, setup))
    return shape.total
