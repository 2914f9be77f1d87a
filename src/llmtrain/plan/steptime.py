"""How long one optimizer step takes, as named terms: computing, each collective on its link, PCIe, CPU Adam.

The five-term model of docs/plan-model.md. What may be hidden behind computing is compared with it per micro batch;
what is not hidden is shown as exposed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmtrain.plan.catalogue import read_catalogue
from llmtrain.plan.devicememory import lora_numel, trained_share
from llmtrain.plan.partition import share_of_rank
from llmtrain.plan.traffic import plan_traffic

if TYPE_CHECKING:
    from llmtrain.plan.catalogue import Hardware
    from llmtrain.plan.setup import Setup
    from llmtrain.plan.shape import ModelShape
    from llmtrain.plan.traffic import Collective


@dataclass(frozen=True, kw_only=True)
class TimeTerm:
    """One part of an optimizer step."""

    name: str
    """What it is."""
    seconds: float
    """How long it takes, alone, in one optimizer step."""
    exposed: float
    """How much of that the step waits for."""
    formula: str
    """How the number came about."""
    link: str = ""
    """Link it loads: gpu, intra, inter, pcie, cpu, nvme."""


@dataclass(frozen=True, kw_only=True)
class StepEstimate:
    """One optimizer step."""

    terms: tuple[TimeTerm, ...]
    """Its parts."""
    tokens: int
    """Tokens of all ranks in it."""
    ranks: int
    """Ranks."""
    break_even: float
    """Tokens per rank and micro batch below which the network, not computing, sets the pace."""
    bound_by: str
    """What takes most of the step."""
    software: float
    """Efficiency assumed: measured over predicted speed elsewhere."""
    model_flops: float
    """Useful FLOPs of the step, all ranks (6 per weight and token, causal attention)."""

    @property
    def seconds(self) -> float:
        """Length of the step."""
        return sum(term.exposed for term in self.terms)

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Speed as Open-Llama's table gives it."""
        return self.tokens / self.seconds / self.ranks

    @property
    def tflops(self) -> float:
        """Useful TFLOP/s of each accelerator."""
        return self.model_flops / self.seconds / self.ranks / 1e12


def estimate_step(shape: ModelShape, setup: Setup, hardware: Hardware) -> StepEstimate:
    """Time one optimizer step."""
    efficiency = hardware.software or _software(setup)
    compute = _compute(shape, setup, hardware, efficiency)
    busy = sum(term.seconds for term in compute)
    moved = [_collective(item, setup, hardware) for item in plan_traffic(shape, setup)]
    hideable = [term for term in moved if term.link != "step"]
    waiting = _exposed(hideable, busy, hides=setup.overlap or setup.stage == 3)
    after = [term for term in moved if term.link == "step"]
    transfers = _transfers(shape, setup, hardware, busy)
    terms = (*compute, *waiting, *after, *transfers, *_optimizer(shape, setup, hardware))
    return StepEstimate(
        terms=terms,
        tokens=setup.tokens * setup.accumulation * setup.ranks,
        ranks=setup.ranks,
        break_even=_break_even(shape, setup, hardware, busy),
        bound_by=max(terms, key=lambda term: term.exposed).name,
        software=efficiency,
        model_flops=(6 * shape.active + 6 * shape.layers * shape.heads * shape.head_dim * setup.length)
        * setup.tokens
        * setup.accumulation
        * setup.ranks,
    )


def _software(setup: Setup) -> float:
    book = read_catalogue()["software"]
    return float(book[setup.attention] + (book["fused_loss"] if setup.fused_loss else 0))


def _compute(shape: ModelShape, setup: Setup, hardware: Hardware, efficiency: float) -> list[TimeTerm]:
    tokens = setup.tokens * setup.accumulation
    again = 4 / 3 if setup.checkpointing else 1.0
    per_weight = 6 * again if not setup.lora else 4 * again
    matmul = (per_weight * shape.active + (6 * lora_numel(shape, setup) if setup.lora else 0)) * tokens / hardware.gemm
    width = shape.heads * shape.head_dim
    attention = 6 * shape.layers * width * setup.length * again * tokens / hardware.attention
    simple = hardware.elementwise * shape.layers * shape.hidden * again * tokens
    launch = hardware.launch * shape.layers * setup.accumulation
    parts = (
        ("matmul", matmul, f"{per_weight:.0f} FLOP x weights x tokens / rate"),
        ("attention", attention, "6 x layers x width x length x tokens / rate, causal"),
        ("elementwise", simple, "norms, activations: per token, layer and hidden unit"),
        ("launch", launch, "per layer and micro batch"),
    )
    return [
        TimeTerm(name=name, seconds=value / efficiency, exposed=value / efficiency, formula=text, link="gpu")
        for name, value, text in parts
    ]


def _collective(item: Collective, setup: Setup, hardware: Hardware) -> TimeTerm:
    ranks, hosts = setup.ranks, setup.hosts
    inside = item.local or hosts == 1
    group = setup.slots if inside else ranks
    share = (2 if item.kind == "all-reduce" else 1) * item.step_bytes * (group - 1) / group
    rate = hardware.intra if inside else min(hardware.intra, hardware.inter)
    latency = item.calls * item.repeats * group * (1e-5 if inside else hardware.latency)
    link = "intra" if inside else "inter"
    place = "inside hosts" if inside else "between hosts"
    name = f"{item.kind} {item.what}"
    seconds = share / rate + min(latency, share / rate)
    return TimeTerm(
        name=name,
        seconds=seconds,
        exposed=seconds,
        formula=f"{item.step_bytes / 1e9:.2f} GB x {(group - 1)}/{group} {place}",
        link="step" if item.per_step and setup.stage else link,
    )


def _exposed(terms: list[TimeTerm], busy: float, *, hides: bool) -> list[TimeTerm]:
    """Overlapped traffic waits for what does not fit beside computing; a part never overlaps (first and last layer)."""
    total = sum(term.seconds for term in terms)
    if not total:
        return terms
    never = 0.15
    left = max(never * total, total - (1 - never) * busy) if hides else total
    share = left / total
    return [
        TimeTerm(name=t.name, seconds=t.seconds, exposed=t.seconds * share, formula=t.formula, link=t.link)
        for t in terms
    ]


def _transfers(shape: ModelShape, setup: Setup, hardware: Hardware, busy: float) -> list[TimeTerm]:
    own = share_of_rank(shape, setup)
    rate = min(hardware.pcie, hardware.pcie_shared / setup.slots)
    found = []
    if setup.params != "none":
        size = 3 * setup.width * own * setup.accumulation
        seconds = size / rate
        found.append(
            TimeTerm(
                name="weights over PCIe",
                seconds=seconds,
                exposed=max(0.15 * seconds, seconds - busy),
                formula=f"3 x 2P/N x accumulation = {size / 1e9:.2f} GB",
                link="pcie",
            )
        )
    if setup.optimizer != "none":
        up_down = setup.gradient_width * own * (2 * setup.accumulation - 1) + (4 + setup.width) * own
        seconds = up_down / rate
        found.append(
            TimeTerm(
                name="gradients and weights over PCIe",
                seconds=seconds,
                exposed=seconds,
                formula=f"gradients each micro batch, weights back: {up_down / 1e9:.2f} GB",
                link="pcie",
            )
        )
    return found


def _optimizer(shape: ModelShape, setup: Setup, hardware: Hardware) -> list[TimeTerm]:
    own = share_of_rank(shape, setup) * trained_share(shape, setup)
    if setup.optimizer == "none":
        seconds = 30 * own / 1.2e12
        return [TimeTerm(name="Adam", seconds=seconds, exposed=seconds, formula="30 B x P/N / memory rate", link="gpu")]
    away = own * setup.optimizer_ratio
    seconds = away * setup.slots * hardware.adam
    found = [
        TimeTerm(
            name="CPU Adam", seconds=seconds, exposed=seconds, formula="seconds per parameter x P/hosts", link="cpu"
        )
    ]
    if setup.optimizer == "nvme":
        size = 16 * away * setup.slots
        moved = size / hardware.nvme_read + size / hardware.nvme_write
        found.append(
            TimeTerm(name="NVMe", seconds=moved, exposed=moved, formula="16 B x P/hosts read and written", link="nvme")
        )
    return found


def _break_even(shape: ModelShape, setup: Setup, hardware: Hardware, busy: float) -> float:
    """Tokens per micro batch at which computing takes as long as the traffic of a micro batch."""
    per_batch = [item for item in plan_traffic(shape, setup) if not item.per_step]
    seconds = sum(_collective(item, setup, hardware).seconds for item in per_batch) / setup.accumulation
    per_token = busy / (setup.tokens * setup.accumulation)
    return seconds / per_token if per_token else 0.0
