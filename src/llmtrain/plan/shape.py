"""The shape of a model: every parameter's name and size, from config.json or safetensors headers, without torch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.errors import InputFileError
from llmtrain.plan.families import FAMILIES
from llmtrain.plan.modelconfig import Config
from llmtrain.spec.jsonfile import read_json
from llmtrain.spec.weights import read_weights

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmtrain.plan.family import Family

EXPERT = re.compile(r"\.experts\.|\.experts$")
LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
NOT_DECAYED = re.compile(
    r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)|(?:^|\.)ln_\w+\.|(?:^|\.)norm_\w+\.", re.IGNORECASE
)
"""transformers' own patterns (``Trainer.get_decay_parameter_names``), and the LayerNorms it knows by their type."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter tensor."""

    name: str
    """As in ``model.named_parameters()``."""
    shape: tuple[int, ...]
    """Its dimensions."""

    @cached_property
    def numel(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    @property
    def module(self) -> str:
        """The module that owns it; ZeRO-3 gathers the parameters of one module together."""
        return self.name.rpartition(".")[0]

    @cached_property
    def layer(self) -> int | None:
        """Index of its decoder layer, None outside the layers."""
        found = LAYER.search(f".{self.name}")
        return int(found[1]) if found else None

    @cached_property
    def is_decayed(self) -> bool:
        """Whether weight decay applies: the Trainer makes two groups of parameters of this."""
        return NOT_DECAYED.search(self.name) is None


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelShape:
    """What the estimates need to know of a model."""

    name: str
    """Directory or file it came from, for people."""
    family: str
    """``model_type``."""
    config: Config
    """The numbers of config.json."""
    parameters: tuple[Parameter, ...]
    """Every trainable or frozen parameter, in registration order."""
    tied: bool
    """Whether the output head is the embedding."""

    @cached_property
    def total(self) -> int:
        """Numbers in all parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.config.hidden

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return self.config.layers

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.config.heads

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        return self.config.kv_heads

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.config.head_dim

    @property
    def vocab(self) -> int:
        """Rows of the embedding."""
        return self.config.vocab

    @cached_property
    def largest(self) -> Parameter:
        """The parameter with the most numbers."""
        return max(self.parameters, key=lambda parameter: parameter.numel)

    @cached_property
    def experts_total(self) -> int:
        """Numbers in all experts together."""
        return sum(item.numel for item in self.parameters if EXPERT.search(item.name))

    @property
    def experts_used(self) -> tuple[int, int]:
        """Experts a token goes through, and experts there are; (1, 1) for a dense model."""
        if not self.experts_total:
            return 1, 1
        keys = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
        count = next((self.config.get(key) for key in keys if self.config.get(key)), 1)
        used = self.config.get("num_experts_per_tok", self.config.get("moe_topk", 2))
        return min(used, count), count

    @cached_property
    def active(self) -> float:
        """Numbers that multiply each token: no input embedding, the head once, the routed share of experts."""
        used, count = self.experts_used
        embedding = sum(item.numel for item in self.parameters if is_embedding(item))
        head = self.vocab * self.hidden if self.tied else 0
        return self.total - embedding + head - self.experts_total * (1 - used / count)

    def layer_total(self, index: int = 0) -> int:
        """Numbers in decoder layer ``index``."""
        return sum(item.numel for item in self.parameters if item.layer == index)

    @cached_property
    def layer_max(self) -> int:
        """Numbers in the largest decoder layer."""
        sums = [0] * self.layers
        for item in self.parameters:
            if item.layer is not None:
                sums[item.layer] += item.numel
        return max(sums)

    def groups(self, *, split: bool) -> tuple[tuple[Parameter, ...], ...]:
        """The optimizer's groups of parameters.

        Args:
            split: the Trainer's two groups, with and without weight decay; otherwise all in one.
        """
        return self._split if split else (self.parameters,)

    @cached_property
    def _split(self) -> tuple[tuple[Parameter, ...], ...]:
        parts = (
            tuple(item for item in self.parameters if item.is_decayed),
            tuple(item for item in self.parameters if not item.is_decayed),
        )
        return tuple(part for part in parts if part)


def is_embedding(item: Parameter) -> bool:
    """Whether a parameter is looked up, not multiplied: token or position embedding."""
    return item.layer is None and re.search(r"embed|wte|wpe", item.name) is not None and "norm" not in item.name


def plan_shape(keys: Mapping[str, Any], *, name: str) -> ModelShape:
    """List a model's parameters from its parsed config.json.

    Raises:
        InputFileError: a family that is not in the table, or a size that is missing.
    """
    model_type = _model_type(keys)
    family: Family | None = FAMILIES.get(model_type)
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise InputFileError(
            f"the shapes of model type {model_type!r} are not known without its weights",
            where=name,
            fix=f"name the directory that also holds its safetensors files; known by config alone: {known}",
        )
    config = Config(keys, name, family.defaults)
    entries = family.parameters(config)
    return ModelShape(
        name=name,
        family=model_type,
        config=config,
        parameters=tuple(Parameter(name=label, shape=shape) for label, shape in entries),
        tied=family.is_tied(config),
    )


def _model_type(keys: Mapping[str, Any]) -> str:
    inner = keys.get("text_config")
    found = inner.get("model_type") if isinstance(inner, dict) else None
    return str(found or keys.get("model_type") or "unnamed")


def read_shape(path: str | Path) -> ModelShape:
    """Read a model's shape.

    Args:
        path: a model directory, or a config.json alone.

    Raises:
        InputFileError: missing or unusable files, or a family that is not known without weights.
    """
    place = Path(path).expanduser()
    file = place / "config.json" if place.is_dir() else place
    if not file.is_file():
        raise InputFileError("no such model", where=str(file), fix="--model DIR, or a config.json alone")
    keys, _ = read_json(file, what="model configuration")
    if not isinstance(keys, dict):
        raise InputFileError("config.json is not an object", where=f"{file}:1", fix="copy the model's own config.json")
    known = _model_type(keys) in FAMILIES
    if known or not place.is_dir() or not any(place.glob("*.safetensors")):
        return plan_shape(keys, name=str(file))
    _, tensors = read_weights(place)
    found = tuple(
        Parameter(name=name, shape=tensor.shape) for name, tensor in sorted(tensors.items()) if tensor.is_float
    )
    heads = any(parameter.name.rpartition(".")[0].endswith(("lm_head", "embed_out")) for parameter in found)
    return ModelShape(
        name=str(place), family=_model_type(keys), config=Config(keys, str(file)), parameters=found, tied=not heads
    )
