"""Which configuration to take: all of a small grid are estimated, the fastest that fits wins, reasons are kept."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmtrain.plan.estimate import Estimate, estimate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llmtrain.plan.catalogue import Hardware
    from llmtrain.plan.setup import Device, Setup
    from llmtrain.plan.shape import ModelShape

OFFLOADS: tuple[tuple[int, Device, Device], ...] = (
    (1, "none", "none"),
    (2, "none", "none"),
    (2, "cpu", "none"),
    (3, "none", "none"),
    (3, "cpu", "none"),
    (3, "cpu", "cpu"),
    (3, "nvme", "nvme"),
)
"""Stage, optimizer and weights of each row of the grid, roughly from fast to frugal."""


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """All configurations of a grid."""

    rows: tuple[Estimate, ...]
    """What fits first, then tight, then what does not; each by speed."""
    reason: str
    """Why the first is first."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change that makes a run fit."""

    setting: str
    """As for ``--set``, or in words where a setting is not enough."""
    estimate: Estimate
    """The run after it."""
    slowdown: float
    """Tokens per second before over after; below 1 it is faster."""


def describe(setup: Setup) -> str:
    """A configuration in a few words."""
    parts = [f"stage {setup.stage}"]
    if setup.optimizer != "none":
        parts.append(f"optimizer on {setup.optimizer}")
    if setup.params != "none":
        parts.append(f"weights on {setup.params}")
    if setup.hpz > 1:
        parts.append(f"hpZ {setup.hpz}")
    parts.append(f"micro {setup.micro} x {setup.accumulation}")
    parts.append("checkpointing" if setup.checkpointing else "no checkpointing")
    return ", ".join(parts)


def choose_setup(shape: ModelShape, setup: Setup, hardware: Hardware) -> Ranking:
    """Search stage, offload, micro batch, accumulation, checkpointing and hpZ at the run's global batch."""
    rows = [estimate(shape, other, hardware) for other in _grid(setup)]
    order = {"fits": 0, "tight": 1, "no": 2}
    rows.sort(key=lambda row: (order[row.fit.verdict], -round(row.step.tokens_per_s_per_gpu, 3), describe(row.setup)))
    return Ranking(rows=tuple(rows), reason=_reason(rows))


def _reason(rows: list[Estimate]) -> str:
    first = rows[0]
    if first.fit.verdict != "fits":
        return f"nothing fits with room to spare; the nearest: {first.fit.reason}"
    second = next((row for row in rows[1:] if row.fit.verdict == "fits"), None)
    if second is None:
        return "nothing else fits"
    gain = first.step.tokens_per_s_per_gpu / second.step.tokens_per_s_per_gpu - 1
    return f"{100 * gain:.0f}% faster than the next ({describe(second.setup)}); bound by {first.step.bound_by}"


def _grid(setup: Setup) -> Iterator[Setup]:
    per_rank = setup.micro * setup.accumulation
    micros = [
        size for size in range(1, per_rank + 1) if per_rank % size == 0 and (size & (size - 1) == 0 or size == per_rank)
    ]
    for stage, optimizer, params in OFFLOADS:
        groups = (1, setup.slots) if stage == 3 and params == "none" and setup.hosts > 1 and setup.slots > 1 else (1,)
        for hpz in groups:
            for checkpointing in (False, True):
                for micro in micros[:8]:
                    yield replace(
                        setup,
                        stage=stage,
                        optimizer=optimizer,
                        params=params,
                        hpz=hpz,
                        micro=micro,
                        accumulation=per_rank // micro,
                        checkpointing=checkpointing,
                        overlap=stage == 3 or setup.overlap,
                    )


def smallest_changes(found: Estimate) -> tuple[Change, ...]:
    """Single changes that make a run fit, fastest first, shorter rows last; pairs where no single one does."""
    singles = list(_changes(found.setup))
    fitting = [_apply(found, name, setup) for name, setup in singles]
    good = [change for change in fitting if change.estimate.fit.verdict == "fits"]
    if not good:
        pairs = [(f"{a} and {b}", again) for a, first in singles for b, again in _changes(first) if a < b]
        good = [c for c in (_apply(found, n, s) for n, s in pairs) if c.estimate.fit.verdict == "fits"]
    if not good:
        good = list(_more_hosts(found))
    return tuple(sorted(good, key=lambda c: ("max_length" in c.setting, c.slowdown, c.setting))[:4])


def _apply(found: Estimate, name: str, setup: Setup) -> Change:
    after = estimate(found.shape, setup, found.hardware)
    return Change(
        setting=name,
        estimate=after,
        slowdown=found.step.tokens_per_s_per_gpu / after.step.tokens_per_s_per_gpu,
    )


def _changes(setup: Setup) -> Iterator[tuple[str, Setup]]:
    if not setup.checkpointing:
        yield "training.gradient_checkpointing=true", replace(setup, checkpointing=True)
    if setup.micro > 1:
        accumulation = setup.accumulation * setup.micro
        yield f"batch.micro=1 batch.accumulation={accumulation}", replace(setup, micro=1, accumulation=accumulation)
    if setup.stage < 3:
        yield "--config zero3", replace(setup, stage=3, overlap=True)
    if setup.stage >= 2 and setup.optimizer == "none":
        yield "deepspeed.zero_optimization.offload_optimizer.device=cpu", replace(setup, optimizer="cpu")
    if setup.stage == 3 and setup.params == "none":
        yield "--config zero3-offload", replace(setup, optimizer="cpu", params="cpu")
    if setup.optimizer == "cpu" and setup.stage == 3:
        yield "--config zero3-nvme", replace(setup, optimizer="nvme", params="nvme")
    if setup.pin and setup.optimizer != "none" and not setup.pin_native:
        yield "env.DS_PIN_MEMORY_BACKEND=native", replace(setup, pin_native=True)
    if setup.length >= 1024:
        yield f"data.max_length={setup.length // 2}", replace(setup, length=setup.length // 2)


def _more_hosts(found: Estimate) -> Iterator[Change]:
    for factor in (2, 3, 4, 6, 8, 12, 16):
        ranks = found.setup.ranks * factor
        change = _apply(found, f"{found.setup.hosts * factor} hosts", replace(found.setup, ranks=ranks))
        if change.estimate.fit.verdict == "fits":
            yield change
            return
