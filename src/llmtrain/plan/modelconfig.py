"""Numbers of a config.json under the names that different architectures give them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmtrain.errors import InputFileError

if TYPE_CHECKING:
    from collections.abc import Mapping

ALIASES: dict[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd", "d_model", "hidden_dim"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads"),
    "inner": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "ffn_hidden_dim"),
    "positions": ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"),
}
"""Our name of a size -> the keys it may have, first match wins."""


class Config:
    """A config.json, asked by our names; ``text_config`` of a multimodal model counts as the model.

    Args:
        keys: the parsed file.
        where: what to call it in errors.
        defaults: values of keys the file may leave out (the family's own defaults in transformers).
    """

    def __init__(self, keys: Mapping[str, Any], where: str, defaults: Mapping[str, Any] | None = None) -> None:
        inner = keys.get("text_config")
        self._keys = {**keys, **inner} if isinstance(inner, dict) else dict(keys)
        self._where = where
        self._defaults = dict(defaults or {})

    @property
    def where(self) -> str:
        """What the file is called in errors."""
        return self._where

    def get(self, key: str, default: Any = None) -> Any:
        """The value at ``key``; null counts as absent."""
        value = self._keys.get(key)
        if value is None:
            value = self._defaults.get(key)
        return default if value is None else value

    def raw(self, key: str, default: Any) -> Any:
        """The value at ``key`` where null has a meaning of its own."""
        return self._keys.get(key, self._defaults.get(key, default))

    def flag(self, key: str, *, default: bool = False) -> bool:
        """A switch."""
        return bool(self.get(key, default))

    def size(self, name: str, default: int | None = None) -> int:
        """A size by our name or by a literal key.

        Raises:
            InputFileError: absent without a default, or not a whole number above zero.
        """
        keys = ALIASES.get(name, (name,))
        value = next((self.get(key) for key in keys if self.get(key) is not None), default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            found = "is missing" if value is None else f"is {value!r}"
            raise InputFileError(f"{keys[0]} {found}", where=self._where, fix="use the model's own config.json")
        return value

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.size("hidden")

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return self.size("layers")

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.size("heads")

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        return self.size("kv_heads", self.heads)

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        value = self.get("head_dim")
        return value if isinstance(value, int) and value > 0 else self.hidden // self.heads

    @property
    def inner(self) -> int:
        """Width of the feed-forward network."""
        return self.size("inner", 4 * self.hidden)

    @property
    def vocab(self) -> int:
        """Rows of the embedding."""
        return self.size("vocab_size")
