"""Model families with a mixture of experts, and the table of all families.

Held equal to what transformers instantiates on the meta device by ``tests/plan/test_shape.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmtrain.plan.blocks import Attention, Entries, experts, gated, latent_attention, linear, norm, under
from llmtrain.plan.dense import DENSE
from llmtrain.plan.family import Family

if TYPE_CHECKING:
    from llmtrain.plan.modelconfig import Config


def _is_sparse(c: Config, index: int) -> bool:
    return index not in c.get("mlp_only_layers", []) and (index + 1) % c.get("decoder_sparse_step", 1) == 0


def _mixtral(c: Config, index: int) -> Entries:
    del index
    count = c.size("num_local_experts", 8)
    found = Attention().entries(c) + linear("mlp.gate", count, c.hidden) + experts(c, count, c.inner)
    return found + norm("input_layernorm", c.hidden) + norm("post_attention_layernorm", c.hidden)


def _qwen2_moe(c: Config, index: int) -> Entries:
    found = Attention(qkv_bias=c.flag("qkv_bias", default=True)).entries(c)
    if _is_sparse(c, index):
        count = c.size("num_experts", 60)
        found += linear("mlp.gate", count, c.hidden) + experts(c, count, c.size("moe_intermediate_size", 1408))
        found += gated(c, c.size("shared_expert_intermediate_size", 5632), name="mlp.shared_expert")
        found += linear("mlp.shared_expert_gate", 1, c.hidden)
    else:
        found += gated(c, c.inner)
    return found + norm("input_layernorm", c.hidden) + norm("post_attention_layernorm", c.hidden)


def _qwen3_moe(c: Config, index: int) -> Entries:
    bias = c.flag("attention_bias")
    found = Attention(qk_norm="head", qkv_bias=bias, out_bias=bias).entries(c)
    if _is_sparse(c, index):
        count = c.size("num_experts", c.get("num_local_experts", 128))
        found += experts(c, count, c.size("moe_intermediate_size", 768)) + linear("mlp.gate", count, c.hidden)
    else:
        found += gated(c, c.inner)
    return found + norm("input_layernorm", c.hidden) + norm("post_attention_layernorm", c.hidden)


def _olmoe(c: Config, index: int) -> Entries:
    del index
    count, bias = c.size("num_experts", 64), c.flag("attention_bias")
    found = Attention(qk_norm="hidden", qkv_bias=bias, out_bias=bias).entries(c)
    found += linear("mlp.gate", count, c.hidden) + experts(c, count, c.inner)
    return found + norm("input_layernorm", c.hidden) + norm("post_attention_layernorm", c.hidden)


def _shared(c: Config, index: int) -> Entries:
    """DeepSeek's feed-forward part: dense in the first layers, then routed and shared experts."""
    if index < c.get("first_k_dense_replace", 0):
        return gated(c, c.inner)
    count = c.size("n_routed_experts", 64)
    inner = c.size("moe_intermediate_size", 1407)
    found = experts(c, count, inner) + linear("mlp.gate", count, c.hidden)
    return found + gated(c, inner * c.get("n_shared_experts", 1), name="mlp.shared_experts")


def _deepseek(c: Config, index: int) -> Entries:
    found = latent_attention(c) + _shared(c, index)
    return found + norm("input_layernorm", c.hidden) + norm("post_attention_layernorm", c.hidden)


def _glm4_moe(c: Config, index: int) -> Entries:
    norms = "head" if c.flag("use_qk_norm") else ""
    found = Attention(qkv_bias=c.flag("attention_bias"), qk_norm=norms).entries(c) + _shared(c, index)  # type: ignore[arg-type]
    return found + norm("input_layernorm", c.hidden) + norm("post_attention_layernorm", c.hidden)


def _granitemoe(c: Config, index: int) -> Entries:
    del index
    count, bias = c.size("num_local_experts", 8), c.flag("attention_bias")
    found = Attention(qkv_bias=bias, out_bias=bias).entries(c)
    found += norm("input_layernorm", c.hidden) + norm("post_attention_layernorm", c.hidden)
    return found + under(
        "block_sparse_moe", linear("router", count, c.hidden) + experts(c, count, c.inner, name="experts")
    )


def _gpt_oss(c: Config, index: int) -> Entries:
    del index
    count, inner, bias = c.size("num_local_experts", 128), c.inner, c.flag("attention_bias", default=True)
    found: Entries = [("self_attn.sinks", (c.heads,)), *Attention(qkv_bias=bias, out_bias=bias).entries(c)]
    found += linear("mlp.router", count, c.hidden, bias=True)
    found += [
        ("mlp.experts.gate_up_proj", (count, c.hidden, 2 * inner)),
        ("mlp.experts.gate_up_proj_bias", (count, 2 * inner)),
        ("mlp.experts.down_proj", (count, inner, c.hidden)),
        ("mlp.experts.down_proj_bias", (count, c.hidden)),
    ]
    return found + norm("input_layernorm", c.hidden) + norm("post_attention_layernorm", c.hidden)


def _phimoe(c: Config, index: int) -> Entries:
    del index
    count, bias = c.size("num_local_experts", 16), c.flag("attention_bias")
    found = Attention(qkv_bias=bias, out_bias=bias).entries(c)
    found += linear("mlp.router", count, c.hidden) + experts(c, count, c.inner)
    for name in ("input_layernorm", "post_attention_layernorm"):
        found += norm(name, c.hidden, affine="both")
    return found


MOE: dict[str, Family] = {
    "mixtral": Family(layer=_mixtral),
    "qwen2_moe": Family(layer=_qwen2_moe),
    "qwen3_moe": Family(layer=_qwen3_moe),
    "olmoe": Family(layer=_olmoe),
    "deepseek_v2": Family(layer=_deepseek),
    "deepseek_v3": Family(layer=_deepseek, defaults={"first_k_dense_replace": 3}),
    "glm4_moe": Family(layer=_glm4_moe, defaults={"first_k_dense_replace": 1}),
    "granitemoe": Family(layer=_granitemoe),
    "gpt_oss": Family(layer=_gpt_oss, defaults={"head_dim": 64}),
    "phimoe": Family(layer=_phimoe, affine="both"),
}
"""The same for models with a mixture of experts."""

FAMILIES: dict[str, Family] = {**DENSE, **MOE}
