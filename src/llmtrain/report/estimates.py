"""Estimates as people read them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from llmtrain.plan.activations import estimate_activations
from llmtrain.plan.choose import describe
from llmtrain.plan.terms import sum_at
from llmtrain.report.errors import clean

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmtrain.plan.choose import Change, Ranking
    from llmtrain.plan.estimate import Estimate
    from llmtrain.plan.terms import Place
    from llmtrain.spec.choice import Choice

WORDS = {"fits": "fits", "tight": "tight: it depends on fragmentation", "no": "does not fit"}


def open_console(*, aside: bool) -> Console:
    """Where a command prints; aside when standard output holds JSON."""
    return Console(stderr=aside, highlight=False)


def gib(size: float) -> str:
    """Bytes as GiB."""
    return f"{size / 2**30:,.2f}"


def show_estimate(console: Console, found: Estimate, changes: Sequence[Change], choices: Sequence[Choice]) -> None:
    """The verdict, the memory by terms, the time by terms."""
    setup, memory = found.setup, found.memory
    console.print(
        f"{found.shape.family}, {found.shape.total / 1e9:.2f}B parameters, on {setup.hosts} x {setup.slots}"
        f" {found.hardware.accelerator}: {describe(setup)}, {setup.length} tokens a row",
        markup=False,
    )
    console.print(f"verdict: {WORDS[found.fit.verdict]} ({found.fit.reason})", markup=False)
    console.print(
        f"GPU: {gib(memory.allocated_bytes)} GiB allocated at its peak ({memory.allocated_phase}),"
        f" {gib(memory.reserved_bytes)} reserved, {gib(memory.device_bytes)} on the device"
        f" of {gib(found.hardware.memory_bytes)}",
        markup=False,
    )
    console.print(
        f"host: {gib(memory.ram_bytes)} GiB of memory ({memory.ram_bytes / 1e9:,.0f} GB, {memory.ram_phase})"
        f" of {gib(found.hardware.ram_bytes)}, {gib(memory.nvme_bytes)} GiB on NVMe",
        markup=False,
    )
    _show_terms(console, found, "gpu", "GPU, per rank")
    _show_terms(console, found, "ram", "memory of a host")
    _show_terms(console, found, "nvme", "NVMe of a host")
    _show_step(console, found)
    _show_changes(console, changes)
    for choice in choices:
        console.print(f"{choice.key} = {choice.value}: {choice.reason}", markup=False, style="dim", highlight=False)


def _show_terms(console: Console, found: Estimate, place: Place, title: str) -> None:
    phase = {"gpu": found.memory.allocated_phase, "ram": found.memory.ram_phase, "nvme": "step"}[place]
    terms = [term for term in found.memory.terms if term.place == place]
    if not terms:
        return
    table = Table(box=None, pad_edge=False)
    table.add_column(f"\n{title}", overflow="fold")
    table.add_column("\nGiB", justify="right")
    table.add_column("at\npeak", justify="center")
    table.add_column("\nformula", overflow="fold")
    for term in sorted(terms, key=lambda term: -term.size_bytes):
        there = "*" if phase in term.phases else ""
        table.add_row(term.name, gib(term.size_bytes), there, term.formula)
    table.add_row("sum at the peak", gib(sum_at(terms, place, phase)), "", f"phase: {phase}")
    console.print(table)


def _show_step(console: Console, found: Estimate) -> None:
    step = found.step
    table = Table(box=None, pad_edge=False)
    table.add_column("\none optimizer step", overflow="fold")
    table.add_column("\nseconds", justify="right")
    table.add_column("\nexposed", justify="right")
    table.add_column("\nformula", overflow="fold")
    for term in step.terms:
        if term.seconds >= 1e-4:
            table.add_row(term.name, f"{term.seconds:.3f}", f"{term.exposed:.3f}", term.formula)
    console.print(table)
    console.print(
        f"step: {step.seconds:.2f} s, {step.tokens_per_s_per_gpu:,.0f} tokens/s per GPU, {step.tflops:.0f} TFLOP/s;"
        f" bound by {step.bound_by}; expect 25% either way until it is calibrated",
        markup=False,
    )
    if step.break_even:
        more = found.setup.tokens
        told = "above" if more >= step.break_even else "below"
        console.print(
            f"break-even: {step.break_even:,.0f} tokens per GPU and micro batch on these links; this run has {more:,}"
            f" ({told} it)",
            markup=False,
        )


def _show_changes(console: Console, changes: Sequence[Change]) -> None:
    if changes:
        console.print("\nwhat would make it fit:", markup=False)
    for change in changes:
        speed = change.estimate.step.tokens_per_s_per_gpu
        console.print(
            f"  {clean(change.setting)}: {gib(change.estimate.memory.device_bytes)} GiB per GPU,"
            f" {change.estimate.memory.ram_bytes / 1e9:,.0f} GB per host, {speed:,.0f} tokens/s per GPU"
            f" ({change.slowdown:.2f}x the time)",
            markup=False,
        )


def show_ranking(console: Console, ranking: Ranking, *, limit: int = 12) -> None:
    """The configurations, best first."""
    table = Table(box=None, pad_edge=False)
    for column in ("configuration", "verdict", "GPU GiB", "host GB", "tokens/s per GPU", "step s", "bound by"):
        table.add_column(
            column, overflow="fold", justify="left" if column in ("configuration", "bound by") else "right"
        )
    for row in ranking.rows[:limit]:
        table.add_row(
            describe(row.setup),
            row.fit.verdict,
            gib(row.memory.device_bytes),
            f"{row.memory.ram_bytes / 1e9:,.0f}",
            f"{row.step.tokens_per_s_per_gpu:,.0f}",
            f"{row.step.seconds:.2f}",
            row.step.bound_by,
        )
    console.print(table)
    console.print(f"first: {ranking.reason}; {len(ranking.rows)} configurations were estimated", markup=False)


def show_cost(console: Console, found: Estimate, steps: int | None) -> None:
    """Hours of a whole run, if its length is known."""
    if steps:
        hours = steps * found.step.seconds / 3600
        console.print(f"{steps:,} steps: {hours:,.1f} hours, {hours * found.setup.ranks:,.0f} GPU-hours", markup=False)


def cost_json(found: Estimate, steps: int | None) -> dict[str, Any]:
    """The twin of :func:`show_cost`."""
    if not steps:
        return {}
    hours = steps * found.step.seconds / 3600
    return {"run": {"steps": steps, "hours": hours, "gpu_hours": hours * found.setup.ranks}}


def show_against(console: Console, beside: Mapping[str, Any]) -> None:
    """The step a run measured beside the estimate."""
    told = beside["against"]
    console.print(
        f"against {told['run']}: a step took {told['measured_seconds']:.3f} s (median of {told['steps']}),"
        f" estimated {told['estimated_seconds']:.3f} s ({told['error']:+.1%})",
        markup=False,
    )


def show_trace(console: Console, found: Estimate, traced: int) -> None:
    """The traced activations beside the formula's."""
    counted = estimate_activations(found.shape, found.setup).peak
    console.print(
        f"traced: activations and logits peak at {gib(traced)} GiB; the formulas say {gib(counted)}"
        f" ({counted / traced - 1:+.1%})",
        markup=False,
    )
