"""What DeepSpeed itself allocates and sends on CPU ranks, beside what the formulas say; equal to the byte."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from llmtrain.plan.devicememory import device_terms
from llmtrain.plan.gather import plan_gathers
from llmtrain.plan.partition import persistent, plan_flat_groups, plan_sub_groups
from llmtrain.plan.setup import plan_setup
from llmtrain.plan.shape import plan_shape
from llmtrain.plan.traffic import plan_traffic

ODD = {
    "vocab_size": 97,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 37,
    "max_position_embeddings": 51,
}
CPU = {"device": "cpu", "pin_memory": False}


def case(stage, *, ranks, checkpointing=False, dtype="bf16", accumulation=2, **zero):
    """A tiny model under one DeepSpeed configuration."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": accumulation * ranks,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 700, **zero},
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    return {
        "model_type": "llama",
        "keys": ODD,
        "dtype": dtype,
        "checkpointing": checkpointing,
        "accumulation": accumulation,
        "micro": 1,
        "deepspeed": config,
    }


def cases(ranks):
    """Stages, offloads, sub-groups, persistence, reuse; on two ranks all of them, elsewhere the ones that pad."""
    common = [
        case(2, ranks=ranks, overlap_comm=True),
        case(3, ranks=ranks, stage3_param_persistence_threshold=50, sub_group_size=1000),
    ]
    if ranks != 2:
        return common
    small = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    return [
        *common,
        case(1, ranks=ranks),
        case(2, ranks=ranks, offload_optimizer=CPU),
        case(3, ranks=ranks, checkpointing=True, **small),
        case(3, ranks=ranks, stage3_param_persistence_threshold=30, offload_optimizer=CPU, offload_param=CPU),
        case(3, ranks=ranks, dtype="fp32", accumulation=1, stage3_param_persistence_threshold=30),
    ]


def run(folder: Path, ranks: int):
    """Measure all cases in one process group; one result per rank and case."""
    wanted = cases(ranks)
    (folder / "cases.json").write_text(json.dumps(wanted))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    script = Path(__file__).with_name("zero_rank.py")
    logs = [(folder / f"{rank}.log").open("wb") for rank in range(ranks)]
    started = []
    for rank, log in enumerate(logs):
        argv = [sys.executable, "-W", "ignore", str(script), str(rank), str(ranks), port]
        argv += [str(folder / "cases.json"), str(folder / f"{rank}.json")]
        started.append(subprocess.Popen(argv, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}))
    codes = [process.wait(timeout=280) for process in started]
    for log in logs:
        log.close()
    assert codes == [0] * ranks, (folder / "0.log").read_text()[-2000:]
    return wanted, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module", params=[1, 2, 3, 4, 8])
def measured(request, tmp_path_factory):
    """Cases and results of one number of ranks."""
    return request.param, *run(tmp_path_factory.mktemp(f"ranks{request.param}"), request.param)


def plans(measured):
    """Each case with its shape, setup and results by rank."""
    ranks, wanted, results = measured
    for index, one in enumerate(wanted):
        shape = plan_shape({**one["keys"], "model_type": "llama"}, name="tiny")
        setup = plan_setup(one["deepspeed"], ranks=ranks, slots=ranks, length=7, checkpointing=one["checkpointing"])
        yield shape, setup, [results[rank][index] for rank in range(ranks)]


def test_states_to_the_byte(measured):
    """Weights, master weights, moments, gradients, upload buffers and buckets equal DeepSpeed's own tensors."""
    for shape, setup, results in plans(measured):
        for rank, result in enumerate(results):
            assert expected_sizes(shape, setup, rank) == {
                key: result["sizes"][key] for key in expected_sizes(shape, setup, rank)
            }


def expected_sizes(shape, setup, rank):
    """What the formulas say, by the probe's names."""
    offloaded = setup.optimizer != "none"
    if setup.stage == 3:
        groups = plan_sub_groups(shape, setup)
        own = sum(group.numel for group in groups)
        return {
            "weights": setup.width * own,
            "persistent": setup.width * sum(item.numel for item in persistent(shape, setup)),
            "master": 4 * own,
            "moments": 8 * own,
            "gradients": setup.gradient_width * own,
            "step_gradient": 4 * own if offloaded else 0,
            "bucket": setup.traffic_width * setup.reduce_bucket,
            "sub_groups": [group.numel for group in groups],
        }
    groups = plan_flat_groups(shape, setup)
    own = sum(group.share for group in groups)
    held = setup.gradient_width * sum(group.held_by(rank) for group in groups)
    return {
        "weights": setup.width * sum(group.total for group in groups),
        "master": 4 * own,
        "moments": 8 * own,
        "gradients": 0 if offloaded else held,
        "accumulated": setup.gradient_width * sum(p.numel for g in groups for p, _, _ in g.owned_by(rank))
        if offloaded
        else 0,
        "step_gradient": 4 * own if offloaded else 0,
        "upload": setup.width * own if offloaded else 0,
        "bucket": setup.traffic_width * setup.reduce_bucket * (2 if setup.overlap else 1),
    }


def test_terms_are_these_sizes(measured):
    """The terms a person is shown are the sizes that were just compared."""
    names = {"master weights": "master", "Adam moments": "moments"}
    for shape, setup, results in plans(measured):
        if setup.optimizer != "none" or setup.width == 4:
            continue
        shown = {item.name: item.size_bytes for item in device_terms(shape, setup)}
        for name, key in names.items():
            assert shown[name] == results[0]["sizes"][key]


def test_collectives_to_the_byte(measured):
    """Calls and bytes of every kind of collective, per micro batch and per step, equal what hooks counted."""
    ranks = measured[0]
    for shape, setup, results in plans(measured):
        last = results[0]["traffic"][-1]
        if ranks == 1:
            continue
        assert counted(last["backward"]) == expected_backward(shape, setup)
        assert counted(last["step"], ignore={"all_reduce"}) == expected_step(shape, setup)


def counted(calls, ignore=frozenset()):
    """Operation -> (calls, bytes)."""
    found = {}
    for name, size in calls:
        if name not in ignore:
            number, total = found.get(name, (0, 0))
            found[name] = (number + 1, total + size)
    return found


def expected_backward(shape, setup):
    """Of the last micro batch."""
    if setup.stage == 3:
        gathers = plan_gathers(shape, setup)
        reduced = next(item for item in plan_traffic(shape, setup) if item.kind == "reduce-scatter")
        return {
            "all_gather_into_tensor": (gathers.calls, setup.width * (gathers.forward + gathers.backward)),
            "reduce_scatter_tensor": (reduced.calls, reduced.size_bytes),
        }
    reduced = next(item for item in plan_traffic(shape, setup) if item.kind == "all-reduce")
    return {"all_reduce": (reduced.calls, reduced.size_bytes)}


def expected_step(shape, setup):
    """At the end of the step; norms and flags of a few bytes are left out."""
    found = [item for item in plan_traffic(shape, setup) if item.per_step and item.kind == "all-gather"]
    return {"all_gather_into_tensor": (found[0].calls, found[0].size_bytes)} if found else {}
