"""Which DeepSpeed keys exist, which are gone and what replaces them.

Taken from DeepSpeed 0.19.8; a test compares these tables with the installed library, so that an upgrade tells us.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, Literal

from llmtrain.errors import InputFileError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from llmtrain.spec.yamlfile import KeyPath

    Where = Callable[[KeyPath], str]

Kind = Literal["bool", "int", "number", "text", "any"]

TOP_LEVEL: frozenset[str] = frozenset(
    [
        "activation_checkpointing",
        "aio",
        "autotuning",
        "bf16",
        "checkpoint",
        "comet",
        "comms_logger",
        "communication_data_type",
        "compile",
        "csv_monitor",
        "data_efficiency",
        "data_types",
        "dataloader_drop_last",
        "datastates_ckpt",
        "disable_allgather",
        "disable_python_gc",
        "dump_state",
        "flops_profiler",
        "fp16",
        "gradient_accumulation_steps",
        "gradient_allreduce_op",
        "gradient_clipping",
        "gradient_predivide_factor",
        "hybrid_engine",
        "log_level",
        "managed_gradient_accumulation",
        "memory_breakdown",
        "optimizer",
        "pipeline",
        "prescale_gradients",
        "scheduler",
        "seq_parallel_communication_data_type",
        "steps_per_print",
        "tensorboard",
        "timers",
        "torch_autocast",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "use_data_before_expert_parallelism",
        "vocabulary_size",
        "wall_clock_breakdown",
        "wandb",
        "weight_quantization",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "zero_optimization",
    ]
)
"""Top-level keys that DeepSpeed reads and that our fine-tune can honour."""

BLOCKS: Mapping[KeyPath, Mapping[str, Kind]] = {
    ("zero_optimization",): {
        "stage": "int",
        "contiguous_gradients": "bool",
        "reduce_scatter": "bool",
        "reduce_bucket_size": "int",
        "use_multi_rank_bucket_allreduce": "bool",
        "allgather_partitions": "bool",
        "allgather_bucket_size": "int",
        "overlap_comm": "bool",
        "compute_grad_norm": "bool",
        "load_from_fp32_weights": "bool",
        "elastic_checkpoint": "bool",
        "offload_param": "any",
        "offload_optimizer": "any",
        "zenflow": "any",
        "sub_group_size": "int",
        "stage3_prefetch_bucket_size": "int",
        "stage3_param_persistence_threshold": "int",
        "stage3_model_persistence_threshold": "int",
        "stage3_max_live_parameters": "int",
        "stage3_max_reuse_distance": "int",
        "stage3_gather_16bit_weights_on_model_save": "bool",
        "stage3_module_granularity_threshold": "int",
        "stage3_use_all_reduce_for_fetch_params": "bool",
        "stage3_allgather_sequential": "bool",
        "ignore_unused_parameters": "bool",
        "round_robin_gradients": "bool",
        "parameter_alignment": "bool",
        "zero_hpz_partition_size": "int",
        "zero_quantized_weights": "bool",
        "zero_quantized_nontrainable_weights": "bool",
        "zero_quantized_gradients": "bool",
        "memory_efficient_linear": "bool",
        "pipeline_loading_checkpoint": "bool",
        "override_module_apply": "bool",
        "log_trace_cache_warnings": "bool",
        "enable_sanity_checks": "bool",
        "save_muon_momentum_buffer_in_memory": "bool",
        "leaf_module": "any",
    },
    ("zero_optimization", "offload_param"): {
        "device": "text",
        "nvme_path": "text",
        "buffer_count": "int",
        "buffer_size": "int",
        "max_in_cpu": "int",
        "pin_memory": "bool",
    },
    ("zero_optimization", "offload_optimizer"): {
        "device": "text",
        "nvme_path": "text",
        "buffer_count": "int",
        "pin_memory": "bool",
        "pipeline_read": "bool",
        "pipeline_write": "bool",
        "fast_init": "bool",
        "ratio": "number",
        "super_offload": "bool",
        "cpuadam_cores_perc": "number",
    },
    ("fp16",): {
        "enabled": "bool",
        "auto_cast": "bool",
        "loss_scale": "number",
        "initial_scale_power": "int",
        "loss_scale_window": "int",
        "hysteresis": "int",
        "consecutive_hysteresis": "bool",
        "min_loss_scale": "int",
        "fp16_master_weights_and_grads": "bool",
    },
    ("bf16",): {
        "enabled": "bool",
        "immediate_grad_update": "bool",
        "check_grad_overflow": "bool",
        "bf16_master_weights_and_grads": "bool",
        "bf16_optimizer_states": "bool",
    },
    ("aio",): {
        "block_size": "int",
        "queue_depth": "int",
        "intra_op_parallelism": "int",
        "single_submit": "bool",
        "overlap_events": "bool",
        "use_gds": "bool",
    },
    ("optimizer",): {"type": "text", "params": "any", "legacy_fusion": "bool"},
    ("checkpoint",): {
        "tag_validation": "text",
        "load_universal": "bool",
        "use_node_local_storage": "bool",
        "parallel_write": "any",
        "checkpoint_serialization": "bool",
        "writer": "any",
    },
    ("data_types",): {
        "grad_accum_dtype": "text",
        "param_dtype": "text",
        "buffer_dtype": "text",
        "keep_in_fp32_modules": "any",
    },
    ("activation_checkpointing",): {
        "partition_activations": "bool",
        "contiguous_memory_optimization": "bool",
        "cpu_checkpointing": "bool",
        "number_checkpoints": "int",
        "synchronize_checkpoint_boundary": "bool",
        "profile": "bool",
    },
    ("torch_autocast",): {"enabled": "bool", "dtype": "text", "lower_precision_safe_modules": "any"},
}
"""Blocks whose keys are known, with the kind of value each takes."""

TOP_LEVEL_KINDS: Mapping[str, Kind] = {
    "train_batch_size": "int",
    "train_micro_batch_size_per_gpu": "int",
    "gradient_accumulation_steps": "int",
    "gradient_clipping": "number",
    "steps_per_print": "number",
    "zero_allow_untested_optimizer": "bool",
    "zero_force_ds_cpu_optimizer": "bool",
    "communication_data_type": "text",
}
"""Kinds of the top-level values that are written most."""

REMOVED: Mapping[KeyPath, str] = {
    ("nebula",): "remove it; checkpoints are written by training.save_steps",
    ("compression_training",): "remove it; quantise the finished model instead",
    ("amp",): "remove it; use bf16 or fp16 with enabled: auto, and model.dtype",
    ("quantize_training",): "remove it; quantise the finished model instead",
    ("sparse_gradients",): "remove it; embeddings made with sparse=True are reduced sparsely without a key",
    ("eigenvalue",): "remove it; it served quantize_training, which is gone too",
    ("sparse_attention",): "remove it; choose the kernel with model.attention",
    ("elasticity",): "remove it; set batch.global, batch.micro and batch.accumulation",
    ("graph_harvesting",): "remove it",
    ("curriculum_learning",): "move it to data_efficiency.data_sampling.curriculum_learning",
    ("progressive_layer_drop",): "remove it",
    ("zero_optimization", "mics_shard_size"): "use zero_hpz_partition_size, the second partition of ZeRO++",
    (
        "zero_optimization",
        "mics_hierarchical_params_gather",
    ): "use zero_hpz_partition_size, the second partition of ZeRO++",
    ("zero_optimization", "zeropp_loco_param"): "remove it; zero_quantized_gradients works without it",
}
"""Keys that DeepSpeed 0.19.8 refuses, with what to do instead."""

REPLACED: Mapping[KeyPath, str] = {
    ("zero_optimization", "cpu_offload"): "write offload_optimizer: {device: cpu}",
    ("zero_optimization", "cpu_offload_param"): "write offload_param: {device: cpu}",
    ("zero_optimization", "cpu_offload_params"): "write offload_param: {device: cpu}",
    ("zero_optimization", "cpu_offload_use_pin_memory"): "write pin_memory inside offload_optimizer and offload_param",
    (
        "zero_optimization",
        "stage3_gather_fp16_weights_on_model_save",
    ): "write stage3_gather_16bit_weights_on_model_save",
    ("zero_optimization", "legacy_stage1"): "remove it; DeepSpeed has refused it since 0.5.9",
    ("allgather_size",): "write zero_optimization.allgather_bucket_size",
    ("bfloat16",): "write bf16",
    ("aio", "thread_count"): "write intra_op_parallelism; thread_count is ignored",
    ("optimizer", "params", "max_grad_norm"): "write gradient_clipping, or set training.max_grad_norm",
}
"""Older names, ignored or half honoured by DeepSpeed today, with what to write."""

NOT_DATA_PARALLEL: Mapping[str, str] = {
    "tensor_parallel": "remove it",
    "expert_parallel": "remove it",
    "sequence_parallel_size": "remove it",
}
"""Keys that make several ranks work on one example: our batch equation and data split would be wrong."""

OPTIMIZERS: frozenset[str] = frozenset(
    {"adagrad", "adam", "adamw", "lamb", "muadam", "muadamw", "musgd", "lion", "muon"}
)
"""DeepSpeed's own optimizers, in lower case."""

TORCH_OPTIMIZERS: frozenset[str] = frozenset(
    {"Adadelta", "Adafactor", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)
"""Optimizers that DeepSpeed takes from torch.optim by their exact name, as far as ZeRO can partition them."""


def check_keys(config: Mapping[str, Any], where: Where) -> None:
    """Refuse keys that DeepSpeed does not know or no longer takes, and values of the wrong kind.

    Args:
        config: DeepSpeed keys, "auto" allowed anywhere.
        where: tells the place in which a key path was written.

    Raises:
        InputFileError: the first fault, with the key path, and what to write instead.
    """
    _refuse_removed(config, where)
    for key, value in config.items():
        if key not in TOP_LEVEL:
            raise _unknown((key,), TOP_LEVEL, where)
        _check_kind((key,), value, TOP_LEVEL_KINDS.get(key, "any"), where)
    for path, kinds in BLOCKS.items():
        block = lookup(config, path)
        if block is None:
            continue
        if not isinstance(block, dict):
            example = f"write {path[-1]}: {{{next(iter(kinds))}: ...}}"
            raise InputFileError(f"{'.'.join(path)} is {block!r}, not a block of keys", where=where(path), fix=example)
        for key, value in block.items():
            if key not in kinds:
                raise _unknown((*path, key), kinds, where)
            _check_kind((*path, key), value, kinds[key], where)


def lookup(config: Mapping[str, Any], path: KeyPath) -> Any:
    """The value at a key path, None where there is none."""
    node: Any = config
    for key in path:
        if not isinstance(node, dict) or key not in node:
            return None
        node = node[key]
    return node


def _refuse_removed(config: Mapping[str, Any], where: Where) -> None:
    for path, fix in REMOVED.items():
        if lookup(config, path) is not None:
            raise InputFileError(f"DeepSpeed has removed {'.'.join(path)}", where=where(path), fix=fix)
    for path, fix in REPLACED.items():
        if lookup(config, path) is not None:
            raise InputFileError(f"{'.'.join(path)} is outdated", where=where(path), fix=fix)
    for key, fix in NOT_DATA_PARALLEL.items():
        if key in config:
            raise InputFileError(
                f"{key} is not supported: every rank trains on examples of its own", where=where((key,)), fix=fix
            )


def _unknown(path: KeyPath, valid: Mapping[str, Any] | frozenset[str], where: Where) -> InputFileError:
    near = difflib.get_close_matches(path[-1], valid, n=1, cutoff=0.5)
    fix = f"did you mean {'.'.join((*path[:-1], near[0]))}?" if near else "remove it"
    home = next((block for block, kinds in BLOCKS.items() if path[-1] in kinds and block != path[:-1]), None)
    if home is not None:
        fix = f"write it as {'.'.join((*home, path[-1]))}"
    elif path[-1] in TOP_LEVEL:
        fix = f"write it at the top level, as {path[-1]}"
    return InputFileError(f"DeepSpeed has no key {'.'.join(path)}", where=where(path), fix=fix)


def _check_kind(path: KeyPath, value: Any, kind: Kind, where: Where) -> None:
    if kind == "any" or value == "auto" or _is_kind(value, kind):
        return
    wanted = {"bool": "true or false", "int": "a whole number", "number": "a number", "text": "text"}[kind]
    raise InputFileError(f"{'.'.join(path)} is {value!r}", where=where(path), fix=f"write {wanted}")


def _is_kind(value: Any, kind: Kind) -> bool:
    if kind == "bool":
        return isinstance(value, bool)
    if kind == "text":
        return isinstance(value, str)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return kind == "number" or value == int(value)


def check_optimizer_type(name: Any, where: Where) -> None:
    """Refuse an optimizer that DeepSpeed would not find.

    Raises:
        InputFileError: it is missing or unknown; names the nearest.
    """
    path = ("optimizer", "type")
    if isinstance(name, str) and (name.lower() in OPTIMIZERS or name in TORCH_OPTIMIZERS):
        return
    if not isinstance(name, str) or name == "auto":
        raise InputFileError(
            "the optimizer block has no type", where=where(path), fix="write type: AdamW, or remove the block"
        )
    valid = {known.lower(): known for known in ("Adam", "AdamW", "Adagrad", "Lamb", "Lion", "Muon", *TORCH_OPTIMIZERS)}
    near = difflib.get_close_matches(name.lower(), valid, n=1, cutoff=0.4)
    fix = f"write type: {valid[near[0]] if near else 'AdamW'}"
    raise InputFileError(f"DeepSpeed has no optimizer {name!r}", where=where(path), fix=fix)
