"""Preset + overrides + model + batch -> the DeepSpeed JSON of a run, every "auto" resolved with a reason.

Two texts come out. ``config`` has numbers everywhere and is what llmtrain's own fine-tune and scripts that call
``deepspeed.initialize`` take. ``template`` keeps "auto" where Hugging Face's Trainer fills it from its arguments;
a stock Trainer script refuses numbers that differ from its own.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from llmtrain.errors import InputFileError
from llmtrain.spec.batch import Batch, BatchRequest, choose_batch, equation
from llmtrain.spec.choice import Choice
from llmtrain.spec.dsdraft import Draft
from llmtrain.spec.dskeys import check_keys, check_optimizer_type
from llmtrain.spec.dsschedule import fill_scheduler

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llmtrain.spec.modelinfo import ModelInfo
    from llmtrain.spec.presets import Layer
    from llmtrain.spec.yamlfile import KeyPath

ZERO = "zero_optimization"
OPTIMIZER_PATH: KeyPath = (ZERO, "offload_optimizer")
PARAM_PATH: KeyPath = (ZERO, "offload_param")
BATCH_KEYS = {
    "train_batch_size": "global",
    "train_micro_batch_size_per_gpu": "micro",
    "gradient_accumulation_steps": "accumulation",
}
ADAM_BETAS = [0.9, 0.999]
ADAM_EPS = 1e-8
"""The Trainer's own defaults; it refuses a DeepSpeed optimizer whose numbers differ from its arguments."""
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a run asks of DeepSpeed besides its keys."""

    world_size: int
    """Number of ranks."""
    batch: BatchRequest
    """What is fixed of the batch."""
    dtype: Literal["bf16", "fp16", "fp32"]
    """Precision of the computation."""
    learning_rate: float
    """Peak learning rate."""
    weight_decay: float
    """Decoupled weight decay."""
    max_grad_norm: float
    """Norm that gradients are clipped to; 0 does not clip."""
    accelerator: str = "cuda"
    """DeepSpeed's name of the accelerator on the hosts; ``cpu`` where there is none."""
    checkpoint_local_storage: bool = False
    """Whether each host keeps its part of a checkpoint on a disk of its own."""
    own_script: bool = False
    """Whether a program of the user's reads the result: it may need a scheduler, and an optimizer it does not make."""
    reads_resolved: bool = False
    """Whether that program reads ``config``; one that reads ``template`` fills what is open itself."""
    max_steps: int | None = None
    """Optimizer steps, where the run says so; only a scheduler asks."""
    nvme_subfolder: str | None = None
    """Folder inside every nvme_path, named after the run: two runs in one folder overwrite each other's swap files."""


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """The DeepSpeed JSON of a run."""

    config: dict[str, Any]
    """No "auto" left."""
    template: dict[str, Any]
    """The same keys with "auto" kept, for scripts that use Hugging Face's Trainer."""
    batch: Batch
    """The batch that ``config`` holds."""
    choices: tuple[Choice, ...]
    """What was filled in or changed, and why."""


def render_deepspeed(preset: Layer, overrides: Layer, *, model: ModelInfo | None, wanted: Wanted) -> Rendered:
    """Lay the overrides over the preset and resolve every "auto".

    Args:
        preset: a preset or a user's file.
        overrides: the ``deepspeed:`` block of the run file; null removes a key.
        model: the model that is tuned; without one, sizes that follow from it are left to DeepSpeed.
        wanted: ranks, batch, precision and training numbers.

    Raises:
        InputFileError: a key or value DeepSpeed would refuse, numbers that contradict the run, a batch that does not
            divide.
    """
    draft = Draft(preset, overrides)
    check_keys(draft.tree, draft.where)
    _check_zero(draft, wanted.world_size)
    _fit_accelerator(draft, wanted.accelerator)
    _fit_checkpoint(draft, local=wanted.checkpoint_local_storage)
    _fit_nvme(draft, wanted.nvme_subfolder)
    template = copy.deepcopy(draft.tree)
    batch = _fill_batch(draft, wanted)
    _fill_precision(draft, wanted.dtype)
    _fill_number(draft, ("gradient_clipping",), wanted.max_grad_norm, "training.max_grad_norm")
    _fill_sizes(draft, model)
    _fill_optimizer(draft, wanted)
    if wanted.own_script:
        fill_scheduler(draft, wanted)
    else:
        _refuse_scheduler(draft)
    _drop_autos(draft)
    return Rendered(config=draft.tree, template=template, batch=batch, choices=tuple(draft.choices))


def _check_zero(draft: Draft, world_size: int) -> None:
    if draft.get(ZERO) is None:
        draft.put((ZERO, "stage"), 0, "no zero_optimization given: plain data parallelism, as DeepSpeed does")
    stage = draft.get(ZERO, "stage")
    if stage is None:
        stage = 0
    if stage not in (0, 1, 2, 3):
        raise InputFileError(f"{ZERO}.stage is {stage!r}", where=draft.where((ZERO, "stage")), fix="write 1, 2 or 3")
    for path, least in ((OPTIMIZER_PATH, 1), (PARAM_PATH, 3)):
        _check_offload(draft, path, stage, least)
    ratio = draft.given(*OPTIMIZER_PATH, "ratio")
    if ratio is not None and ratio < 1 and stage != 3:
        raise InputFileError(
            f"offload_optimizer.ratio needs stage 3, found stage {stage}",
            where=draft.where((*OPTIMIZER_PATH, "ratio")),
            fix="remove ratio, or take stage 3",
        )
    parts = draft.given(ZERO, "zero_hpz_partition_size")
    if parts and world_size % parts:
        raise InputFileError(
            f"zero_hpz_partition_size {parts} does not divide {world_size} ranks",
            where=draft.where((ZERO, "zero_hpz_partition_size")),
            fix="set it to the number of slots of one host",
        )


def _check_offload(draft: Draft, path: KeyPath, stage: int, least: int) -> None:
    device = draft.given(*path, "device")
    where = draft.where((*path, "device"))
    dotted = ".".join(path)
    if device not in (None, "none", "cpu", "nvme"):
        raise InputFileError(f"{dotted}.device is {device!r}", where=where, fix="write cpu, nvme or none")
    if device in (None, "none"):
        return
    if device == "nvme":
        least = 3
    if stage < least:
        raise InputFileError(
            f"{path[-1]} to {device} needs {ZERO}.stage {least}{' or more' if least < 3 else ''}, found {stage}",
            where=where,
            fix=f"remove {dotted}, or take another stage",
        )
    folder = draft.given(*path, "nvme_path")
    if device == "nvme" and not str(folder or "").startswith("/"):
        raise InputFileError(
            f"{dotted} goes to NVMe, and {'its nvme_path is not absolute' if folder else 'no nvme_path says where'}",
            where=where,
            fix=f"add --set deepspeed.{dotted}.nvme_path=/PATH/ON/EVERY/HOST (a folder on a local NVMe drive)",
        )


def _fit_accelerator(draft: Draft, accelerator: str) -> None:
    if accelerator != "cpu":
        return
    for path in ((*OPTIMIZER_PATH, "pin_memory"), (*PARAM_PATH, "pin_memory"), (ZERO, "overlap_comm")):
        # DeepSpeed's default is to pin and, at stage 3, to overlap: a missing key is no "false".
        if draft.get(*path[:-1]) is not None and draft.get(*path) is not False:
            why = "pinning only serves copies to one" if path[-1] == "pin_memory" else "there are no streams to overlap"
            draft.put(path, value=False, reason=f"no accelerator: {why}")


def _fit_checkpoint(draft: Draft, *, local: bool) -> None:
    path = ("checkpoint", "use_node_local_storage")
    if local and draft.get(*path) is None:
        draft.put(path, value=True, reason="checkpoints go to a disk of each host, not to a shared one")


def _fit_nvme(draft: Draft, subfolder: str | None) -> None:
    for path in (OPTIMIZER_PATH, PARAM_PATH):
        if subfolder is not None and draft.given(*path, "device") == "nvme":
            folder = f"{draft.get(*path, 'nvme_path').rstrip('/')}/{subfolder}"
            draft.put((*path, "nvme_path"), folder, "a folder of this run's own: swap files of two runs would collide")


def _fill_batch(draft: Draft, wanted: Wanted) -> Batch:
    asked = {"global": wanted.batch.global_, "micro": wanted.batch.micro, "accumulation": wanted.batch.accumulation}
    # JSON's 64.0 is a whole number too.
    written = {part: None if draft.given(key) is None else int(draft.get(key)) for key, part in BATCH_KEYS.items()}
    for key, part in BATCH_KEYS.items():
        if None not in (asked[part], written[part]) and asked[part] != written[part]:
            shown = equation(asked["global"], asked["micro"], asked["accumulation"], wanted.world_size)
            raise InputFileError(
                f"{key} {written[part]} contradicts batch.{part} {asked[part]} ({shown})",
                where=draft.where((key,)),
                fix=f"write {key}: auto, or leave batch.{part} out",
            )
    fixed = {part: written[part] if asked[part] is None else asked[part] for part in asked}
    from_file = next((key for key, part in BATCH_KEYS.items() if written[part] is not None), None)
    batch, choices = choose_batch(
        BatchRequest(global_=fixed["global"], micro=fixed["micro"], accumulation=fixed["accumulation"]),
        world_size=wanted.world_size,
        where=draft.where((from_file,)) if from_file else "batch: of the run file, or --set batch.KEY=VALUE",
    )
    draft.choices.extend(choices)
    draft.tree["train_batch_size"] = batch.global_
    draft.tree["train_micro_batch_size_per_gpu"] = batch.micro
    draft.tree["gradient_accumulation_steps"] = batch.accumulation
    draft.choices.append(Choice(key="train_batch_size", value=batch.global_, reason=str(batch)))
    return batch


def _fill_precision(draft: Draft, dtype: str) -> None:
    both = [name for name in ("bf16", "fp16") if draft.given(name, "enabled")]
    if len(both) == 2:
        raise InputFileError(
            f"bf16 and fp16 are both enabled; bf16 at {draft.where(('bf16', 'enabled'))}",
            where=draft.where(("fp16", "enabled")),
            fix="write enabled: auto in both and choose with model.dtype",
        )
    for name in ("bf16", "fp16"):
        on = dtype == name
        written = draft.given(name, "enabled")
        if written is not None and written != on:
            raise InputFileError(
                f"{name}.enabled is {str(written).lower()}, and the run computes in {dtype}",
                where=draft.where((name, "enabled")),
                fix=f"write {name}.enabled: auto, or set model.dtype{f'={name}' if written else ' to another'}",
            )
        if written is None:
            draft.put((name, "enabled"), on, f"the run computes in {dtype}")


def _fill_number(draft: Draft, path: KeyPath, value: Any, source: str) -> None:
    """Fill a number that the run also knows; the Trainer refuses two different ones."""
    written = draft.given(*path)
    if written is not None and written != value:
        raise InputFileError(
            f"{'.'.join(path)} {written} contradicts {source} {value}",
            where=draft.where(path),
            fix=f"write {'.'.join(path)}: auto, or --set {source}={written}",
        )
    if written is None:
        draft.put(path, value, source)


def _fill_sizes(draft: Draft, model: ModelInfo | None) -> None:
    """The same sizes as Hugging Face's Trainer derives from the hidden size."""
    if model is None:
        return
    hidden = model.hidden_size
    sizes = [("reduce_bucket_size", hidden * hidden, f"hidden size {hidden} squared: one weight matrix at a time")]
    if draft.get(ZERO, "stage") == 3:
        prefetch = int(0.9 * hidden * hidden)
        sizes += [
            ("stage3_prefetch_bucket_size", prefetch, f"0.9 x hidden size {hidden} squared: one weight matrix ahead"),
            (
                "stage3_param_persistence_threshold",
                10 * hidden,
                f"10 x hidden size {hidden}: norms and biases stay whole",
            ),
        ]
    for key, value, reason in sizes:
        if draft.get(ZERO, key) == "auto":
            draft.put((ZERO, key), value, reason)


def _fill_optimizer(draft: Draft, wanted: Wanted) -> None:
    if draft.get("optimizer") is None and wanted.own_script:
        # Only in the resolved text. A script that hands its own to deepspeed.initialize still gets its own.
        draft.put(("optimizer", "type"), "AdamW", "for scripts that leave the optimizer to DeepSpeed")
        draft.put(("optimizer", "params"), {"betas": list(ADAM_BETAS), "eps": ADAM_EPS}, "the usual values of Adam")
        if wanted.accelerator == "cpu" and not _is_offloaded(draft):
            # DeepSpeed would compile a fused Adam for the processor first.
            draft.put(("optimizer", "params", "torch_adam"), value=True, reason="no accelerator: nothing to fuse")
    elif draft.get("optimizer") is None:
        draft.choices.append(_trainer_optimizer(offloaded=_is_offloaded(draft)))
        return
    kind = draft.get("optimizer", "type")
    check_optimizer_type(kind, draft.where)
    params: KeyPath = ("optimizer", "params")
    if not isinstance(draft.get(*params), (dict, type(None))):
        raise InputFileError(
            "optimizer.params is not a block", where=draft.where(params), fix="write params: {lr: auto}"
        )
    # Left out, DeepSpeed would train at its own 1e-3.
    _fill_number(draft, (*params, "lr"), wanted.learning_rate, "training.learning_rate")
    _fill_number(draft, (*params, "weight_decay"), wanted.weight_decay, "training.weight_decay")
    for key, value in (("betas", ADAM_BETAS), ("eps", ADAM_EPS)):
        if draft.get(*params, key) == "auto":
            draft.put((*params, key), copy.copy(value), "the usual value of Adam")


def _is_offloaded(draft: Draft) -> bool:
    return draft.given(*OPTIMIZER_PATH, "device") in ("cpu", "nvme")


def _trainer_optimizer(*, offloaded: bool) -> Choice:
    """Say which optimizer runs where no block is written.

    A block would make one parameter group: norms and biases would decay too, and a checkpoint could not be resumed
    under a preset without the block. Accelerate turns the Trainer's AdamW into DeepSpeedCPUAdam when the optimizer is
    offloaded, and keeps its groups.
    """
    why = "made by the Trainer, which spares norms and biases from weight decay, alike in all presets"
    if offloaded:
        return Choice(key="optimizer", value="DeepSpeedCPUAdam", reason=f"the optimizer is offloaded; {why}")
    return Choice(key="optimizer", value="AdamW", reason=why)


def _refuse_scheduler(draft: Draft) -> None:
    block = draft.get("scheduler")
    if block is None:
        return
    kind = block.get("type") if isinstance(block, dict) else None
    schedule = SCHEDULES.get(str(kind), "cosine")
    raise InputFileError(
        "the learning-rate schedule is set twice: by a scheduler block and by training.schedule",
        where=draft.where(("scheduler",)),
        fix=f"remove the block (--set deepspeed.scheduler=null) and set training.schedule={schedule}",
    )


def _drop_autos(draft: Draft) -> None:
    """DeepSpeed skips an "auto" that nobody fills; leaving the key out says the same, openly."""
    for path in list(_find_autos(draft.tree, ())):
        draft.drop(path, "nothing to derive it from: DeepSpeed's own default")


def _find_autos(tree: dict[str, Any], path: KeyPath) -> Iterator[KeyPath]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _find_autos(value, (*path, key))
        elif _holds_auto(value):
            yield (*path, key)


def _holds_auto(value: Any) -> bool:
    if isinstance(value, list):
        return any(_holds_auto(item) for item in value)
    if isinstance(value, dict):
        return any(_holds_auto(item) for item in value.values())
    return bool(value == "auto")
