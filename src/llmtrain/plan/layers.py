"""Decoder layers of dense families that are not simply of the Llama kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmtrain.plan.blocks import Affine, Attention, Entries, fused_attention, gate_up, gated, linear, norm, plain, under

if TYPE_CHECKING:
    from llmtrain.plan.modelconfig import Config

MLP_NAMES = ("fc1", "fc2")
OLD_MLP = ("dense_h_to_4h", "dense_4h_to_h")


def phi(c: Config, index: int) -> Entries:
    """A layer of Phi 1 to 2."""
    del index
    found = Attention(qkv_bias=True, out_bias=True, out="dense").entries(c)
    if c.flag("qk_layernorm"):
        head = c.hidden // c.heads
        found += under("self_attn", norm("q_layernorm", head, affine="both") + norm("k_layernorm", head, affine="both"))
    return found + plain(c, c.inner, MLP_NAMES, bias=True) + norm("input_layernorm", c.hidden, affine="both")


def phi3(c: Config, index: int) -> Entries:
    """A layer of Phi 3 and 4."""
    del index
    rows = (c.heads + 2 * c.kv_heads) * c.head_dim
    found = fused_attention(c, name="self_attn", qkv="qkv_proj", out="o_proj", rows=rows, first=False)
    found += gate_up(c, c.inner)
    return found + norm("input_layernorm", c.hidden) + norm("post_attention_layernorm", c.hidden)


def _conv1d(name: str, columns: int, rows: int) -> Entries:
    """GPT-2's linear layer keeps its weight transposed."""
    return [(f"{name}.weight", (columns, rows)), (f"{name}.bias", (rows,))]


def gpt2(c: Config, index: int) -> Entries:
    """A layer of GPT-2."""
    del index
    found = norm("ln_1", c.hidden, affine="both")
    found += _conv1d("attn.c_attn", c.hidden, 3 * c.hidden) + _conv1d("attn.c_proj", c.hidden, c.hidden)
    found += norm("ln_2", c.hidden, affine="both")
    return found + _conv1d("mlp.c_fc", c.hidden, c.inner) + _conv1d("mlp.c_proj", c.inner, c.hidden)


def gpt_neo(c: Config, index: int) -> Entries:
    """A layer of GPT-Neo."""
    del index
    found = norm("ln_1", c.hidden, affine="both")
    found += [(f"attn.attention.{letter}_proj.weight", (c.hidden, c.hidden)) for letter in "kvq"]
    found += linear("attn.attention.out_proj", c.hidden, c.hidden, bias=True) + norm("ln_2", c.hidden, affine="both")
    return found + plain(c, c.inner, ("c_fc", "c_proj"), bias=True)


def gpt_j(c: Config, index: int) -> Entries:
    """A layer of GPT-J."""
    del index
    found = norm("ln_1", c.hidden, affine="both")
    found += Attention(name="attn", order="kvq", out="out_proj").entries(c)
    return found + plain(c, c.inner, ("fc_in", "fc_out"), bias=True)


def codegen(c: Config, index: int) -> Entries:
    """A layer of CodeGen."""
    del index
    found = norm("ln_1", c.hidden, affine="both")
    found += fused_attention(c, name="attn", qkv="qkv_proj", out="out_proj", rows=3 * c.hidden, first=False)
    return found + plain(c, c.inner, ("fc_in", "fc_out"), bias=True)


def gpt_neox(c: Config, index: int) -> Entries:
    """A layer of GPT-NeoX and Pythia."""
    del index
    found = norm("input_layernorm", c.hidden, affine="both") + norm("post_attention_layernorm", c.hidden, affine="both")
    bias = c.flag("attention_bias", default=True)
    found += fused_attention(c, name="attention", qkv="query_key_value", out="dense", rows=3 * c.hidden, bias=bias)
    return found + plain(c, c.inner, OLD_MLP, bias=True)


def gpt_bigcode(c: Config, index: int) -> Entries:
    """A layer of StarCoder and SantaCoder."""
    del index
    kv_heads = 1 if c.flag("multi_query", default=True) else c.heads
    rows = c.hidden + 2 * kv_heads * c.head_dim
    found = norm("ln_1", c.hidden, affine="both")
    found += fused_attention(c, name="attn", qkv="c_attn", out="c_proj", rows=rows, bias=True)
    return found + norm("ln_2", c.hidden, affine="both") + plain(c, c.inner, ("c_fc", "c_proj"), bias=True)


def opt(c: Config, index: int) -> Entries:
    """A layer of OPT."""
    del index
    bias = c.flag("enable_bias", default=True)
    affine: Affine = "both" if c.flag("layer_norm_elementwise_affine", default=True) else "none"
    found = Attention(order="kvq", out="out_proj", qkv_bias=bias, out_bias=bias).entries(c)
    found += norm("self_attn_layer_norm", c.hidden, affine=affine)
    return found + plain(c, c.inner, MLP_NAMES, name="", bias=bias) + norm("final_layer_norm", c.hidden, affine=affine)


def opt_before(c: Config) -> Entries:
    """Positions, projections and the last norm, which OPT registers before its layers."""
    narrow = c.size("word_embed_proj_dim", c.hidden)
    found: Entries = [("embed_positions.weight", (c.size("positions") + 2, c.hidden))]
    if narrow != c.hidden:
        found += linear("project_out", narrow, c.hidden) + linear("project_in", c.hidden, narrow)
    if c.flag("do_layer_norm_before", default=True) and not c.flag("_remove_final_layer_norm"):
        affine: Affine = "both" if c.flag("layer_norm_elementwise_affine", default=True) else "none"
        found += norm("final_layer_norm", c.hidden, affine=affine)
    return found


def bloom(c: Config, index: int) -> Entries:
    """A layer of BLOOM."""
    del index
    found = norm("input_layernorm", c.hidden, affine="both")
    found += fused_attention(c, name="self_attention", qkv="query_key_value", out="dense", rows=3 * c.hidden, bias=True)
    return (
        found + norm("post_attention_layernorm", c.hidden, affine="both") + plain(c, 4 * c.hidden, OLD_MLP, bias=True)
    )


def falcon(c: Config, index: int) -> Entries:
    """A layer of Falcon, in its three designs."""
    del index
    bias, new = c.flag("bias"), c.flag("new_decoder_architecture")
    kv_heads = c.kv_heads if new else (1 if c.flag("multi_query", default=True) else c.heads)
    rows = (c.heads + 2 * kv_heads) * c.head_dim
    found = fused_attention(c, name="self_attention", qkv="query_key_value", out="dense", rows=rows, bias=bias)
    found += plain(c, c.inner, OLD_MLP, bias=bias)
    if new and c.get("num_ln_in_parallel_attn", 2) == 2:
        return found + norm("ln_attn", c.hidden, affine="both") + norm("ln_mlp", c.hidden, affine="both")
    if not new and not c.flag("parallel_attn", default=True):
        found += norm("post_attention_layernorm", c.hidden, affine="both")
    return found + norm("input_layernorm", c.hidden, affine="both")


def mpt(c: Config, index: int) -> Entries:
    """A layer of MPT."""
    del index
    inner = 4 * c.hidden  # transformers does not read the file's expansion_ratio
    found = norm("norm_1", c.hidden)
    found += fused_attention(c, name="attn", qkv="Wqkv", out="out_proj", rows=3 * c.hidden)
    return found + norm("norm_2", c.hidden) + plain(c, inner, ("up_proj", "down_proj"), name="ffn")


def stablelm(c: Config, index: int) -> Entries:
    """A layer of StableLM."""
    del index
    found = Attention(qkv_bias=c.flag("use_qkv_bias")).entries(c)
    if c.flag("qk_layernorm"):
        for name, count in (("q_layernorm", c.heads), ("k_layernorm", c.kv_heads)):
            found += [(f"self_attn.{name}.norms.{head}.weight", (c.head_dim,)) for head in range(count)]
    found += gated(c, c.inner) + norm("input_layernorm", c.hidden, affine="both")
    if not c.flag("use_parallel_residual"):
        found += norm("post_attention_layernorm", c.hidden, affine="both")
    return found


def cohere(c: Config, index: int) -> Entries:
    """A layer of Command R."""
    del index
    bias = c.flag("attention_bias")
    attention = Attention(qkv_bias=bias, out_bias=bias, qk_norm="heads" if c.flag("use_qk_norm") else "")
    return attention.entries(c) + gated(c, c.inner) + norm("input_layernorm", c.hidden)


def apertus(c: Config, index: int) -> Entries:
    """A layer of Apertus."""
    del index
    bias = c.flag("attention_bias")
    found = Attention(qk_norm="head", qkv_bias=bias, out_bias=bias).entries(c)
    found += plain(c, c.inner, ("up_proj", "down_proj"))
    if c.get("hidden_act", "xielu") == "xielu":
        found += [("mlp.act_fn.alpha_p", (1,)), ("mlp.act_fn.alpha_n", (1,))]
    return found + norm("attention_layernorm", c.hidden) + norm("feedforward_layernorm", c.hidden)


def starcoder2(c: Config, index: int) -> Entries:
    """A layer of StarCoder 2."""
    del index
    bias = c.flag("use_bias", default=True)
    found = Attention(qkv_bias=bias, out_bias=bias).entries(c) + plain(c, c.inner, ("c_fc", "c_proj"), bias=bias)
    for name in ("input_layernorm", "post_attention_layernorm"):
        found += norm(name, c.hidden, affine="both")
    return found


def persimmon(c: Config, index: int) -> Entries:
    """A layer of Persimmon."""
    del index
    found = fused_attention(c, name="self_attn", qkv="query_key_value", out="dense", rows=3 * c.hidden, bias=True)
    if c.flag("qk_layernorm", default=True):
        for name in ("q_layernorm", "k_layernorm"):
            found += under("self_attn", norm(name, c.hidden // c.heads, affine="both"))
    found += plain(c, c.inner, OLD_MLP, bias=True)
    for name in ("input_layernorm", "post_attention_layernorm"):
        found += norm(name, c.hidden, affine="both")
    return found


def two_way(c: Config) -> Entries:
    """Up and down projections without a gate."""
    return plain(c, c.inner, ("up_proj", "down_proj"), bias=c.flag("mlp_bias"))
