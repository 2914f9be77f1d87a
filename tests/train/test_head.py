"""The output head that the pinned TRL puts into a model, and what it must not change."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from trl.trainer.utils import add_fused_lm_head

from llmtrain.train.masking import IGNORED


def make_model(*, tied: bool) -> LlamaForCausalLM:
    """A model with random weights, the same ones every time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=331,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


@pytest.mark.parametrize("tied", [False, True])
def test_the_fused_head_gives_the_loss_and_gradients_of_transformers(tied):
    """Without holding all logits, loss and every gradient are equal within 1e-5 in fp32, masked tokens included."""
    ids = torch.randint(3, 331, (3, 40), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :11] = IGNORED
    labels[2, 30:] = IGNORED
    plain, fused = make_model(tied=tied), make_model(tied=tied)
    add_fused_lm_head(fused, outputs=("log_probs", "entropy", "is_top1"))
    wanted = plain(input_ids=ids, labels=labels, use_cache=False)
    found = fused(input_ids=ids, labels=labels, fused_lm_head=True)
    assert getattr(found, "logits", None) is None
    assert found.loss.item() == pytest.approx(wanted.loss.item(), rel=1e-5)
    wanted.loss.backward()
    found.loss.backward()
    for (name, one), (_, other) in zip(plain.named_parameters(), fused.named_parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-4, atol=1e-6), name
