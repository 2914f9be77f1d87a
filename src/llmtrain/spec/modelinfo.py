"""What a model directory holds, read from config.json and the headers of its weights: no torch, no weights loaded."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llmtrain.errors import InputFileError
from llmtrain.spec.jsonfile import read_json
from llmtrain.spec.weights import Tensor, WeightFile, read_weights

if TYPE_CHECKING:
    from collections.abc import Iterable

CAUSAL_LM = re.compile(r"(ForCausalLM|LMHeadModel|WithLMHead|WithLMHeadModel|BertGenerationDecoder)$")
"""Class names of models that predict the next token, as transformers writes them."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

Dtype = Literal["bf16", "fp16", "fp32"]
DTYPES: dict[str, Dtype] = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """A Hugging Face model directory."""

    path: Path
    """The directory, absolute."""
    architecture: str
    """Class name from config.json."""
    hidden_size: int
    """Width of the residual stream; the largest where layers differ."""
    layers: int
    """Transformer blocks."""
    vocab_size: int
    """Rows of the embedding."""
    heads: int
    """Attention heads of a layer."""
    kv_heads: int
    """Key and value heads of a layer; fewer than ``heads`` under grouped-query attention."""
    intermediate_size: int
    """Width inside a feed-forward block."""
    max_position: int | None
    """Tokens the model was made for; None where config.json does not say."""
    tied_embeddings: bool
    """Whether the output head is the embedding itself."""
    dtype: Dtype
    """Type most of the stored weights have."""
    parameters: int
    """Numbers in the stored weights; tied ones count once."""
    has_chat_template: bool
    """Whether the tokenizer brings a chat template."""
    weights: tuple[WeightFile, ...]
    """The files that hold the weights."""

    @property
    def weight_bytes(self) -> int:
        """Size of all weight files, in bytes."""
        return sum(file.size_bytes for file in self.weights)


def read_model(path: str | Path) -> ModelInfo:
    """Read and check a model directory.

    Args:
        path: a local directory with config.json, safetensors weights and a tokenizer.

    Raises:
        InputFileError: missing, the name of a model on a hub, not a causal language model, quantised, weights that are
            incomplete, damaged or pickles, no tokenizer.
    """
    folder = _find_folder(str(path))
    config = _read_config(folder)
    architecture = _check_architecture(config, folder)
    _check_unquantised(config, folder)
    _check_tokenizer(folder)
    files, tensors = read_weights(folder)
    return _describe(folder, config, architecture, files, tensors)


def _find_folder(text: str) -> Path:
    folder = Path(os.path.abspath(Path(text).expanduser()))  # noqa: PTH100  (resolve() would follow links)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise InputFileError("the model is a file, not a directory", where=text, fix=f"--model {folder.parent}")
    if HUB_NAME.fullmatch(text) and not folder.parent.is_dir():
        name = text.rsplit("/", 1)[-1]
        raise InputFileError(
            f"{text!r} is not a local directory, and llmtrain never downloads: ranks run offline",
            where=f"--model {text}",
            fix=f"once, on a machine with internet: huggingface-cli download {text} --local-dir {name}; "
            f"copy it here and use --model ./{name}",
        )
    raise InputFileError(
        "no such model directory", where=str(folder), fix=f"ls {folder.parent}, then --model DIR with its config.json"
    )


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        fix = "name the directory that holds config.json"
        if (folder / "adapter_config.json").is_file():
            fix = "this is a LoRA adapter: merge it into its base model first, or name the base model"
        elif any(folder.glob("*.gguf")):
            fix = "GGUF holds quantised weights: name the original safetensors directory of the model"
        elif inner := sorted(folder.glob("*/config.json")) + sorted(folder.glob("snapshots/*/config.json")):
            fix = f"--model {inner[0].parent}"
        raise InputFileError("the model directory has no config.json", where=str(folder), fix=fix)
    config, _ = read_json(path, what="model configuration")
    if not isinstance(config, dict):
        raise InputFileError("config.json is not an object", where=f"{path}:1", fix="copy the model again")
    return config


def _check_architecture(config: dict[str, Any], folder: Path) -> str:
    names = config.get("architectures") or []
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
    remote = config.get("auto_map")
    if isinstance(remote, dict) and "AutoModelForCausalLM" in remote:
        return name or str(remote["AutoModelForCausalLM"]).rsplit(".", 1)[-1]
    if name is not None and not config.get("is_encoder_decoder"):
        # Vision-language models carry a causal language model in text_config, and transformers loads them as one.
        multimodal = name.endswith("ForConditionalGeneration") and isinstance(config.get("text_config"), dict)
        if multimodal or CAUSAL_LM.search(name):
            return name
    raise InputFileError(
        f"the model is {name or 'of an unnamed architecture'}, not a causal language model",
        where=f"{folder / 'config.json'} (architectures)",
        fix="use a model whose architecture ends in ForCausalLM (Llama, Qwen, Mistral, ...)",
    )


def _check_unquantised(config: dict[str, Any], folder: Path) -> None:
    block = config.get("quantization_config")
    if block:
        method = block.get("quant_method", "unknown") if isinstance(block, dict) else block
        raise InputFileError(
            f"the weights are quantised ({method}); they cannot be trained",
            where=f"{folder / 'config.json'} (quantization_config)",
            fix="use the model's original bf16 or fp16 weights",
        )


def _check_tokenizer(folder: Path) -> None:
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise InputFileError(
            "the model directory has no tokenizer",
            where=str(folder),
            fix="copy tokenizer.json (or tokenizer.model) and tokenizer_config.json of the model into it",
        )


def _describe(
    folder: Path,
    config: dict[str, Any],
    architecture: str,
    files: tuple[WeightFile, ...],
    tensors: dict[str, Tensor],
) -> ModelInfo:
    shape = _Shape(config, folder)
    hidden = shape.number("hidden_size", "hidden_sizes", "n_embd", "d_model")
    heads = shape.number("num_attention_heads", "n_head", "n_heads")
    tied = shape.find("tie_word_embeddings")
    return ModelInfo(
        path=folder,
        architecture=architecture,
        hidden_size=hidden,
        layers=shape.number("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
        vocab_size=shape.number("vocab_size"),
        heads=heads,
        kv_heads=shape.number("num_key_value_heads", "num_kv_heads", "n_head_kv", default=heads),
        intermediate_size=shape.number(
            "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", default=4 * hidden
        ),
        max_position=shape.number("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", default=0) or None,
        tied_embeddings=tied if isinstance(tied, bool) else not any(_is_output_head(name) for name in tensors),
        dtype=_main_dtype(tensors.values(), folder),
        parameters=sum(tensor.numbers for tensor in tensors.values() if tensor.is_float),
        has_chat_template=_has_chat_template(folder),
        weights=files,
    )


class _Shape:
    """Numbers of config.json under the names different architectures give them, nested ``text_config`` included."""

    def __init__(self, config: dict[str, Any], folder: Path) -> None:
        inner = config.get("text_config")
        self._levels = [config, inner] if isinstance(inner, dict) else [config]
        self._where = str(folder / "config.json")

    def find(self, *names: str) -> Any:
        for name in names:
            for level in self._levels:
                if level.get(name) is not None:
                    return level[name]
        return None

    def number(self, *names: str, default: int | None = None) -> int:
        value = self.find(*names)
        if isinstance(value, list) and value and all(isinstance(item, int) for item in value):
            value = max(value)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            found = "is missing" if value is None else f"is {value!r}"
            raise InputFileError(f"{names[0]} {found}", where=self._where, fix="copy the model's own config.json again")
        return value


def _is_output_head(name: str) -> bool:
    return name.rsplit(".", 1)[0].rsplit(".", 1)[-1] in ("lm_head", "embed_out", "output")


def _main_dtype(tensors: Iterable[Tensor], folder: Path) -> Dtype:
    totals: dict[str, int] = {}
    for tensor in tensors:
        totals[tensor.dtype] = totals.get(tensor.dtype, 0) + tensor.numbers
    most = max(totals, key=lambda name: totals[name], default="none")
    if most not in DTYPES:
        raise InputFileError(
            f"the weights are stored as {most}, which cannot be trained",
            where=str(folder),
            fix="use the model's original bf16, fp16 or fp32 weights",
        )
    return DTYPES[most]


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return False
    config, _ = read_json(path, what="tokenizer configuration")
    return isinstance(config, dict) and bool(config.get("chat_template"))
