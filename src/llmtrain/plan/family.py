"""What a model family is: how to list every parameter, in registration order, from config.json alone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from llmtrain.plan.blocks import Affine, Attention, Entries, gated, linear, norm, under

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmtrain.plan.modelconfig import Config

    Layer = Callable[[Config, int], Entries]


@dataclass(frozen=True, kw_only=True)
class Family:
    """How one ``model_type`` is built."""

    layer: Layer
    """Parameters of decoder layer ``i``."""
    prefix: str = "model"
    """Module that holds everything but the head."""
    embedding: str = "embed_tokens"
    """Name of the token embedding."""
    layers: str = "layers"
    """Name of the list of layers."""
    before: Callable[[Config], Entries] | None = None
    """Parameters between the embedding and the layers."""
    final_norm: str = "norm"
    """Name of the norm after the layers; empty for none."""
    affine: Affine = "weight"
    """Learned vectors of the final norm."""
    tied: bool = False
    """Whether the head shares the embedding when config.json does not say."""
    head_bias: bool = False
    """Bias on the head."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Values of keys that config.json may leave out."""

    def parameters(self, c: Config) -> Entries:
        """Every parameter of the model; a tied head is left out, as torch does."""
        width = c.size("word_embed_proj_dim", c.hidden)
        found: Entries = [(f"{self.embedding}.weight", (c.vocab, width))]
        if self.before is not None:
            found += self.before(c)
        for index in range(c.layers):
            found += under(f"{self.layers}.{index}", self.layer(c, index))
        if self.final_norm:
            found += norm(self.final_norm, c.hidden, affine=self.affine)
        found = under(self.prefix, found)
        return found if self.is_tied(c) else found + linear("lm_head", c.vocab, width, bias=self.head_bias)

    def is_tied(self, c: Config) -> bool:
        """Whether the output head is the embedding."""
        return bool(c.get("tie_word_embeddings", self.tied))


FOUR_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
TWO_NORMS = ("input_layernorm", "post_attention_layernorm")


def modern(
    attention: Attention,
    *,
    norms: tuple[str, ...] = TWO_NORMS,
    affine: Affine = "weight",
    mlp: Callable[[Config], Entries] | None = None,
    bias: str = "attention_bias",
    out_bias: str = "attention_bias",
    mlp_bias: str = "mlp_bias",
) -> Layer:
    """A layer of the Llama kind; the last three name the switches in config.json ("-" for none)."""

    def layer(c: Config, index: int) -> Entries:
        del index
        fixed = replace(
            attention,
            qkv_bias=attention.qkv_bias or c.flag(bias),
            out_bias=attention.out_bias or c.flag(out_bias),
        )
        found = fixed.entries(c)
        found += mlp(c) if mlp else gated(c, c.inner, bias=c.flag(mlp_bias))
        for name in norms:
            found += norm(name, c.hidden, affine=affine)
        return found

    return layer
