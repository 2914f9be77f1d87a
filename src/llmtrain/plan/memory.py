"""Memory of a run: terms, peaks, and whether it fits. Allocated, reserved and device memory are three numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from llmtrain.plan.devicememory import device_terms
from llmtrain.plan.hostmemory import host_terms
from llmtrain.plan.terms import PHASES, Phase, Term, peak_of, sum_at

if TYPE_CHECKING:
    from llmtrain.plan.catalogue import Hardware
    from llmtrain.plan.setup import Setup
    from llmtrain.plan.shape import ModelShape

Verdict = Literal["fits", "tight", "no"]
CONTEXT = 900 * 2**20
"""CUDA context of a process: 0.5 to 0.9 GiB."""
COMMUNICATION = 700 * 2**20
"""NCCL's buffers of one family of groups: 0.3 to 1.5 GiB, growing with the first collective of each."""
FRAGMENTED, SEGMENTED = 0.10, 0.03
"""Reserved beyond allocated: 12% at Open-Llama's 33B; less with expandable segments."""
HOST_SPARE = 0.05
"""Share of a host's memory that stays free in a run that fits."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Memory of the ranks and hosts of a run."""

    terms: tuple[Term, ...]
    """Everything, by name; accelerators per rank, the rest per host."""
    allocated_bytes: int
    """Peak that tensors take on an accelerator (``max_memory_allocated``)."""
    allocated_phase: Phase
    """When."""
    reserved_bytes: int
    """Peak that PyTorch holds for them, fragmentation included."""
    device_bytes: int
    """What ``nvidia-smi`` would show: reserved, context, NCCL."""
    ram_bytes: int
    """Peak of a host's memory."""
    ram_phase: Phase
    """When."""
    nvme_bytes: int
    """Files on a host's NVMe drives."""

    def gpu_at(self, phase: Phase) -> int:
        """Bytes allocated on an accelerator at a phase."""
        return sum_at(self.terms, "gpu", phase)

    def by_phase(self) -> dict[Phase, int]:
        """Bytes allocated on an accelerator, phase by phase."""
        return {phase: self.gpu_at(phase) for phase in PHASES}


def estimate_memory(shape: ModelShape, setup: Setup, rank: int = 0) -> MemoryEstimate:
    """Add up a run.

    Args:
        shape: the model.
        setup: the run.
        rank: whose accelerator; ranks differ by a few bytes.
    """
    terms = (*device_terms(shape, setup, rank), *host_terms(shape, setup))
    allocated, when = peak_of(terms, "gpu")
    ram, ram_when = peak_of(terms, "ram")
    reserved = int(allocated * (1 + (SEGMENTED if setup.expandable else FRAGMENTED)))
    families = (1 if setup.ranks > 1 else 0) + (1 if setup.hpz > 1 else 0)
    return MemoryEstimate(
        terms=terms,
        allocated_bytes=allocated,
        allocated_phase=when,
        reserved_bytes=reserved,
        device_bytes=reserved + CONTEXT + COMMUNICATION * families,
        ram_bytes=ram,
        ram_phase=ram_when,
        nvme_bytes=peak_of(terms, "nvme")[0],
    )


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Whether a run fits on its hosts, and what decides."""

    verdict: Verdict
    """fits, tight (it depends on fragmentation), or no."""
    reason: str
    """The tightest limit, in words."""
    certain: bool
    """Not even the tensors alone fit: a launch may refuse."""


def judge_fit(memory: MemoryEstimate, hardware: Hardware) -> Fit:
    """Compare with the limits of the hosts."""
    fits = [
        _judge(
            "accelerator",
            sure=memory.allocated_bytes + CONTEXT,
            likely=memory.device_bytes,
            limit=hardware.memory_bytes,
            phase=memory.allocated_phase,
        ),
        _judge(
            "host memory",
            sure=int(memory.ram_bytes * 0.9),
            likely=int(memory.ram_bytes * (1 + HOST_SPARE)),
            limit=hardware.ram_bytes,
            phase=memory.ram_phase,
        ),
    ]
    if memory.nvme_bytes:
        fits.append(
            _judge("NVMe", sure=memory.nvme_bytes, likely=memory.nvme_bytes, limit=hardware.nvme_bytes, phase="step")
        )
    order = {"no": 0, "tight": 1, "fits": 2}
    return min(fits, key=lambda fit: (order[fit.verdict], not fit.certain))


def _judge(what: str, *, sure: int, likely: int, limit: int, phase: Phase) -> Fit:
    shown = f"{what}: {likely / 2**30:.1f} of {limit / 2**30:.1f} GiB ({phase})"
    if sure > limit:
        return Fit(verdict="no", reason=shown, certain=sure > 1.05 * limit)
    return Fit(verdict="tight" if likely > limit else "fits", reason=shown, certain=False)
