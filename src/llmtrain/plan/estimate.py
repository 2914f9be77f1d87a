"""One run, estimated whole: memory, time, verdict. What ``plan`` prints and ``launch`` asks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from llmtrain.errors import DoesNotFitError
from llmtrain.plan.memory import estimate_memory, judge_fit
from llmtrain.plan.steptime import estimate_step

if TYPE_CHECKING:
    from llmtrain.plan.catalogue import Hardware
    from llmtrain.plan.memory import Fit, MemoryEstimate
    from llmtrain.plan.setup import Setup
    from llmtrain.plan.shape import ModelShape
    from llmtrain.plan.steptime import StepEstimate


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One configuration of one run."""

    shape: ModelShape
    """The model."""
    setup: Setup
    """The run."""
    hardware: Hardware
    """Its hosts."""
    memory: MemoryEstimate
    """What it needs."""
    step: StepEstimate
    """How fast it is."""
    fit: Fit
    """Whether it fits."""


def estimate(shape: ModelShape, setup: Setup, hardware: Hardware) -> Estimate:
    """Estimate one configuration; under a second for any model."""
    memory = estimate_memory(shape, setup)
    return Estimate(
        shape=shape,
        setup=setup,
        hardware=hardware,
        memory=memory,
        step=estimate_step(shape, setup, hardware),
        fit=judge_fit(memory, hardware),
    )


def refuse_what_cannot_fit(found: Estimate, *, fixes: tuple[str, ...] = ()) -> None:
    """Stop a launch whose tensors alone are beyond its hosts.

    Raises:
        DoesNotFitError: it certainly does not fit; what is only tight goes through.
    """
    if not found.fit.certain:
        return
    raise DoesNotFitError(
        f"the run does not fit: {found.fit.reason}",
        where=f"{found.setup.ranks} ranks, {found.setup.slots} on a host, {found.hardware.accelerator}",
        fix="; or ".join(fixes) or "llmtrain plan --compare shows what fits",
    )


def check_fit(
    shape: ModelShape, setup: Setup, hardware: Hardware, *, ram_bytes: int | None = None, gpu_bytes: int | None = None
) -> Estimate:
    """What ``launch`` asks before it starts anything: estimate, with the hosts' real limits, and refuse.

    Args:
        shape: the model.
        setup: the run, from the DeepSpeed configuration that will be used.
        hardware: the kind of host.
        ram_bytes: memory of the smallest host, as it was examined.
        gpu_bytes: memory of the smallest accelerator, as it was examined.

    Raises:
        DoesNotFitError: it certainly does not fit.
    """
    real = replace(
        hardware,
        ram_bytes=ram_bytes or hardware.ram_bytes,
        memory_bytes=gpu_bytes or hardware.memory_bytes,
    )
    found = estimate(shape, setup, real)
    if found.fit.certain:
        from llmtrain.plan.choose import smallest_changes

        refuse_what_cannot_fit(found, fixes=tuple(change.setting for change in smallest_changes(found)))
    return found


def estimate_json(found: Estimate) -> dict[str, Any]:
    """The keys scripts may rely on, and every term."""
    memory, step = found.memory, found.step
    return {
        "model": {"family": found.shape.family, "parameters": found.shape.total},
        "ranks": found.setup.ranks,
        "gpu": {
            "peak_allocated_bytes": memory.allocated_bytes,
            "peak_reserved_bytes": memory.reserved_bytes,
            "device_bytes": memory.device_bytes,
            "capacity_bytes": found.hardware.memory_bytes,
            "peak_phase": memory.allocated_phase,
            "by_phase_bytes": memory.by_phase(),
        },
        "host": {
            "ram_bytes": memory.ram_bytes,
            "ram_phase": memory.ram_phase,
            "capacity_bytes": found.hardware.ram_bytes,
            "nvme_bytes": memory.nvme_bytes,
        },
        "verdict": found.fit.verdict,
        "reason": found.fit.reason,
        "step": {
            "seconds": step.seconds,
            "tokens_per_s_per_gpu": step.tokens_per_s_per_gpu,
            "tflops_per_gpu": step.tflops,
            "tokens": step.tokens,
            "break_even_tokens": step.break_even,
            "bound_by": step.bound_by,
            "software_efficiency": step.software,
            "terms": [
                {
                    "name": item.name,
                    "seconds": item.seconds,
                    "exposed_seconds": item.exposed,
                    "link": item.link,
                    "formula": item.formula,
                }
                for item in step.terms
            ],
        },
        "terms": [
            {
                "name": item.name,
                "place": item.place,
                "bytes": item.size_bytes,
                "formula": item.formula,
                "source": item.source,
                "phases": list(item.phases),
                "pinned": item.pinned,
            }
            for item in memory.terms
        ],
    }
