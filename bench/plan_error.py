"""How far `llmtrain plan` is from published measurements, beside DeepSpeed's own estimator and accelerate's.

    python bench/plan_error.py [--rows]     # summary; with --rows, every row

The measurements are tests/plan/cases/measured.csv (each with its source) and the out-of-memory reports below.
"""

from __future__ import annotations

import csv
import statistics
import sys
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

from llmtrain.plan.catalogue import plan_hardware
from llmtrain.plan.estimate import Estimate, estimate
from llmtrain.plan.setup import Setup
from llmtrain.plan.shape import ModelShape, plan_shape
from llmtrain.plan.terms import sum_at

ROWS = Path(__file__).parents[1] / "tests/plan/cases/measured.csv"
GIB = 2**30


def llama(
    vocab: int, hidden: int, layers: int, heads: int, inner: int, kv: int | None = None, kind: str = "llama"
) -> dict:
    return {
        "model_type": kind,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv or heads,
        "intermediate_size": inner,
        "max_position_embeddings": 4096,
    }


def mpt(hidden: int, layers: int, heads: int) -> dict:
    return {"model_type": "mpt", "vocab_size": 50368, "d_model": hidden, "n_layers": layers, "n_heads": heads}


MODELS = {
    "LLaMA-7B": llama(32000, 4096, 32, 32, 11008),
    "Open-Llama 7B V2 (xformers)": llama(68762, 4096, 32, 32, 11008),
    "Open-Llama 7B V1 (HF eager)": llama(68762, 4096, 32, 32, 11008),
    "MPT-125m": mpt(768, 12, 12),
    "MPT-350m": mpt(1024, 24, 16),
    "MPT-760m": mpt(1536, 24, 12),
    "MPT-1b": mpt(2048, 24, 16),
    "MPT-3b": mpt(2560, 32, 20),
    "MPT-7b": mpt(4096, 32, 32),
    "MPT-13b": mpt(5120, 40, 40),
    "MPT-30b": mpt(7168, 48, 56),
    "MPT-70b": mpt(8192, 80, 64),
    "Open-Llama 33B": llama(68762, 6656, 60, 52, 17920),
    "Open-Llama 65B": llama(68762, 8192, 80, 64, 22016),
    "LLaMA-33B": llama(32000, 6656, 60, 52, 17920),
    "LLaMA-65B": llama(32000, 8192, 80, 64, 22016),
    "Qwen2.5-14B": llama(152064, 5120, 48, 40, 13824, 8, "qwen2"),
    "Qwen2.5-32B": llama(152064, 5120, 64, 40, 27648, 8, "qwen2"),
    "LLaDA-8B": llama(126464, 4096, 32, 32, 12288),
    "Llama-2-70B": llama(32000, 8192, 80, 64, 28672, 8),
}
"""Public sizes of the measured models (their config.json on the hub, or the paper)."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement beside its prediction."""

    number: str
    study: str
    label: str
    found: Estimate
    gpu: float | None
    before_step: bool
    ram: float | None
    speed: float | None
    ready_made_sampled: bool = False


def shape_of(name: str) -> ModelShape:
    return plan_shape(MODELS[name], name=name)


def setup_of(row: dict[str, str]) -> Setup | None:
    """The configuration of a row, None where it is not explicit enough."""
    if row["model"] not in MODELS or not (row["mbs"] and row["gpus"] and row["seq"].isdigit()):
        return None
    hidden = shape_of(row["model"]).hidden
    stage = 3 if row["zero"].startswith(("3", "FSDP")) else int(row["zero"]) if row["zero"].isdigit() else 0
    hosts = int(row["nodes"] or 1)
    base = Setup(
        stage=stage,
        ranks=int(row["gpus"]),
        slots=int(row["gpus"]) // hosts,
        micro=int(row["mbs"]),
        accumulation=int(row["ga"] or 1),
        length=int(row["seq"]),
        checkpointing=row["ckpt"] == "1",
        optimizer="cpu" if "opt_cpu" in row["offload"] else "none",
        params="cpu" if "param_cpu" in row["offload"] else "none",
        attention="flash_attention_2",
        reduce_bucket=hidden * hidden,
        prefetch=int(0.9 * hidden * hidden),
        persist=10 * hidden,
    )
    if "gist.github.com" in row["source"]:
        # A study of mid 2024: transformers' loss of that time, native linear layers, one thread per rank (torchrun).
        return replace(base, old_loss=True, native_linear=True)
    return base


def read_rows() -> list[Row]:
    found = []
    for row in csv.DictReader(ROWS.open(encoding="utf-8")):
        setup = setup_of(row)
        if row["quality"] != "A" or setup is None:
            continue
        assumptions = []
        gist, foundry = "gist.github.com" in row["source"], "llm-foundry" in row["source"]
        if foundry:
            assumptions.append("software=1.0")  # the class of kernels that the coefficients were fitted on
        if gist and setup.optimizer == "cpu":
            assumptions.append("host.adam=2.5")  # OMP_NUM_THREADS=1, which torchrun sets
        hardware = plan_hardware(row["gpu"], assumptions)
        ram = float(row["cpu_mem_GB_per_node"]) if row["cpu_mem_GB_per_node"] else None
        found.append(
            Row(
                number=row["id"],
                study="gist" if gist else "llm-foundry" if foundry else "Open-Llama",
                label="{model} Z{zero} {offload} s{seq} b{mbs} ck{ckpt} {gpu}".format(**row),
                found=estimate(shape_of(row["model"]), setup, hardware),
                gpu=float(row["gpu_mem_GiB"]) if row["gpu_mem_GiB"] else None,
                before_step=gist and row["ga"] == "8",
                ram=ram,
                speed=float(row["tok_s_gpu"]) if row["tok_s_gpu"] else None,
            )
        )
    return found


def gpu_gib(row: Row) -> float:
    """Peak allocated; of the first window of micro batches where the study sampled before the first step ended."""
    terms = [t for t in row.found.memory.terms if not (row.before_step and t.name == "Adam moments")]
    phases = (
        ("forward", "loss", "backward") if row.before_step else ("forward", "loss", "backward", "first step", "step")
    )
    return max(sum_at(terms, "gpu", phase) for phase in phases) / GIB


def deepspeed_gib(row: Row) -> float:
    """`estimate_zero{2,3}_model_states_mem_needs`, GPU side (DeepSpeed 0.19.8, stage_1_and_2.py and stage3.py)."""
    total, setup = row.found.shape.total, row.found.setup
    big = 4 * row.found.shape.largest.numel
    if setup.stage == 3:
        if setup.params != "none":
            return big / GIB
        return (big + (2 if setup.optimizer != "none" else 18) * total / setup.ranks) / GIB
    return (2 * total + (0 if setup.optimizer != "none" else 18 * total / setup.ranks)) / GIB


def deepspeed_host_gb(row: Row) -> float:
    total, setup = row.found.shape.total, row.found.setup
    if setup.stage == 3:
        if setup.optimizer == "none":
            return 1.5 * 4 * setup.slots * row.found.shape.largest.numel / 1e9
        each = 18 if setup.params != "none" else 16
        return 1.5 * total * each / setup.hosts / 1e9
    return (
        1.5 * total * max(4 * setup.ranks, 16) / 1e9
        if setup.optimizer != "none"
        else 1.5 * 4 * setup.slots * total / 1e9
    )


def accelerate_gib(row: Row) -> float:
    """`accelerate estimate-memory`, training with Adam: four times the 32-bit weights, on one device."""
    return 16 * row.found.shape.total / GIB


def share(errors: list[float], bar: float) -> str:
    inside = sum(abs(error) <= bar for error in errors)
    absolute = [abs(error) for error in errors]
    return (
        f"{inside}/{len(errors)} within {bar:.0%} ({inside / len(errors):.0%});"
        f" median {statistics.median(absolute):.1%},"
        f" mean {statistics.mean(absolute):.1%}, worst {max(absolute):.1%}; n = {len(errors)}"
    )


OOM = [
    # label, model, setup, accelerator, assumptions, what happened, source
    ("Open-Llama 33B Z3 b1, 8 GPUs", "Open-Llama 33B", {"micro": 1}, "A100-80G", [], "ran", "Open-Llama #46"),
    ("Open-Llama 33B Z3 b2, 8 GPUs", "Open-Llama 33B", {"micro": 2}, "A100-80G", [], "GPU OOM", "Open-Llama #46"),
    (
        "LLaMA-65B offload, 1 host of 512 GB",
        "Open-Llama 65B",
        {"optimizer": "cpu", "params": "cpu"},
        "A100-80G",
        ["host.ram=512GB"],
        "host OOM",
        "Open-Llama #46",
    ),
    (
        "LLaMA-65B offload, 1 host of 1.6 TB",
        "Open-Llama 65B",
        {"optimizer": "cpu", "params": "cpu"},
        "A100-80G",
        ["host.ram=1.6TB"],
        "host OOM",
        "Open-Llama #22",
    ),
    (
        "LLaMA-33B offload, 1 host of 600 GB",
        "LLaMA-33B",
        {"optimizer": "cpu", "params": "cpu"},
        "A100-80G",
        ["host.ram=600GB"],
        "host OOM",
        "DeepSpeed #3448",
    ),
    (
        "LLaMA-7B offload, 1 GPU, 94 GB",
        "LLaMA-7B",
        {"ranks": 1, "slots": 1, "optimizer": "cpu", "params": "cpu"},
        "A100-80G",
        ["host.ram=94GB"],
        "host OOM",
        "DeepSpeed #3606",
    ),
    (
        "Qwen2.5-32B offload, 1 GPU, 744 GB",
        "Qwen2.5-32B",
        {"ranks": 1, "slots": 1, "optimizer": "cpu", "params": "cpu"},
        "H100-80G",
        ["host.ram=744GB"],
        "host OOM",
        "LLaMA-Factory #6755",
    ),
    (
        "LLaDA-8B Z2, 2 GPUs of 40 GB",
        "LLaDA-8B",
        {"stage": 2, "ranks": 2, "slots": 2},
        "A100-40G",
        [],
        "GPU OOM",
        "dllm #9",
    ),
    (
        "Llama-2-70B offload, 1 host of 1 TB",
        "Llama-2-70B",
        {"optimizer": "cpu", "params": "cpu"},
        "A100-80G",
        ["host.ram=1TB"],
        "host OOM",
        "axolotl #1439",
    ),
    ("Qwen2.5-14B Z3 8K, 8 GPUs", "Qwen2.5-14B", {"length": 8192}, "A100-80G", [], "ran (58 GB)", "facts 2.8"),
    (
        "Qwen2.5-14B Z2 8K, 8 GPUs",
        "Qwen2.5-14B",
        {"length": 8192, "stage": 2},
        "A100-80G",
        [],
        "ran (80 GB)",
        "facts 2.8",
    ),
    (
        "Qwen2.5-32B Z3 8K fused loss, 8 GPUs",
        "Qwen2.5-32B",
        {"length": 8192, "fused_loss": True},
        "A100-80G",
        [],
        "ran",
        "facts 2.8",
    ),
]
"""Reports of runs that ran or ran out of memory; where a report gives no batch, the smallest is taken."""


def show_oom() -> None:
    print("\nruns that ran out of memory, and some that did not")
    false_fits = n = 0
    for label, model, changes, accelerator, assumptions, happened, source in OOM:
        shape = shape_of(model)
        base = {"stage": 3, "ranks": 8, "slots": 8, "micro": 1, "accumulation": 1, "length": 2048}
        setup = Setup(
            **{
                **base,
                "attention": "flash_attention_2",
                "reduce_bucket": shape.hidden**2,
                "prefetch": int(0.9 * shape.hidden**2),
                "persist": 10 * shape.hidden,
                **changes,
            }
        )
        found = estimate(shape, setup, plan_hardware(accelerator, assumptions))
        n += "OOM" in happened
        false_fits += "OOM" in happened and found.fit.verdict == "fits"
        print(f"  {label:38} {happened:12} -> {found.fit.verdict:5} {found.fit.reason}  [{source}]")
    print(f"  called fits although it ran out of memory: {false_fits} of {n}")


def show_pairs(rows: list[Row]) -> None:
    print("\nthe faster of two configurations of one study (pairs that differ by more than 2%)")
    for study in ("gist", "llm-foundry"):
        groups: dict[str, list[Row]] = {}
        for row in rows:
            if row.study == study and row.speed:
                groups.setdefault(f"{row.found.shape.name} {row.found.hardware.accelerator}", []).append(row)
        good = n = 0
        for group in groups.values():
            for a, b in combinations(group, 2):
                if abs(a.speed / b.speed - 1) > 0.02:
                    n += 1
                    said = a.found.step.tokens_per_s_per_gpu > b.found.step.tokens_per_s_per_gpu
                    good += said == (a.speed > b.speed)
        print(f"  {study}: {good}/{n} named right ({good / n:.0%}); n = {n}")


def main() -> None:
    rows = read_rows()
    if "--rows" in sys.argv:
        for row in rows:
            gpu = (
                f"GPU {gpu_gib(row):5.1f} GiB, measured {row.gpu:5.1f} ({gpu_gib(row) / row.gpu - 1:+.0%})"
                if row.gpu
                else ""
            )
            speed = row.found.step.tokens_per_s_per_gpu
            fast = f"{speed:8.0f} tok/s, measured {row.speed:8.0f} ({speed / row.speed - 1:+.0%})" if row.speed else ""
            print(f"{row.number} {row.label:58} {gpu} {fast}")
    print("GPU peak (max_memory_allocated), quality A rows of measured.csv")
    with_gpu = [row for row in rows if row.gpu]
    for name, predict in (
        ("llmtrain", gpu_gib),
        ("DeepSpeed estimator", deepspeed_gib),
        ("accelerate", accelerate_gib),
    ):
        print(f"  {name:20} {share([predict(row) / row.gpu - 1 for row in with_gpu], 0.10)}")
    print("\nhost memory, quality A rows; all of one study, whose 343 GB without any offload are taken as its base")
    with_ram = [row for row in rows if row.ram]
    base = 343.2
    rest = [row for row in with_ram if row.found.setup.optimizer != "none"]
    own = {row.number: base + grown_gb(row) for row in with_ram}
    print(f"  {'llmtrain':20} {share([own[row.number] / row.ram - 1 for row in with_ram], 0.25)}")
    print(f"  {'only rows that offload':20} {share([own[row.number] / row.ram - 1 for row in rest], 0.25)}")
    grown = [grown_gb(row) / (row.ram - base) - 1 for row in rest]
    print(f"  {'their growth alone':20} {share(grown, 0.25)}")
    theirs = [(base + deepspeed_host_gb(row)) / row.ram - 1 for row in rest]
    print(f"  {'DeepSpeed estimator':20} {share(theirs, 0.25)} (only rows that offload, same base)")
    print("\ntokens/s per GPU, uncalibrated, quality A rows")
    for study in ("gist", "Open-Llama", "llm-foundry"):
        errors = [r.found.step.tokens_per_s_per_gpu / r.speed - 1 for r in rows if r.speed and r.study == study]
        print(f"  {study:20} {share(errors, 0.25)}")
    errors = [r.found.step.tokens_per_s_per_gpu / r.speed - 1 for r in rows if r.speed]
    print(f"  {'all':20} {share(errors, 0.25)}")
    show_pairs(rows)
    show_oom()


def grown_gb(row: Row) -> float:
    """What offloading adds to a host while training."""
    without = replace(row.found.setup, optimizer="none", params="none")
    quiet = estimate(row.found.shape, without, row.found.hardware)
    return sum(sum_at(e.memory.terms, "ram", "step") * sign for e, sign in ((row.found, 1), (quiet, -1))) / 1e9


if __name__ == "__main__":
    main()
