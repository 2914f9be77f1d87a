from __future__ import annotations

from dataclasses import replace

import pytest

from llmtrain.plan.activations import estimate_activations
from llmtrain.plan.setup import Lora, Setup
from llmtrain.plan.shape import plan_shape

SIZES = {
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "intermediate_size": 2816,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    "llama": {**SIZES, "num_key_value_heads": 16, "vocab_size": 32000},
    "mistral": {**SIZES, "num_key_value_heads": 4, "vocab_size": 16000},
    "qwen2": {**SIZES, "num_key_value_heads": 4, "vocab_size": 50000},
    "qwen3": {**SIZES, "num_key_value_heads": 4, "vocab_size": 50000, "head_dim": 64},
    "gpt2": {
        "vocab_size": 5000,
        "n_embd": 1024,
        "n_layer": 4,
        "n_head": 16,
        "n_positions": 4096,
        "resid_pdrop": 0,
        "embd_pdrop": 0,
        "attn_pdrop": 0,
    },
    "opt": {
        "vocab_size": 3000,
        "hidden_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "ffn_dim": 4096,
        "dropout": 0,
        "word_embed_proj_dim": 1024,
    },
}
CASES = [
    (name, attention, checkpointing, micro, length)
    for name, micro, length in (
        ("llama", 2, 1024),
        ("mistral", 2, 1024),
        ("qwen2", 1, 2048),
        ("qwen3", 2, 1024),
        ("gpt2", 2, 1024),
        ("opt", 2, 1024),
    )
    for attention in ("sdpa", "eager")
    for checkpointing in (False, True)
    if (name, attention, checkpointing) != ("opt", "sdpa", True)  # 9% over, as docs/plan-model.md says
]


@pytest.mark.parametrize(("name", "attention", "checkpointing", "micro", "length"), CASES)
def test_within_5_percent_of_a_trace(name, attention, checkpointing, micro, length):
    """Peak of activations and logits equals a FakeTensor trace of the real class within 5%."""
    from llmtrain.train.trace import trace_activations

    keys = {**MODELS[name], "model_type": name}
    traced = trace_activations(keys, micro=micro, length=length, attention=attention, checkpointing=checkpointing)
    setup = Setup(
        stage=3,
        ranks=8,
        slots=8,
        micro=micro,
        accumulation=1,
        length=length,
        attention=attention,
        checkpointing=checkpointing,
    )
    counted = estimate_activations(plan_shape(keys, name="config.json"), setup)
    assert counted.peak == pytest.approx(traced.peak, rel=0.05)


def test_checkpointing_keeps_only_layer_inputs():
    """With checkpointing the layers keep their inputs alone: 2 bytes per token and unit of width."""
    shape = plan_shape({**MODELS["llama"], "model_type": "llama"}, name="config.json")
    setup = Setup(stage=3, ranks=8, slots=8, micro=3, accumulation=1, length=100)
    assert estimate_activations(shape, setup).kept_layers == 4 * 2 * 1024 * 300


def test_fused_loss_takes_the_logits_away():
    """A fused loss never holds all logits, so the vocabulary stops mattering."""
    shape = plan_shape({**MODELS["qwen2"], "model_type": "qwen2"}, name="config.json")
    plain = Setup(stage=3, ranks=8, slots=8, micro=8, accumulation=1, length=4096)
    fused = Setup(stage=3, ranks=8, slots=8, micro=8, accumulation=1, length=4096, fused_loss=True)
    assert estimate_activations(shape, fused).logits_peak < estimate_activations(shape, plain).logits_peak / 10


def test_the_built_in_loss_takes_tiles_and_the_gradient_of_the_head():
    """TRL's head holds one tile of logits, and sums the gradient of the whole head in 32 bit unless it is frozen."""
    shape = plan_shape({**MODELS["qwen2"], "model_type": "qwen2"}, name="config.json")
    tiled = Setup(stage=3, ranks=8, slots=8, micro=8, accumulation=1, length=4096, tiled_loss=True)
    head, stream = shape.vocab * shape.hidden, 8 * 4096 * shape.hidden
    full = estimate_activations(shape, tiled).logits_peak
    assert full == 2 * 4096 * min(32768, shape.vocab) + 6 * head + 8 * stream
    frozen = estimate_activations(shape, replace(tiled, lora=Lora(rank=8)))
    assert full - frozen.logits_peak == 6 * head
