from __future__ import annotations

from dataclasses import replace

import pytest

from llmtrain.errors import DoesNotFitError, ExitCode
from llmtrain.plan.catalogue import plan_hardware
from llmtrain.plan.choose import choose_setup, smallest_changes
from llmtrain.plan.estimate import check_fit, estimate, estimate_json, refuse_what_cannot_fit
from llmtrain.plan.hostmemory import power_of_two
from llmtrain.plan.memory import estimate_memory
from llmtrain.plan.setup import Lora, Setup, plan_setup
from llmtrain.plan.shape import plan_shape

LLAMA_7B = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
}
SHAPE = plan_shape(LLAMA_7B, name="7B")
HOSTS = plan_hardware("A100-80G")
BASE = Setup(stage=3, ranks=8, slots=8, micro=2, accumulation=4, length=2048)


def named(setup, place="gpu"):
    """Term name -> bytes; terms of one name are added."""
    found = {}
    for term in estimate_memory(SHAPE, setup).terms:
        if term.place == place:
            found[term.name] = found.get(term.name, 0) + term.size_bytes
    return found


def test_counts_llama_7b():
    """LLaMA-7B has the 6,738,415,616 parameters its paper says."""
    assert SHAPE.total == 6_738_415_616


def test_every_term_explains_itself():
    """No number is shown without its formula and source."""
    for stage in (0, 1, 2, 3):
        for term in estimate_memory(SHAPE, replace(BASE, stage=stage)).terms:
            assert term.formula
            assert term.source
            assert term.phases


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_states_shrink_with_ranks(stage):
    """Dividing over more ranks never takes more memory on one of them."""
    sizes = [
        estimate_memory(SHAPE, replace(BASE, stage=stage, ranks=n, slots=min(n, 8))).allocated_bytes
        for n in (1, 2, 8, 64)
    ]
    assert sizes == sorted(sizes, reverse=True)


def test_offload_moves_states_to_the_host():
    """What offloading takes off the accelerator appears on the host."""
    here, away = named(BASE), named(replace(BASE, optimizer="cpu", params="cpu"))
    assert "Adam moments" in here
    assert "Adam moments" not in away
    host = named(replace(BASE, optimizer="cpu", params="cpu"), "ram")
    assert host["Adam moments"] == pytest.approx(8 * SHAPE.total, rel=1e-3)
    assert host["master weights"] == pytest.approx(4 * SHAPE.total, rel=1e-3)


def test_nvme_leaves_buffers_in_memory():
    """On NVMe lie the states; the host keeps the swap buffers."""
    setup = replace(BASE, optimizer="nvme", params="nvme")
    assert estimate_memory(SHAPE, setup).nvme_bytes == pytest.approx(18 * SHAPE.total, rel=1e-3)
    assert named(setup, "ram")["weight swap buffers"] == 8 * power_of_two(2 * 5 * 100_000_000)


def test_partial_offload():
    """A ratio below one leaves the first sub-groups on the accelerator."""
    setup = replace(BASE, optimizer="cpu", optimizer_ratio=0.5, sub_group=10_000_000)
    half = named(setup)["Adam moments"] / named(BASE)["Adam moments"]
    assert half == pytest.approx(0.5, abs=0.05)


def test_page_locked_blocks_are_powers_of_two():
    """PyTorch rounds each page-locked block up; DeepSpeed's own page-locking does not."""
    assert (power_of_two(1), power_of_two(4096), power_of_two(4097)) == (1, 4096, 8192)
    rounded = named(replace(BASE, optimizer="cpu"), "ram")["gradients"]
    exact = named(replace(BASE, optimizer="cpu", pin_native=True), "ram")["gradients"]
    assert rounded == 8 * power_of_two(exact // 8)


def test_hpz_holds_a_second_partition():
    """HpZ costs the weights once more, divided over its group."""
    assert named(replace(BASE, hpz=8))["second partition"] == 2 * SHAPE.total // 8


def test_lora_has_states_of_adapters_only():
    """With LoRA the frozen weights have no gradients, master weights or moments."""
    setup = replace(BASE, lora=Lora(rank=8))
    assert named(setup)["Adam moments"] < named(BASE)["Adam moments"] / 100
    assert named(setup)["weights"] == named(BASE)["weights"]


def test_whole_load_is_the_worst_of_the_host():
    """Without zero.Init every rank of a host loads the whole model."""
    setup = replace(BASE, whole_load=True)
    assert named(setup, "ram")["loading"] == 8 * named(BASE, "ram")["loading"]


def test_first_step_comes_after_the_first_backward():
    """Adam's moments are not there before the first step, and stay after it."""
    moments = next(term for term in estimate_memory(SHAPE, BASE).terms if term.name == "Adam moments")
    assert "first step" in moments.phases
    assert "load" not in moments.phases


def test_three_sizes_are_told_apart():
    """Allocated, reserved and device memory are three numbers, in this order."""
    memory = estimate_memory(SHAPE, BASE)
    assert memory.allocated_bytes < memory.reserved_bytes < memory.device_bytes


def test_json_has_the_promised_keys():
    """Scripts find the keys the documentation names."""
    document = estimate_json(estimate(SHAPE, BASE, HOSTS))
    assert document["gpu"]["peak_allocated_bytes"] > 0
    assert document["gpu"]["peak_reserved_bytes"] > 0
    assert document["host"]["ram_bytes"] > 0
    assert document["verdict"] in ("fits", "tight", "no")
    assert document["step"]["seconds"] > 0
    assert document["step"]["tokens_per_s_per_gpu"] > 0
    assert document["terms"]


def test_launch_is_refused_with_exit_5():
    """A run whose tensors alone are beyond its accelerators is refused; the error says what would fit."""
    found = estimate(SHAPE, replace(BASE, stage=0, ranks=1, slots=1, micro=16), plan_hardware("A10-24G"))
    with pytest.raises(DoesNotFitError) as refused:
        refuse_what_cannot_fit(found, fixes=("--config zero3-offload",))
    assert refused.value.exit_code == ExitCode.DOES_NOT_FIT
    assert refused.value.fix == "--config zero3-offload"


def test_what_fits_or_may_fit_is_launched():
    """A run that fits passes without a word."""
    refuse_what_cannot_fit(estimate(SHAPE, BASE, HOSTS))


def test_host_limits_count():
    """A host with too little memory makes the verdict no, whatever the accelerators have."""
    hosts = plan_hardware("A100-80G", ["host.ram=64GB"])
    found = estimate(SHAPE, replace(BASE, optimizer="cpu", params="cpu"), hosts)
    assert found.fit.verdict == "no"
    assert "host memory" in found.fit.reason


def test_smallest_changes_do_fit():
    """Every change that is offered makes the run fit, and says what it costs."""
    found = estimate(SHAPE, replace(BASE, stage=2, micro=16, checkpointing=False), plan_hardware("A100-40G"))
    changes = smallest_changes(found)
    assert changes
    assert all(change.estimate.fit.verdict == "fits" for change in changes)
    kept = [change.slowdown for change in changes if "max_length" not in change.setting]
    assert kept == sorted(kept)


def test_choice_fits_and_repeats():
    """The first row fits, none that fits is faster, and the same question has the same answer."""
    first, second = (choose_setup(SHAPE, BASE, HOSTS) for _ in range(2))
    assert first.rows[0].fit.verdict == "fits"
    speeds = [row.step.tokens_per_s_per_gpu for row in first.rows if row.fit.verdict == "fits"]
    assert speeds[0] == pytest.approx(max(speeds), rel=1e-3)
    assert [row.setup for row in first.rows] == [row.setup for row in second.rows]
    assert all(row.setup.global_batch == BASE.global_batch for row in first.rows)


def test_more_memory_never_slows_the_choice():
    """The best on larger accelerators is at least as fast as the best on smaller ones."""
    speeds = []
    for memory in ("24GiB", "40GiB", "80GiB"):
        best = choose_setup(SHAPE, BASE, plan_hardware("A100-80G", [f"gpu.memory={memory}"])).rows[0]
        speeds.append(best.step.tokens_per_s_per_gpu if best.fit.verdict == "fits" else 0)
    assert speeds == sorted(speeds)


def test_reads_a_deepspeed_configuration():
    """DeepSpeed's keys and defaults become the setup's fields."""
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 5,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "ratio": 0.4},
            "stage3_max_reuse_distance": 7,
            "zero_hpz_partition_size": 2,
        },
    }
    setup = plan_setup(config, ranks=4, slots=2, length=128)
    assert (setup.micro, setup.accumulation, setup.optimizer, setup.optimizer_ratio) == (3, 5, "cpu", 0.4)
    assert (setup.max_reuse, setup.hpz, setup.pin, setup.overlap, setup.dtype) == (7, 2, True, True, "bf16")
    assert setup.sub_group == 1_000_000_000


def test_launch_asks_with_the_hosts_real_limits():
    """What the hosts really have replaces the catalogue, and the refusal names a change that would fit."""
    setup = replace(BASE, optimizer="cpu", params="cpu")
    assert check_fit(SHAPE, setup, HOSTS, ram_bytes=2**40).fit.verdict == "fits"
    with pytest.raises(DoesNotFitError) as refused:
        check_fit(SHAPE, replace(BASE, stage=2), HOSTS, ram_bytes=2**40, gpu_bytes=16 * 2**30)
    assert "zero3" in refused.value.fix
