"""The pieces decoder layers are made of, as (name, shape) lists in the order transformers registers them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from llmtrain.plan.modelconfig import Config

Shape = tuple[int, ...]
Entries = list[tuple[str, Shape]]
Affine = Literal["none", "weight", "both"]


def linear(name: str, rows: int, columns: int, *, bias: bool = False) -> Entries:
    """A linear layer: weight (rows, columns) and perhaps a bias."""
    entries: Entries = [(f"{name}.weight", (rows, columns))]
    return [*entries, (f"{name}.bias", (rows,))] if bias else entries


def norm(name: str, *shape: int, affine: Affine = "weight") -> Entries:
    """A normalisation's learned vectors."""
    suffixes = {"none": (), "weight": ("weight",), "both": ("weight", "bias")}[affine]
    return [(f"{name}.{suffix}", shape) for suffix in suffixes]


def under(prefix: str, entries: Entries) -> Entries:
    """The same entries inside a module."""
    return [(f"{prefix}.{name}", shape) for name, shape in entries]


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Separate projections for queries, keys and values."""

    name: str = "self_attn"
    """Module name."""
    order: str = "qkv"
    """Order in which the three are registered."""
    out: str = "o_proj"
    """Name of the output projection."""
    qkv_bias: bool = False
    """Biases on the three."""
    out_bias: bool = False
    """Bias on the output projection."""
    qk_norm: Literal["", "head", "full", "hidden", "heads"] = ""
    """Width of the norms on queries and keys: one head, all heads, the hidden size, or heads x head width."""
    qk_names: tuple[str, str] = ("q_norm", "k_norm")
    """Names of these norms."""
    qk_affine: Affine = "weight"
    """Their learned vectors."""
    qk_first: bool = False
    """The norms are registered before the projections."""
    square_out: bool = False
    """The output projection is hidden x hidden whatever the width of a head."""

    def entries(self, c: Config) -> Entries:
        """Parameters of the block."""
        width, narrow, head = c.heads * c.head_dim, c.kv_heads * c.head_dim, c.head_dim
        rows = {"q": width, "k": narrow, "v": narrow}
        found: Entries = []
        for letter in self.order:
            found += linear(f"{letter}_proj", rows[letter], c.hidden, bias=self.qkv_bias)
        found += linear(self.out, c.hidden, c.hidden if self.square_out else width, bias=self.out_bias)
        norms: Entries = []
        if self.qk_norm:
            shapes: dict[str, tuple[Shape, Shape]] = {
                "head": ((head,), (head,)),
                "full": ((width,), (narrow,)),
                "hidden": ((c.hidden,), (c.hidden // c.heads * c.kv_heads,)),
                "heads": ((c.heads, head), (c.kv_heads, head)),
            }
            for label, shape in zip(self.qk_names, shapes[self.qk_norm], strict=True):
                norms += norm(label, *shape, affine=self.qk_affine)
        return under(self.name, [*norms, *found] if self.qk_first else [*found, *norms])


def fused_attention(
    c: Config, *, name: str, qkv: str, out: str, rows: int, bias: bool = False, **where: bool
) -> Entries:
    """Queries, keys and values from one matrix. ``first=False`` registers the output projection before it."""
    both = [linear(qkv, rows, c.hidden, bias=bias), linear(out, c.hidden, c.heads * c.head_dim, bias=bias)]
    if not where.get("first", True):
        both.reverse()
    return under(name, [*both[0], *both[1]])


def latent_attention(c: Config) -> Entries:
    """DeepSeek's multi-head latent attention."""
    bias = c.flag("attention_bias")
    rope, nope = c.size("qk_rope_head_dim", 64), c.size("qk_nope_head_dim", 128)
    value, rank = c.size("v_head_dim", 128), c.size("kv_lora_rank", 512)
    query_rank = c.raw("q_lora_rank", None)
    found: Entries = []
    if query_rank is None:
        found += linear("q_proj", c.heads * (nope + rope), c.hidden)
    else:
        found += linear("q_a_proj", query_rank, c.hidden, bias=bias)
        found += norm("q_a_layernorm", query_rank)
        found += linear("q_b_proj", c.heads * (nope + rope), query_rank)
    found += linear("kv_a_proj_with_mqa", rank + rope, c.hidden, bias=bias)
    found += norm("kv_a_layernorm", rank)
    found += linear("kv_b_proj", c.heads * (nope + value), rank)
    found += linear("o_proj", c.hidden, c.heads * value, bias=bias)
    return under("self_attn", found)


def gated(c: Config, inner: int, *, name: str = "mlp", bias: bool = False) -> Entries:
    """Gate, up and down projections."""
    found = linear("gate_proj", inner, c.hidden, bias=bias) + linear("up_proj", inner, c.hidden, bias=bias)
    return under(name, found + linear("down_proj", c.hidden, inner, bias=bias))


def gate_up(c: Config, inner: int) -> Entries:
    """Gate and up projections in one matrix."""
    return under("mlp", linear("gate_up_proj", 2 * inner, c.hidden) + linear("down_proj", c.hidden, inner))


def plain(c: Config, inner: int, names: tuple[str, str], *, name: str = "mlp", bias: bool = False) -> Entries:
    """Two projections with an activation between them."""
    found = linear(names[0], inner, c.hidden, bias=bias) + linear(names[1], c.hidden, inner, bias=bias)
    return under(name, found) if name else found


def experts(c: Config, count: int, inner: int, *, name: str = "mlp.experts") -> Entries:
    """All experts of a layer in two tensors, as transformers 5 keeps them."""
    return under(name, [("gate_up_proj", (count, 2 * inner, c.hidden)), ("down_proj", (count, c.hidden, inner))])
