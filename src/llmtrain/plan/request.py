"""From what a user asked on the command line to a model's shape, a setup and the hosts: reads files, asks no host."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.errors import UsageError
from llmtrain.plan.catalogue import Hardware, find_accelerator, parse_assumptions, parse_count, plan_hardware
from llmtrain.plan.setup import Lora, Setup, plan_setup
from llmtrain.plan.shape import ModelShape, read_shape
from llmtrain.spec.batch import BatchRequest
from llmtrain.spec.choice import Choice
from llmtrain.spec.dsconfig import Wanted, render_deepspeed
from llmtrain.spec.hostfile import Cluster, Host, read_hostfile, select
from llmtrain.spec.modelinfo import ModelInfo
from llmtrain.spec.presets import overrides_layer, read_config

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmtrain.spec.runspec import RunSpec

USUAL = "A100-80G"


@dataclass(frozen=True, kw_only=True)
class Request:
    """Everything an estimate needs."""

    shape: ModelShape
    """The model."""
    setup: Setup
    """The run."""
    hardware: Hardware
    """Its hosts."""
    cluster: Cluster
    """Their names and slots."""
    choices: tuple[Choice, ...]
    """What nobody gave, and what was taken instead."""


def parse_cluster(text: str) -> tuple[Cluster, str]:
    """``6x8xA100-80G``: hosts, slots of each, accelerator.

    Raises:
        UsageError: not of that form, or an unknown accelerator.
    """
    match = re.fullmatch(r"(\d{1,5})x(\d{1,3})x(.+)", text.strip())
    if match is None or not int(match[1]) or not int(match[2]):
        raise UsageError(
            f"--cluster {text} is not HOSTSxSLOTSxACCELERATOR", where="--cluster", fix="as in --cluster 6x8xA100-80G"
        )
    hosts = tuple(Host(name=f"host{index}", slots=tuple(range(int(match[2])))) for index in range(int(match[1])))
    return Cluster(hosts=hosts, origin="--cluster"), find_accelerator(match[3])


def read_request(spec: RunSpec, *, cluster: str | None = None, assumptions: Sequence[str] = ()) -> Request:
    """Read model, preset and hosts.

    Args:
        spec: the run.
        cluster: hosts one does not have yet; wins over the hostfile.
        assumptions: ``KEY=VALUE`` texts laid over the catalogue.

    Raises:
        UsageError: something needed is missing or cannot be read.
        InputFileError: a file cannot be used.
    """
    if spec.model.path is None:
        raise UsageError("--model is missing", where="command line", fix="--model DIR, or a config.json alone")
    given = parse_assumptions(assumptions)
    choices: list[Choice] = []
    machines, accelerator = _machines(spec, cluster, given.get("gpu"), choices)
    shape = read_shape(spec.model.path)
    preset = spec.config
    if preset is None:
        preset = "zero3"
        choices.append(Choice(key="config", value=preset, reason="none was given"))
    if preset == "auto":
        preset = "zero3"
    slots = max(len(host.slots) for host in machines.hosts)
    if len({len(host.slots) for host in machines.hosts}) > 1:
        choices.append(Choice(key="slots", value=slots, reason="hosts differ; the largest is the tightest"))
    rendered = render_deepspeed(
        read_config(preset),
        overrides_layer(spec.deepspeed),
        model=_info(shape),
        wanted=_wanted(spec, machines.world_size),
    )
    setup = read_setup(spec, rendered.config, ranks=machines.world_size, slots=slots)
    if "loss" in given:
        if given["loss"] not in {"logits", "fused"}:
            raise UsageError(f"loss={given['loss']} is neither logits nor fused", where="--assume", fix="loss=logits")
        setup = replace(setup, tiled_loss=False, fused_loss=given["loss"] == "fused")
    if given.get("load") == "whole":
        setup = replace(setup, whole_load=True)
    if "lora.rank" in given:
        setup = replace(setup, lora=Lora(rank=parse_count("lora.rank", given["lora.rank"])))
    return Request(
        shape=shape,
        setup=setup,
        hardware=plan_hardware(accelerator, assumptions),
        cluster=machines,
        choices=(*choices, *rendered.choices),
    )


def read_setup(spec: RunSpec, config: Mapping[str, Any], *, ranks: int, slots: int) -> Setup:
    """What of a run decides its memory and speed.

    Args:
        spec: the run.
        config: its DeepSpeed configuration, without "auto".
        ranks: ranks of the run.
        slots: ranks on the fullest host.
    """
    own = {"targets": spec.lora.targets} if spec.lora.targets else {}
    return plan_setup(
        config,
        ranks=ranks,
        slots=slots,
        length=spec.data.max_length,
        checkpointing=spec.training.gradient_checkpointing,
        attention="sdpa" if spec.model.attention == "auto" else spec.model.attention,
        tiled_loss=True,
        workers=spec.training.loader_workers,
        two_groups=config.get("optimizer") is None,
        pin_native=spec.env.get("DS_PIN_MEMORY_BACKEND") == "native",
        expandable="expandable_segments:True" in spec.env.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        lora=Lora(rank=spec.lora.rank, **own) if spec.lora.rank else None,
    )


def _machines(spec: RunSpec, cluster: str | None, gpu: str | None, choices: list[Choice]) -> tuple[Cluster, str]:
    if cluster is not None:
        machines, accelerator = parse_cluster(cluster)
        return machines, find_accelerator(gpu) if gpu else accelerator
    if spec.hosts is None:
        raise UsageError(
            "neither --hosts nor --cluster",
            where="command line",
            fix="for hosts you do not have yet: --cluster 2x8xA100-80G",
        )
    if gpu is None:
        choices.append(Choice(key="gpu", value=USUAL, reason="no host was asked; --assume gpu=NAME says otherwise"))
    return select(read_hostfile(spec.hosts)), find_accelerator(gpu or USUAL)


def _wanted(spec: RunSpec, world_size: int) -> Wanted:
    return Wanted(
        world_size=world_size,
        batch=BatchRequest(global_=spec.batch.global_, micro=spec.batch.micro, accumulation=spec.batch.accumulation),
        dtype="bf16" if spec.model.dtype == "auto" else spec.model.dtype,
        learning_rate=spec.training.learning_rate,
        weight_decay=spec.training.weight_decay,
        max_grad_norm=spec.training.max_grad_norm,
    )


def _info(shape: ModelShape) -> ModelInfo:
    """What resolving "auto" asks of a model; only the hidden size matters."""
    return ModelInfo(
        path=Path(shape.name),
        architecture=shape.family,
        hidden_size=shape.hidden,
        layers=shape.layers,
        vocab_size=shape.vocab,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        intermediate_size=shape.config.inner,
        max_position=None,
        tied_embeddings=shape.tied,
        dtype="bf16",
        parameters=shape.total,
        has_chat_template=False,
        weights=(),
    )
