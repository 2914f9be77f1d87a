"""Dense model families: ``model_type`` -> how it is built.

Held equal to what transformers instantiates on the meta device by ``tests/plan/test_shape.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmtrain.plan import layers
from llmtrain.plan.blocks import Attention, Entries, gate_up, norm
from llmtrain.plan.family import FOUR_NORMS, POST_NORMS, Family, modern

if TYPE_CHECKING:
    from llmtrain.plan.modelconfig import Config

LLAMA = modern(Attention())


def _positions(c: Config) -> Entries:
    return [("wpe.weight", (c.size("positions"), c.hidden))]


DENSE: dict[str, Family] = {
    **{name: Family(layer=LLAMA) for name in ("llama", "granite")},
    **{
        name: Family(layer=modern(Attention(), bias="-", out_bias="-", mlp_bias="-"))
        for name in ("mistral", "ministral", "ministral3")
    },
    "qwen2": Family(layer=modern(Attention(qkv_bias=True), out_bias="-", mlp_bias="-")),
    "qwen3": Family(layer=modern(Attention(qk_norm="head"), mlp_bias="-"), defaults={"head_dim": 128}),
    "gemma": Family(layer=modern(Attention(), mlp_bias="-"), tied=True, defaults={"head_dim": 256}),
    "gemma2": Family(layer=modern(Attention(), norms=FOUR_NORMS, mlp_bias="-"), tied=True, defaults={"head_dim": 256}),
    "gemma3_text": Family(
        layer=modern(Attention(qk_norm="head"), norms=FOUR_NORMS, mlp_bias="-"), tied=True, defaults={"head_dim": 256}
    ),
    "phi": Family(layer=layers.phi, final_norm="final_layernorm", affine="both", head_bias=True),
    "phi3": Family(layer=layers.phi3),
    "gpt2": Family(
        layer=layers.gpt2,
        prefix="transformer",
        embedding="wte",
        layers="h",
        before=_positions,
        final_norm="ln_f",
        affine="both",
        tied=True,
    ),
    "gpt_neo": Family(
        layer=layers.gpt_neo,
        prefix="transformer",
        embedding="wte",
        layers="h",
        before=_positions,
        final_norm="ln_f",
        affine="both",
        tied=True,
    ),
    "gptj": Family(
        layer=layers.gpt_j,
        prefix="transformer",
        embedding="wte",
        layers="h",
        final_norm="ln_f",
        affine="both",
        head_bias=True,
    ),
    "codegen": Family(
        layer=layers.codegen,
        prefix="transformer",
        embedding="wte",
        layers="h",
        final_norm="ln_f",
        affine="both",
        head_bias=True,
    ),
    "gpt_neox": Family(
        layer=layers.gpt_neox, prefix="gpt_neox", embedding="embed_in", final_norm="final_layer_norm", affine="both"
    ),
    "gpt_bigcode": Family(
        layer=layers.gpt_bigcode,
        prefix="transformer",
        embedding="wte",
        layers="h",
        before=_positions,
        final_norm="ln_f",
        affine="both",
        tied=True,
    ),
    "opt": Family(
        layer=layers.opt,
        prefix="model.decoder",
        before=layers.opt_before,
        final_norm="",
        tied=True,
        defaults={"max_position_embeddings": 2048},
    ),
    "bloom": Family(
        layer=layers.bloom,
        prefix="transformer",
        embedding="word_embeddings",
        layers="h",
        before=lambda c: norm("word_embeddings_layernorm", c.hidden, affine="both"),
        final_norm="ln_f",
        affine="both",
        tied=True,
    ),
    "falcon": Family(
        layer=layers.falcon,
        prefix="transformer",
        embedding="word_embeddings",
        layers="h",
        final_norm="ln_f",
        affine="both",
        tied=True,
    ),
    "mpt": Family(
        layer=layers.mpt, prefix="transformer", embedding="wte", layers="blocks", final_norm="norm_f", tied=True
    ),
    "stablelm": Family(layer=layers.stablelm, affine="both"),
    "olmo": Family(layer=modern(Attention(), affine="none", mlp_bias="-"), affine="none"),
    "olmo2": Family(layer=modern(Attention(qk_norm="full"), norms=POST_NORMS, mlp_bias="-")),
    "olmo3": Family(layer=modern(Attention(qk_norm="full"), norms=POST_NORMS, mlp_bias="-")),
    "glm": Family(
        layer=modern(Attention(), out_bias="-", mlp=lambda c: gate_up(c, c.inner)),
        defaults={"head_dim": 128, "attention_bias": True},
    ),
    "glm4": Family(
        layer=modern(
            Attention(),
            out_bias="-",
            mlp=lambda c: gate_up(c, c.inner),
            norms=("input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"),
        ),
        defaults={"head_dim": 128, "attention_bias": True},
    ),
    "cohere": Family(layer=layers.cohere, tied=True),
    "cohere2": Family(layer=layers.cohere, tied=True),
    "starcoder2": Family(layer=layers.starcoder2, affine="both", tied=True),
    "smollm3": Family(layer=LLAMA, tied=True),
    "nemotron": Family(layer=modern(Attention(), affine="both", mlp=layers.two_way), affine="both"),
    "helium": Family(layer=modern(Attention(square_out=True), out_bias="-"), defaults={"head_dim": 128}),
    "ernie4_5": Family(layer=modern(Attention(), bias="use_bias", out_bias="use_bias", mlp_bias="use_bias"), tied=True),
    "seed_oss": Family(
        layer=modern(Attention(), out_bias="attention_out_bias"),
        defaults={"head_dim": 128, "attention_bias": True},
    ),
    "hunyuan_v1_dense": Family(
        layer=modern(Attention(qk_norm="head", qk_names=("query_layernorm", "key_layernorm")), mlp_bias="-")
    ),
    "apertus": Family(layer=layers.apertus),
    "arcee": Family(layer=modern(Attention(), mlp=layers.two_way)),
    "exaone4": Family(layer=modern(Attention(qk_norm="head"), norms=POST_NORMS, bias="-", out_bias="-", mlp_bias="-")),
    "persimmon": Family(layer=layers.persimmon, final_norm="final_layernorm", affine="both"),
}
"""model_type -> how it is built."""
