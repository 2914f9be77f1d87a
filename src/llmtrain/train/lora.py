"""Low-rank adapters on frozen weights, through PEFT: put on, gathered, written."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.errors import InputFileError
from llmtrain.train.modeldir import tidy

if TYPE_CHECKING:
    from llmtrain.train.runjson import LoraPart, RankRun


def add_adapters(model: Any, lora: LoraPart) -> Any:
    """The model with adapters that are trained and weights that are not.

    Raises:
        InputFileError: PEFT is not installed, or the model has no such layers.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as problem:
        raise InputFileError(
            f"lora.rank needs the package peft on every host: {problem}", where="lora", fix="pip install peft"
        ) from None
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets) or "all-linear",
    )
    try:
        # In the weights' own precision, since ZeRO keeps parameters of one kind; its optimizer has fp32 copies.
        return get_peft_model(model, config, autocast_adapter_dtype=False)
    except ValueError as problem:
        raise InputFileError(f"lora.targets: {problem}", where="lora.targets", fix="name linear layers of it") from None


def write_adapter(model: Any, weights: dict[str, Any], tokenizer: Any, run: RankRun, *, card: str) -> None:
    """Write the adapters as a PEFT directory with the tokenizer; rank 0 calls this.

    Args:
        model: PEFT's model inside the engine.
        weights: the trained tensors, whole, under their names in *model*.
        tokenizer: with the chat template of the training.
        run: the run.
        card: the README.
    """
    partial = run.output.with_name(f".{run.output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(str(partial), state_dict=weights)
    tokenizer.save_pretrained(partial)
    generation = Path(run.model.path) / "generation_config.json"
    if generation.is_file():
        shutil.copy(generation, partial)
    (partial / "README.md").write_text(card, encoding="utf-8")
    tidy(partial)
    if run.output.is_dir():
        run.output.rmdir()  # checked to be empty before the training
    run.output.parent.mkdir(parents=True, exist_ok=True)
    partial.rename(run.output)
