"""One rank of a real DeepSpeed run of tiny models on gloo: measures its own tensors and its own collectives.

Called as ``python zero_rank.py RANK WORLD PORT CASES.json OUT.json``; all cases run in one process group.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

RANK, WORLD, PORT = (int(value) for value in sys.argv[1:4])
os.environ.update(
    RANK=str(RANK),
    LOCAL_RANK=str(RANK),
    WORLD_SIZE=str(WORLD),
    MASTER_ADDR="127.0.0.1",
    MASTER_PORT=str(PORT),
    DS_ACCELERATOR="cpu",
    OMP_NUM_THREADS="1",
)

# DeepSpeed reads the environment when it is imported.
import deepspeed  # noqa: E402
import torch  # noqa: E402
from deepspeed.comm import comm  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, Trainer  # noqa: E402

logging.disable(logging.WARNING)
calls: list[tuple[str, int]] = []


def watch(backend):
    """Count every collective with the bytes of the whole (gathered or to be reduced) tensor."""
    largest = {"all_gather_into_tensor": 0, "reduce_scatter_tensor": 1, "all_reduce": 0, "reduce": 0, "broadcast": 0}
    for name, position in largest.items():
        real = getattr(backend, name)

        def counted(*args, _name=name, _real=real, _position=position, **kwargs):
            keys = ("output_tensor", "input_tensor") if "into" in _name or "scatter" in _name else ("tensor", "tensor")
            tensor = args[_position] if len(args) > _position else kwargs[keys[_position]]
            calls.append((_name, tensor.numel() * tensor.element_size()))
            return _real(*args, **kwargs)

        setattr(backend, name, counted)


def size(tensors):
    """Bytes of the distinct storages behind some tensors."""
    seen = {}
    for tensor in tensors:
        if tensor is not None and tensor.numel():
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


def own(optimizer, stage):
    """Bytes by role, of this rank's optimizer."""
    if stage == 3:
        flat = [item for item in optimizer.fp16_partitioned_groups_flat if item is not None]
        return {
            "weights": size([*flat, *optimizer.param_groups_fp16_flat_cpu_memory]),
            "persistent": sum(p.numel() * p.element_size() for p in optimizer.persistent_parameters),
            "master": size(optimizer.fp32_partitioned_groups_flat),
            "step_gradient": size([item.grad for item in optimizer.fp32_partitioned_groups_flat]),
            "gradients": size([optimizer.grad_partitions_flat_buffer]),
            "bucket": size([bucket.buffer for bucket in optimizer.ipg_buckets.values()]),
            "sub_groups": list(optimizer.fp16_partitioned_groups_flat_numel),
        }
    return {
        "weights": size(optimizer.bit16_groups_flat),
        "master": size(optimizer.single_partition_of_fp32_groups),
        "upload": size(getattr(optimizer, "param_buffer_of_bit16_for_cpu_offload_groups", [])),
        "padding": list(optimizer.groups_padding),
    }


def watch_buckets(optimizer, sizes):
    """Stages 1 and 2 make their buckets for each backward pass anew."""
    real = optimizer.setup_buckets

    def watched():
        real()
        sizes["bucket"] = size(buffer for bucket in optimizer.ipg_buckets.values() for buffer in bucket.buffer)

    optimizer.setup_buckets = watched


def accumulated(optimizer):
    """Bytes of gradients held between backward and step."""
    held = [t for group in optimizer.averaged_gradients.values() if group is not None for t in group]
    host = [item.grad for item in optimizer.single_partition_of_fp32_groups] if optimizer.cpu_offload else []
    offloaded = list(getattr(optimizer, "accumulated_grads_in_cpu", {}).values()) if optimizer.cpu_offload else []
    return {"gradients": size(held), "accumulated": size(offloaded), "step_gradient": size(host)}


def run(case):
    """Train one case for three steps and report the last."""
    torch.manual_seed(0)
    stage = case["deepspeed"]["zero_optimization"]["stage"]
    config = AutoConfig.for_model(case["model_type"], **case["keys"])
    config._attn_implementation = "eager"
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[case["dtype"]]
    with deepspeed.zero.Init(config_dict_or_path=case["deepspeed"], enabled=stage == 3, dtype=dtype):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.config.use_cache = False
    if case["checkpointing"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    names = set(Trainer.get_decay_parameter_names(None, model))
    groups = [
        [p for n, p in model.named_parameters() if n in names],
        [p for n, p in model.named_parameters() if n not in names],
    ]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups if group], lr=1e-4)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=case["deepspeed"])
    zero, sizes, traffic = engine.optimizer, {}, []
    if stage in (1, 2):
        watch_buckets(zero, sizes)
    for step in range(3):
        for micro in range(case["accumulation"]):
            calls.clear()
            ids = torch.randint(0, 90, (case["micro"], 7))
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            if micro == case["accumulation"] - 1 and step == 2 and stage in (1, 2):
                sizes |= accumulated(zero)
            during = list(calls)
            calls.clear()
            engine.step()
            traffic.append({"backward": during, "step": list(calls)})
    sizes = {**own(zero, stage), **sizes}
    sizes["moments"] = size(
        t for state in zero.optimizer.state.values() for t in state.values() if torch.is_tensor(t) and t.dim()
    )
    engine.destroy()
    return {"sizes": sizes, "traffic": traffic[-case["accumulation"] :]}


def main():
    """Run every case and write what was measured."""
    deepspeed.init_distributed(dist_backend="gloo")
    watch(comm.cdb)
    cases = json.loads(Path(sys.argv[4]).read_text())
    results = [run(case) for case in cases]
    Path(sys.argv[5]).write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


main()
