"""Render a DeepSpeed configuration without touching any host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmtrain.errors import UsageError
from llmtrain.spec.batch import BatchRequest
from llmtrain.spec.dsconfig import Rendered, Wanted, render_deepspeed
from llmtrain.spec.hostfile import read_hostfile, select
from llmtrain.spec.modelinfo import read_model
from llmtrain.spec.presets import overrides_layer, read_config

if TYPE_CHECKING:
    from llmtrain.launch.job import Selection
    from llmtrain.spec.runspec import RunSpec
    from llmtrain.spec.script import Script


def render(spec: RunSpec, selection: Selection) -> Rendered:
    """The DeepSpeed JSON of a run, with what no host is asked for assumed: NVIDIA GPUs that have bf16.

    Raises:
        UsageError: no configuration is named.
        InputFileError: a file cannot be used, or its keys do not fit the run.
    """
    if spec.config is None:
        raise UsageError("--config is missing", where="command line", fix="add --config zero3-offload")
    world_size = 1
    if spec.hosts is not None:
        cluster = select(
            read_hostfile(spec.hosts),
            include=selection.include,
            exclude=selection.exclude,
            num_hosts=selection.num_hosts,
        )
        world_size = cluster.world_size
    model = read_model(spec.model.path) if spec.model.path else None
    return render_deepspeed(
        read_config(spec.config), overrides_layer(spec.deepspeed), model=model, wanted=assume(spec, world_size)
    )


def assume(spec: RunSpec, world_size: int, script: Script | None = None) -> Wanted:
    """What a run asks of DeepSpeed where no host has been asked yet."""
    return Wanted(
        world_size=world_size,
        batch=BatchRequest(global_=spec.batch.global_, micro=spec.batch.micro, accumulation=spec.batch.accumulation),
        dtype="bf16" if spec.model.dtype == "auto" else spec.model.dtype,
        learning_rate=spec.training.learning_rate,
        weight_decay=spec.training.weight_decay,
        max_grad_norm=spec.training.max_grad_norm,
        accelerator=spec.env.get("DS_ACCELERATOR", "cuda"),
        own_script=script is not None,
        reads_resolved=script is not None and script.uses("ds_config_resolved"),
        max_steps=spec.training.max_steps,
    )
