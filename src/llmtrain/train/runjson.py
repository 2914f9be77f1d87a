"""Read the run.json that a rank is started with (standard library only: it is read before torch is imported)."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from llmtrain.errors import InputFileError
from llmtrain.spec.source import Source, parse_source

SCHEMA = 1
_Part = TypeVar("_Part")


@dataclass(frozen=True, kw_only=True)
class ModelPart:
    """Which model, and how it is loaded."""

    path: str
    """Absolute path of a Hugging Face model directory."""
    dtype: str
    """``bf16``, ``fp16`` or ``fp32``."""
    attention: str
    """``sdpa``, ``flash_attention_2`` or ``eager``."""
    trust_remote_code: bool
    """Whether Python files in the model directory may run."""


@dataclass(frozen=True, kw_only=True)
class DataPart:
    """What is trained on."""

    path: str
    """Absolute path of the data file."""
    sources: tuple[Source, ...]
    """All files, with their formats; ``path`` is the first."""
    format: str
    """Name of the format; ``text`` has no chat template, ``mixed`` stands for several."""
    max_length: int
    """Longest example in tokens; longer ones are cut at the end."""
    packing: bool
    """Whether several examples share a row."""
    eval: float | str | None
    """Share of the examples held out, or the path of a file of them, or nothing."""
    chat_template: str | None
    """Name of a template, or the path of one; None takes the model's own."""
    tokenized: str | None
    """Absolute path of the rows, tokenized beforehand; None where the ranks of each host do it."""


@dataclass(frozen=True, kw_only=True)
class BatchPart:
    """How many examples make a step: global = micro x accumulation x world size."""

    global_size: int
    """Examples per optimizer step, over all ranks (``global`` in the file)."""
    micro: int
    """Examples per rank and forward pass."""
    accumulation: int
    """Forward passes per optimizer step."""


@dataclass(frozen=True, kw_only=True)
class TrainingPart:
    """How long and how fast it learns."""

    max_steps: int | None
    """Optimizer steps; wins over ``epochs``."""
    epochs: float | None
    """Passes over the data."""
    learning_rate: float
    """The highest learning rate."""
    schedule: str
    """``cosine``, ``linear`` or ``constant``, after the warm-up."""
    warmup_steps: int | None
    """Steps until the highest learning rate; None means 3 % of the steps, rounded down."""
    weight_decay: float
    """AdamW's decoupled weight decay."""
    max_grad_norm: float
    """Gradients are clipped to this norm."""
    seed: int
    """Of data order, held-out split and dropout."""
    save_steps: int | None
    """A checkpoint every so many steps; None for none."""
    eval_steps: int | None
    """An evaluation every so many steps; None for one at the end."""
    gradient_checkpointing: bool
    """Whether activations are computed again in the backward pass."""
    resume: str | None
    """Checkpoint directory to go on from, present on every host."""
    loader_workers: int
    """Processes per rank that prepare batches."""


@dataclass(frozen=True, kw_only=True)
class LoraPart:
    """Adapters instead of the weights."""

    rank: int
    """Columns of their factors."""
    alpha: float
    """They are added times alpha / rank."""
    dropout: float
    """Share of their input that is dropped in training."""
    targets: tuple[str, ...]
    """Last parts of the names of the layers that get one; all linear ones but the output if empty."""


@dataclass(frozen=True, kw_only=True)
class CheckpointPart:
    """When to save besides ``training.save_steps``, and for how long."""

    keep: int
    """Checkpoints kept on each host."""
    save_minutes: float
    """A checkpoint when the last is so old; 0 for none."""
    copies: bool
    """Whether each host's files are copied to the next host afterwards."""


@dataclass(frozen=True, kw_only=True)
class ScriptPart:
    """A program of the user's own."""

    kind: str
    """``file``, ``module`` or ``console``."""
    target: str
    """Absolute path of the file, name of the module, or name of the command."""
    args: tuple[str, ...]
    """Its arguments, with every path filled in."""
    cwd: str
    """Absolute path of the folder it runs in."""


@dataclass(frozen=True, kw_only=True)
class RankRun:
    """Everything that a rank knows about its run."""

    run_id: str
    """Name of the run, unique on the head."""
    host: str
    """This host, as the hostfile calls it."""
    run_dir: Path
    """The run's folder on this host."""
    world_size: int
    """Planned number of ranks."""
    ranks: tuple[int, ...]
    """The ranks on this host."""
    task: str
    """``finetune`` or ``script``."""
    script: ScriptPart | None
    """The user's program, for the task ``script``; model and data have empty paths where it was given none."""
    model: ModelPart
    """The model."""
    data: DataPart
    """The data."""
    batch: BatchPart
    """The batch sizes."""
    training: TrainingPart
    """The rest of the recipe."""
    lora: LoraPart | None
    """Adapters that are trained instead of the weights."""
    deepspeed: dict[str, Any]
    """The DeepSpeed configuration, without any ``auto``."""
    threads: int
    """CPU threads per rank."""
    cores: dict[int, tuple[int, ...]]
    """CPUs to bind to, by local rank; empty for no binding."""
    output: Path
    """Where the tuned model goes, on rank 0's host."""
    checkpoints: Path
    """Where checkpoints go, on every host."""
    checkpoint: CheckpointPart
    """When they are made, and kept."""
    grace_s: float
    """Seconds between being asked to stop and being killed."""


def read_run(path: Path) -> RankRun:
    """Read a run.json.

    Raises:
        InputFileError: it cannot be read, has another schema, or lacks a key.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise InputFileError(f"the run file cannot be read: {problem}", where=str(path)) from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        found = document.get("schema") if isinstance(document, dict) else type(document).__name__
        raise InputFileError(
            f"the run file has schema {found!r}, this rank reads {SCHEMA}",
            where=str(path),
            fix="start the run again, so that the rank code and run.json come from one version of llmtrain",
        )
    try:
        return _parse_run(document)
    except _MissingKeyError as missing:
        raise InputFileError(f"the run file lacks {missing}", where=str(path)) from None


class _MissingKeyError(Exception):
    """The dotted name of a key that must be there."""


def _parse_run(document: dict[str, Any]) -> RankRun:
    batch = dict(_take(document, "batch", ""))
    if "global" in batch:
        batch["global_size"] = batch.pop("global")
    values = {
        **document,
        "run_dir": Path(_take(document, "run_dir", "")),
        "output": Path(_take(document, "output", "")),
        "checkpoints": Path(_take(document, "checkpoints", "")),
        "ranks": tuple(_take(document, "ranks", "")),
        "cores": {int(rank): tuple(cpus) for rank, cpus in (document.get("cores") or {}).items()},
        "model": _part(ModelPart, _take(document, "model", ""), "model."),
        "data": _part(DataPart, _with_sources(_take(document, "data", "")), "data."),
        "batch": _part(BatchPart, batch, "batch."),
        "training": _part(TrainingPart, _take(document, "training", ""), "training."),
        "script": _script(document.get("script")),
        "checkpoint": _part(CheckpointPart, _take(document, "checkpoint", ""), "checkpoint."),
        "lora": _lora(document.get("lora")),
    }
    return _part(RankRun, values, "")


def _with_sources(data: dict[str, Any]) -> dict[str, Any]:
    plain = {"path": data.get("path"), "format": data.get("format")}
    return {"tokenized": None, **data, "sources": tuple(map(parse_source, data.get("sources") or [plain]))}


def _lora(values: dict[str, Any] | None) -> LoraPart | None:
    if values is None:
        return None
    return _part(LoraPart, {**values, "targets": tuple(_take(values, "targets", "lora."))}, "lora.")


def _script(values: dict[str, Any] | None) -> ScriptPart | None:
    if values is None:
        return None
    return _part(ScriptPart, {**values, "args": tuple(_take(values, "args", "script."))}, "script.")


def _part(kind: type[_Part], values: dict[str, Any], prefix: str) -> _Part:
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: _take(values, name, prefix) for name in names})


def _take(values: dict[str, Any], name: str, prefix: str) -> Any:
    if name not in values:
        raise _MissingKeyError(prefix + name.removesuffix("_size") if prefix == "batch." else prefix + name)
    return values[name]
