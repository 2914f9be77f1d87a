"""Fine-tune a causal language model with TRL's SFTTrainer under the rendered DeepSpeed configuration.

Reads top to bottom: connect, check, tokenize once per host, load the model divided over the ranks, train, write the
model. ``run`` is called on every rank.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import warnings
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from trl import SFTConfig

from llmtrain.errors import DiskError, InputFileError
from llmtrain.train.card import read_versions, render_card
from llmtrain.train.checkpoint import (
    check_output,
    check_resume,
    checkpoint_path,
    find_resume,
    gather_weights,
    write_model,
)
from llmtrain.train.crew import Crew
from llmtrain.train.data import read_training_data, write_tokenized
from llmtrain.train.lora import add_adapters, write_adapter
from llmtrain.train.telemetry import Telemetry
from llmtrain.train.templates import load_tokenizer
from llmtrain.train.trainer import Trainer

if TYPE_CHECKING:
    from llmtrain.train.data import TrainingData
    from llmtrain.train.place import Place
    from llmtrain.train.records import Beat
    from llmtrain.train.runjson import RankRun
    from llmtrain.train.templates import Template

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}
WARMUP_SHARE = 0.03
SAMPLED = 1000
"""Packed rows whose fill is looked at."""


def run(run: RankRun, place: Place, beat: Beat) -> dict[str, Any] | None:
    """Do the whole fine-tune as one rank of it.

    Returns:
        What the done record says besides: ``saved``, the checkpoint, where somebody asked to save and stop.

    Raises:
        LlmtrainError: something that the user can act on; anything else is a bug or a failure of the machine.
    """
    beat.enter("load", 0)
    _quieten()
    crew = Crew(place)
    check_batch(run)
    resume = check_resume(run, find_resume(run, crew))
    if place.is_first:
        check_output(run.output)

    tokenizer, template = load_tokenizer(run)
    beat.enter("data")
    if run.data.tokenized is None:
        write_tokenized(run, place.local_rank, tokenizer, template, tick=lambda: beat.advance(0))
    crew.wait()
    data = read_training_data(run)
    steps = count_steps(run, data.step_rows)
    if place.is_first:
        _say_plan(run, data, template, steps)

    beat.enter("load")
    arguments = make_arguments(run, steps, crew, evaluates=data.evaluation is not None)
    model = load_model(run)
    if run.lora:
        model = add_adapters(model, run.lora)
    telemetry = Telemetry(metrics=run.run_dir / "metrics.jsonl", place=place, beat=beat)
    trainer = Trainer(run, crew, telemetry, beat, data, model=model, args=arguments, processing_class=tokenizer)
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    if trainer.stop.asked and trainer.state.global_step < steps:
        saved = checkpoint_path(run, trainer.state.global_step)
        crew.wait()
        crew.leave()
        if not saved.is_dir():
            raise DiskError("asked to save and stop, but a disk did not take it", where=str(saved.parent), fix="df -h")
        return {"saved": str(saved)}
    if data.evaluation is not None and not trainer.has_just_evaluated():
        trainer.evaluate()

    beat.enter("save", trainer.state.global_step)
    dtype = DTYPES["fp32" if run.model.dtype == "fp32" else "bf16"]
    weights = gather_weights(trainer.model, dtype, keep=place.is_first, trained_only=run.lora is not None)
    if place.is_first:
        losses = {"first": telemetry.first_loss, "last": telemetry.last_loss, "held-out": telemetry.eval_loss}
        card = render_card(
            run, data, template, steps=trainer.state.global_step, losses=losses, versions=read_versions()
        )
        if run.lora:
            write_adapter(trainer.model, weights, tokenizer, run, card=card)
        else:
            write_model(trainer.model, weights, tokenizer, run, card=card, stop_tokens=data.facts.stop_tokens)
        telemetry.write_final(trainer.state.global_step)
    crew.wait()
    crew.leave()
    return None


# --- decisions -------------------------------------------------------------------------------------------------


def check_batch(run: RankRun) -> None:
    """The batch sizes must agree with each other and with the DeepSpeed configuration.

    Raises:
        InputFileError: they do not; the message holds the equation.
    """
    batch = run.batch
    product = batch.micro * batch.accumulation * run.world_size
    if batch.global_size != product:
        raise InputFileError(
            f"batch: global {batch.global_size} is not micro {batch.micro} x accumulation {batch.accumulation}"
            f" x {run.world_size} ranks = {product}",
            where="run.json",
        )
    same = {
        "train_batch_size": batch.global_size,
        "train_micro_batch_size_per_gpu": batch.micro,
        "gradient_accumulation_steps": batch.accumulation,
    }
    for key, value in same.items():
        if run.deepspeed.get(key) != value:
            raise InputFileError(
                f"deepspeed.{key} is {run.deepspeed.get(key)}, the batch of the run says {value}", where="run.json"
            )


def count_steps(run: RankRun, rows: int) -> int:
    """Optimizer steps of the whole run.

    Raises:
        InputFileError: neither steps nor epochs are given.
    """
    recipe = run.training
    if recipe.max_steps is not None:
        return recipe.max_steps
    if recipe.epochs is None:
        raise InputFileError("training needs max_steps or epochs", where="run.json")
    return max(1, math.ceil(recipe.epochs * math.ceil(rows / run.batch.global_size)))


def make_arguments(run: RankRun, steps: int, crew: Crew, *, evaluates: bool) -> Any:
    """The trainer's arguments. While they live, ``from_pretrained`` divides a ZeRO-3 model over the ranks."""
    recipe = run.training
    warmup = int(WARMUP_SHARE * steps) if recipe.warmup_steps is None else recipe.warmup_steps
    return SFTConfig(
        output_dir=str(run.checkpoints),
        deepspeed=run.deepspeed,
        use_cpu=crew.on_cpu,
        bf16=run.model.dtype == "bf16",
        fp16=run.model.dtype == "fp16",
        per_device_train_batch_size=run.batch.micro,
        per_device_eval_batch_size=run.batch.micro,
        gradient_accumulation_steps=run.batch.accumulation,
        average_tokens_across_devices=True,
        max_steps=steps,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type=SCHEDULES[recipe.schedule],
        warmup_steps=warmup,
        weight_decay=recipe.weight_decay,
        max_grad_norm=recipe.max_grad_norm,
        seed=recipe.seed,
        data_seed=recipe.seed,
        **_checkpointing_options(enabled=recipe.gradient_checkpointing),
        logging_strategy="steps",
        logging_steps=1,
        logging_nan_inf_filter=False,  # it would hide a loss that is not a number
        save_strategy="steps" if recipe.save_steps else "no",
        save_steps=recipe.save_steps or 500,
        eval_strategy="steps" if evaluates and recipe.eval_steps else "no",
        eval_steps=recipe.eval_steps,
        prediction_loss_only=True,
        dataloader_num_workers=recipe.loader_workers,
        dataloader_pin_memory=not crew.on_cpu,
        max_length=run.data.max_length,
        dataset_kwargs={"skip_prepare_dataset": True},  # it is tokenized, masked and cut already
        report_to="none",
        disable_tqdm=True,
    )


def _checkpointing_options(*, enabled: bool) -> dict[str, Any]:
    """Non-reentrant activation checkpointing, under the name that this version of transformers has for it."""
    names = {field.name for field in dataclasses.fields(SFTConfig)}
    name = "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"
    return {name: enabled, f"{name}_kwargs": {"use_reentrant": False} if enabled else None}


# --- loading ---------------------------------------------------------------------------------------------------


def load_model(run: RankRun) -> Any:
    """The model; under ZeRO-3 each rank keeps only its part, from the first tensor on.

    Raises:
        InputFileError: the model's files lack tensors, which transformers would fill with random numbers.
    """
    model, loading = AutoModelForCausalLM.from_pretrained(
        run.model.path,
        dtype=DTYPES[run.model.dtype],
        attn_implementation=run.model.attention,
        trust_remote_code=run.model.trust_remote_code,
        local_files_only=True,
        output_loading_info=True,
    )
    missing = sorted(loading["missing_keys"])
    if missing:
        raise InputFileError(
            f"the model's files lack {len(missing)} of its tensors, for example {missing[0]}",
            where=run.model.path,
            fix="copy the model again",
        )
    return model


def _quieten() -> None:
    """Leave logs to what matters: no progress bars, no information or deprecation lines of libraries."""
    import datasets

    transformers.utils.logging.set_verbosity_warning()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    warnings.filterwarnings("ignore", category=FutureWarning)  # addressed to authors of libraries


def _say_plan(run: RankRun, data: TrainingData, template: Template | None, steps: int) -> None:
    facts = data.facts
    lines = [
        f"data: {facts.examples} examples, {data.train_rows} to train on, {data.eval_rows} held out",
        f"tokens: {facts.tokens}, {facts.trained_tokens} of them trained on ({facts.method})",
        f"steps: {steps} of {run.batch.global_size} {'examples' if data.packs is None else 'rows'}",
    ]
    if data.packs is not None:
        filled = sum(len(data.train[at]["input_ids"]) for pack in data.packs[:SAMPLED] for at in pack)
        share = filled / (min(SAMPLED, len(data.packs)) * run.data.max_length)
        lines.append(f"packing: {data.train_rows} examples in {len(data.packs)} rows, {share:.0%} of them filled")
    if template:
        lines.append(f"chat template: {template.name} ({template.reason})")
    if facts.dropped:
        lines.append(f"warning: {facts.dropped} examples dropped: no answer within {run.data.max_length} tokens")
    if facts.truncated:
        lines.append(f"warning: {facts.truncated} examples cut at {run.data.max_length} tokens")
    if facts.split:
        lines.append(f"note: {facts.split} examples with prompt and answer tokenized apart (shared tokens)")
    if facts.unstopped:
        lines.append(f"warning: {facts.unstopped} examples without an end-of-turn token after the answer")
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
