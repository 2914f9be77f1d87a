"""What of a run decides its memory, speed and placement: read from a resolved DeepSpeed configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

Device = Literal["none", "cpu", "nvme"]
WIDTH = {"fp32": 4, "fp16": 2, "bf16": 2}
"""Bytes of a number."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters on frozen weights."""

    rank: int
    """Columns of the adapters."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Linear layers that have one, by the last part of their name."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One configuration of one run. Sizes are in numbers (elements), as DeepSpeed's keys are."""

    stage: int
    """ZeRO stage, 0 to 3."""
    ranks: int
    """Ranks that the states are divided over."""
    slots: int
    """Ranks on one host."""
    micro: int
    """Rows in one forward pass on one rank."""
    accumulation: int
    """Forward passes in one optimizer step."""
    length: int
    """Tokens of a row."""
    dtype: str = "bf16"
    """Precision of weights and activations: bf16, fp16 or fp32."""
    accumulate: str | None = None
    """Precision gradients are summed in; that of the weights if not given."""
    communicate: str | None = None
    """Precision gradients travel in; that of the weights if not given."""
    checkpointing: bool = True
    """Activations are recomputed in the backward pass."""
    attention: Literal["sdpa", "flash_attention_2", "eager"] = "sdpa"
    """Attention kernel."""
    padded: bool = True
    """Rows are padded, so the kernel is given a mask."""
    fused_loss: bool = False
    """The loss never materialises all logits (Liger and the like)."""
    tiled_loss: bool = False
    """The loss is made in tiles, its gradients summed in 32 bit: TRL's output head, so the built-in fine-tune."""
    old_loss: bool = False
    """transformers up to 4.44: the loss copies the shifted logits once more."""
    native_linear: bool = False
    """Autograd keeps gathered weights: torch.compile, Liger, or DeepSpeed's memory-efficient linear switched off."""
    optimizer: Device = "none"
    """Where optimizer states are offloaded to."""
    optimizer_ratio: float = 1.0
    """Share of sub-groups updated on the processor."""
    params: Device = "none"
    """Where weights are offloaded to."""
    pin: bool = True
    """Offload buffers are page-locked; PyTorch rounds each up to a power of two."""
    pin_native: bool = False
    """DeepSpeed's own page-locking (DS_PIN_MEMORY_BACKEND=native), which does not round."""
    reduce_bucket: int = 500_000_000
    """Gradients reduced together."""
    gather_bucket: int = 500_000_000
    """Weights gathered together after a step (stages 1 and 2)."""
    prefetch: int = 50_000_000
    """Weights fetched ahead (stage 3)."""
    persist: int = 100_000
    """Parameters up to this size are kept whole on every rank (stage 3)."""
    max_live: int = 1_000_000_000
    """Gathered weights beyond which nothing more is fetched ahead."""
    max_reuse: int = 1_000_000_000
    """Weights used again within this distance are not released."""
    sub_group: int = 1_000_000_000
    """Numbers of one rank that the optimizer steps together."""
    hpz: int = 1
    """Ranks of the secondary partition (ZeRO++)."""
    quantized_weights: bool = False
    """Weights travel as 8-bit (ZeRO++ qwZ)."""
    quantized_gradients: bool = False
    """Gradients travel as 4-bit (ZeRO++ qgZ)."""
    overlap: bool = False
    """Communication overlaps the backward pass."""
    contiguous: bool = True
    """Gradients are copied into a bucket."""
    all_reduce: bool = True
    """Stage 2 reduces buckets of several owners with one all-reduce."""
    two_groups: bool = True
    """The optimizer has the Trainer's two groups of parameters."""
    buffer_size: int = 100_000_000
    """Numbers in one NVMe swap buffer for weights."""
    buffer_count: int = 5
    """How many of these."""
    workers: int = 2
    """Loader processes of each rank."""
    whole_load: bool = False
    """Every rank loads the whole model before it is divided (no zero.Init)."""
    lora: Lora | None = None
    """Adapters, if only these are trained."""
    expandable: bool = False
    """PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."""

    @property
    def hosts(self) -> int:
        """Hosts, when all but the last have the same number of slots."""
        return -(-self.ranks // self.slots)

    @property
    def tokens(self) -> int:
        """Tokens of one forward pass on one rank."""
        return self.micro * self.length

    @property
    def width(self) -> int:
        """Bytes of a weight."""
        return WIDTH[self.dtype]

    @property
    def gradient_width(self) -> int:
        """Bytes of an accumulated gradient."""
        return WIDTH[self.accumulate or self.dtype]

    @property
    def traffic_width(self) -> int:
        """Bytes of a gradient in a reduction."""
        return WIDTH[self.communicate or self.dtype]

    @property
    def global_batch(self) -> int:
        """Rows in one optimizer step."""
        return self.micro * self.accumulation * self.ranks


def plan_setup(config: Mapping[str, Any], *, ranks: int, slots: int, length: int, **rest: Any) -> Setup:
    """Read a DeepSpeed configuration without "auto".

    Args:
        config: as DeepSpeed would read it.
        ranks: ranks of the run.
        slots: ranks on one host.
        length: tokens of a row.
        rest: further fields of :class:`Setup`.
    """
    zero = config.get("zero_optimization") or {}
    stage = int(zero.get("stage", 0))
    types = config.get("data_types") or {}
    on = {name: (config.get(name) or {}).get("enabled") is True for name in ("bf16", "fp16")}
    optimizer, params = zero.get("offload_optimizer") or {}, zero.get("offload_param") or {}
    pinned = [bool(block.get("pin_memory", True)) for block in (optimizer, params) if _device(block) != "none"]
    values: dict[str, Any] = {
        "stage": stage,
        "ranks": ranks,
        "slots": slots,
        "length": length,
        "micro": int(config.get("train_micro_batch_size_per_gpu", 1)),
        "accumulation": int(config.get("gradient_accumulation_steps", 1)),
        "dtype": "bf16" if on["bf16"] else "fp16" if on["fp16"] else "fp32",
        "accumulate": types.get("grad_accum_dtype"),
        "communicate": config.get("communication_data_type"),
        "optimizer": _device(optimizer),
        "optimizer_ratio": float(optimizer.get("ratio", 1.0)),
        "params": _device(params),
        "pin": any(pinned),
        "overlap": bool(zero.get("overlap_comm", stage == 3)),
        "contiguous": bool(zero.get("contiguous_gradients", True)),
        "all_reduce": bool(zero.get("use_multi_rank_bucket_allreduce", True)),
        "hpz": int(zero.get("zero_hpz_partition_size", 1)),
        "quantized_weights": bool(zero.get("zero_quantized_weights", False)),
        "quantized_gradients": bool(zero.get("zero_quantized_gradients", False)),
        "native_linear": not zero.get("memory_efficient_linear", True),
        "buffer_size": int(params.get("buffer_size", 100_000_000)),
        "buffer_count": int(params.get("buffer_count", 5)),
    }
    for field, key in KEYS.items():
        if zero.get(key) not in (None, "auto"):
            values[field] = int(zero[key])
    return Setup(**{**values, **rest})


KEYS = {
    "reduce_bucket": "reduce_bucket_size",
    "gather_bucket": "allgather_bucket_size",
    "prefetch": "stage3_prefetch_bucket_size",
    "persist": "stage3_param_persistence_threshold",
    "max_live": "stage3_max_live_parameters",
    "max_reuse": "stage3_max_reuse_distance",
    "sub_group": "sub_group_size",
}
"""Our field -> DeepSpeed's key."""


def _device(block: Mapping[str, Any]) -> Device:
    device = block.get("device")
    return device if device in ("cpu", "nvme") else "none"
