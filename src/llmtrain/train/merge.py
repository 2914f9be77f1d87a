"""Add adapters to their base model: ``python -m llmtrain.train.merge ADAPTER --output DIR [--model BASE]``.

The base's files are read and written tensor by tensor, so that memory holds one of them, whatever the model's size.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.errors import InputFileError, LlmtrainError
from llmtrain.train.modeldir import new_directory

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
REFUSED = ("use_dora", "fan_in_fan_out", "modules_to_save", "rank_pattern", "alpha_pattern", "trainable_token_indices")
"""What changes how an adapter is added, and is not known here."""


def merge(adapter: Path, output: Path, *, base: Path | None = None) -> int:
    """Write the base model with the adapters added.

    Args:
        adapter: PEFT directory.
        output: a new directory.
        base: the base model; what the adapter names, if not given.

    Returns:
        Number of tensors that were changed.

    Raises:
        InputFileError: the two do not belong together, or the adapter is of another kind.
    """
    from safetensors import safe_open

    config = _read_config(adapter)
    base = base or Path(config["base_model_name_or_path"])
    files = sorted(base.glob("*.safetensors"))
    if not files:
        raise InputFileError(
            "the base model has no safetensors files here", where=str(base), fix="name its directory with --model"
        )
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    with safe_open(str(adapter / WEIGHTS), framework="pt") as factors:
        pairs = _pair(factors.keys())
        _refuse_strangers(pairs, files, base)
        with new_directory(output) as partial:
            partial.mkdir()
            copy_rest((base, adapter), partial)
            for file in files:
                _merge_file(file, partial / file.name, factors, pairs, scale)
    return len(pairs)


def _read_config(adapter: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((adapter / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise InputFileError(
            f"no adapter: {problem}", where=str(adapter), fix="name a folder with adapter_config.json"
        ) from None
    unknown = [key for key in REFUSED if config.get(key)]
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none" or unknown:
        kind = ", ".join(unknown) or config.get("peft_type")
        raise InputFileError(
            f"only plain LoRA adapters are merged here, this one has {kind}",
            where=str(adapter / CONFIG),
            fix="use PEFT's own merge_and_unload",
        )
    return config


def _pair(names: list[str]) -> dict[str, tuple[str, str]]:
    """Name of a weight of the base -> names of its two factors."""
    found = {}
    for name in names:
        match = re.fullmatch(re.escape(PREFIX) + r"(.+)\.lora_A\.weight", name)
        if match:
            found[f"{match[1]}.weight"] = (name, name.replace(".lora_A.", ".lora_B."))
    return found


def read_table(file: Path) -> tuple[bytes, dict[str, Any]]:
    """The head of a safetensors file as it stands, and what it says."""
    with file.open("rb") as stream:
        length = stream.read(8)
        text = stream.read(struct.unpack("<Q", length)[0])
    return length + text, json.loads(text)


def _refuse_strangers(pairs: Mapping[str, Any], files: list[Path], base: Path) -> None:
    known = {name for file in files for name in read_table(file)[1]}
    strangers = sorted(set(pairs) - known)
    if strangers or not pairs:
        raise InputFileError(
            f"{len(strangers)} of the adapter's {len(pairs)} tensors are not in the base model, for example"
            f" {(strangers or ['none'])[0]}",
            where=str(base),
            fix="name the model it was trained on with --model",
        )


def copy_rest(folders: Sequence[Path], partial: Path) -> None:
    """Everything but weights: the base's, and over it the tokenizer that the adapter was trained with."""
    for folder in folders:
        for path in folder.iterdir():
            ours = path.name.startswith("adapter_") or path.suffix in {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
            if path.is_file() and not ours:
                shutil.copyfile(path, partial / path.name)


def _merge_file(source: Path, target: Path, factors: Any, pairs: Mapping[str, tuple[str, str]], scale: float) -> None:
    """The same header and the same order; a tensor changes its numbers, never its size."""
    from safetensors import safe_open

    head, table = read_table(source)
    names = sorted((name for name in table if name != "__metadata__"), key=lambda name: table[name]["data_offsets"])
    with safe_open(str(source), framework="pt") as tensors, target.open("wb") as stream:
        stream.write(head)
        for name in names:
            tensor = tensors.get_tensor(name)
            if name in pairs:
                low, high = (factors.get_tensor(factor).float() for factor in pairs[name])
                tensor = (tensor.float() + scale * (high @ low)).to(tensor.dtype)
            for block in _iter_bytes(tensor):
                stream.write(block)


def _iter_bytes(tensor: Any) -> Iterator[memoryview]:
    import torch

    yield memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def main(argv: list[str] | None = None) -> int:
    """Merge and say so; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m llmtrain.train.merge", description=__doc__)
    parser.add_argument("adapter", type=Path, help="a PEFT directory")
    parser.add_argument("--output", type=Path, required=True, help="a new directory")
    parser.add_argument("--model", type=Path, help="the base model (default: what the adapter names)")
    options = parser.parse_args(argv)
    try:
        changed = merge(options.adapter, options.output, base=options.model)
    except LlmtrainError as problem:
        sys.stderr.write(f"{problem}\n")
        return int(problem.exit_code)
    sys.stdout.write(f"{options.output}: {changed} tensors with the adapter added\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
