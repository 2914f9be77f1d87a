"""A first run file: a commented one, or what another tool's file says in our words. Pure but for ``read_``."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.errors import InputFileError
from llmtrain.spec.yamlfile import read_yaml

if TYPE_CHECKING:
    from collections.abc import Mapping

DRAFT: tuple[tuple[str, str, str], ...] = (
    ("name", "run", "part of the run folder's name"),
    ("hosts", "hostfile", "one 'NAME slots=N' a line; llmtrain hosts writes one"),
    ("config", "zero3-offload", "a preset, or a DeepSpeed YAML or JSON file"),
    ("model.path", "/data/model", "Hugging Face model directory; copied to hosts that lack it"),
    ("data.path", "/data/chat.jsonl", "docs/data.md lists what is read"),
    ("data.max_length", "2048", "longer examples are cut"),
    ("data.eval", "0.05", "share held out, or a file"),
    ("batch.global", "32", "examples in one optimizer step, over all ranks"),
    ("batch.micro", "1", "examples at once on one rank; raise it until memory is used"),
    ("training.epochs", "1", "or max_steps"),
    ("training.learning_rate", "1e-5", "the highest, after the warm-up"),
    ("output", "tuned", "where the model goes; never overwritten"),
)
"""Key, value and remark of the commented run file."""
HEAD = "# llmtrain launch\n# Every key and its meaning: docs/run-file.md\n"

LLAMA_FACTORY = {
    "model_name_or_path": "model.path",
    "cutoff_len": "data.max_length",
    "val_size": "data.eval",
    "per_device_train_batch_size": "batch.micro",
    "gradient_accumulation_steps": "batch.accumulation",
    "learning_rate": "training.learning_rate",
    "num_train_epochs": "training.epochs",
    "max_steps": "training.max_steps",
    "lr_scheduler_type": "training.schedule",
    "warmup_steps": "training.warmup_steps",
    "weight_decay": "training.weight_decay",
    "max_grad_norm": "training.max_grad_norm",
    "save_steps": "training.save_steps",
    "eval_steps": "training.eval_steps",
    "seed": "training.seed",
    "output_dir": "output",
    "deepspeed": "config",
    "trust_remote_code": "model.trust_remote_code",
    "packing": "data.packing",
    "neat_packing": "data.packing",
    "lora_rank": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_target": "lora.targets",
}
AXOLOTL = {
    "base_model": "model.path",
    "sequence_len": "data.max_length",
    "val_set_size": "data.eval",
    "micro_batch_size": "batch.micro",
    "gradient_accumulation_steps": "batch.accumulation",
    "learning_rate": "training.learning_rate",
    "num_epochs": "training.epochs",
    "max_steps": "training.max_steps",
    "lr_scheduler": "training.schedule",
    "warmup_steps": "training.warmup_steps",
    "weight_decay": "training.weight_decay",
    "max_grad_norm": "training.max_grad_norm",
    "save_steps": "training.save_steps",
    "eval_steps": "training.eval_steps",
    "seed": "training.seed",
    "output_dir": "output",
    "deepspeed": "config",
    "trust_remote_code": "model.trust_remote_code",
    "gradient_checkpointing": "training.gradient_checkpointing",
    "sample_packing": "data.packing",
    "lora_r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_target_modules": "lora.targets",
}
DTYPES = {"bf16": "bf16", "fp16": "fp16"}
SCHEDULES = {"cosine", "linear", "constant"}
PLAIN = {"finetuning_type": ("full", "lora"), "adapter": ("lora", None, ""), "stage": ("sft",)}
"""Keys and the values of them that need no word: they say what the built-in fine-tune does."""
KEPT = {"training.weight_decay", "training.gradient_checkpointing"}
"""Keys that mean something when they are nothing."""
FACTORY_RANK = 8
"""LLaMA-Factory trains adapters, of this rank, unless a file says otherwise."""
ALL_TARGETS = ("all", ["all"])


@dataclass
class Translation:
    """Another tool's file in our words."""

    values: dict[str, Any] = field(default_factory=dict)
    """Dotted key -> value."""
    left: dict[str, Any] = field(default_factory=dict)
    """What has no counterpart here."""


def read_foreign(path: str) -> Translation:
    """Read a LLaMA-Factory or axolotl file, told apart by how it names the model.

    Raises:
        InputFileError: it is neither.
    """
    values, _ = read_yaml(Path(path), what="file to translate")
    if isinstance(values, dict) and "base_model" in values:
        return translate(values, AXOLOTL, folder=Path(path).parent)
    if isinstance(values, dict) and "model_name_or_path" in values:
        return translate(values, LLAMA_FACTORY, folder=Path(path).parent)
    raise InputFileError(
        "neither a LLaMA-Factory file (model_name_or_path) nor an axolotl file (base_model)", where=path
    )


def translate(values: Mapping[str, Any], words: Mapping[str, str], *, folder: Path) -> Translation:
    """What has a counterpart, and what has none. Pure."""
    found = Translation()
    lora = _trains_adapters(values)
    for key, value in values.items():
        if key == "dataset_dir" or (key in PLAIN and value in PLAIN[key]):
            continue
        ours = words.get(key)
        if paths := _data_paths(key, values, folder):
            _datasets(found, paths)
        elif key in DTYPES:
            found.values.update({"model.dtype": DTYPES[key]} if value is True else {})
        elif ours is None or _is_odd(ours, value, lora=lora):
            found.left[key] = value
        else:
            _take(found, ours, value)
    if lora:
        found.values.setdefault("lora.rank", FACTORY_RANK)
    return found


def _is_odd(ours: str, value: Any, *, lora: bool) -> bool:
    """A schedule we do not have, or a word about adapters where none are trained."""
    return (ours == "training.schedule" and value not in SCHEDULES) or (ours.startswith("lora.") and not lora)


def _take(found: Translation, ours: str, value: Any) -> None:
    if ours == "lora.targets":
        found.values.update({} if value in ALL_TARGETS else {ours: _words(value)})
    elif value not in (None, 0, -1) or ours in KEPT:
        found.values[ours] = value


def _data_paths(key: str, values: Mapping[str, Any], folder: Path) -> list[str]:
    value = values[key]
    if key == "dataset" and isinstance(value, str):
        info = f"{values.get('dataset_dir', 'data')}/dataset_info.json"
        return [f"{info}#{name.strip()}" for name in value.split(",")]
    if key == "datasets" and isinstance(value, list) and all(_is_file(item, folder) for item in value):
        return [item["path"] for item in value]
    return []


def _trains_adapters(values: Mapping[str, Any]) -> bool:
    """QLoRA too: what has no counterpart is its 4-bit base, and that is left to be read."""
    if "base_model" in values:
        return values.get("adapter") in ("lora", "qlora")
    return bool(values.get("finetuning_type", "lora") == "lora")


def _words(value: Any) -> list[str]:
    return [word.strip() for word in value.split(",")] if isinstance(value, str) else list(value)


def _is_file(item: Any, folder: Path) -> bool:
    return isinstance(item, dict) and isinstance(item.get("path"), str) and (folder / item["path"]).exists()


def _datasets(found: Translation, paths: list[str]) -> None:
    if len(paths) == 1:
        found.values["data.path"] = paths[0]
    else:
        found.values["data.mix"] = [{"path": path} for path in paths]


def render_run_file(translation: Translation | None) -> str:
    """The text of ``llmtrain.yaml``. Pure."""
    if translation is None:
        rows = list(DRAFT)
    else:
        given = {"hosts": "hostfile", "config": "zero3-offload", **translation.values}
        rows = [(key, json.dumps(value), "") for key, value in given.items()]
    lines, block = [], ""
    blocks = ["", *(key.rpartition(".")[0] for key, _, _ in rows)]
    for key, value, remark in sorted(rows, key=lambda row: blocks.index(row[0].rpartition(".")[0])):
        above, dot, name = key.rpartition(".")
        if dot and above != block:
            block = above
            lines.append(f"{above}:")
        text = f"{'  ' if dot else ''}{name or key}: {value}"
        lines.append(f"{text:<36}# {remark}" if remark else text)
    left = translation.left if translation else {}
    tail = ["", "# Without a counterpart here:"] + [f"#   {key}: {json.dumps(value)}" for key, value in left.items()]
    return HEAD + "\n".join(lines + (tail if left else [])) + "\n"
