"""Packed rows: what goes into them, and the proof that their examples do not see each other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmtrain.errors import InputFileError
from llmtrain.train.masking import IGNORED
from llmtrain.train.packing import PackingCollator, choose_packs, count_tokens, measure_isolation, prove_isolation
from llmtrain.train.runjson import ModelPart

TOKENS = list(range(40, 90))
ROWS = [
    {"input_ids": [5, 6, 7, 8, 9], "labels": [IGNORED, 6, IGNORED, 8, 9], "seq_lengths": [2, 3]},
    {"input_ids": [5, 6], "labels": [IGNORED, 6], "seq_lengths": [2]},
]


@given(st.lists(st.integers(2, 50), max_size=60), st.integers(0, 5))
def test_packs_hold_every_example_once(lengths, seed):
    """Each example is in exactly one row, none is over its room, and no two rows could be one."""
    packs = choose_packs(lengths, 50, seed)
    assert sorted(at for pack in packs for at in pack) == list(range(len(lengths)))
    sizes = sorted(sum(lengths[at] for at in pack) for pack in packs)
    assert all(0 < size <= 50 for size in sizes)
    assert len(sizes) < 2 or sizes[0] + sizes[1] > 50
    assert packs == choose_packs(lengths, 50, seed)


def test_packed_batch_restarts_positions():
    """Positions start again with each example, and every token of padding is an example of its own."""
    batch = PackingCollator(1, flat=False)(ROWS)
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2], [0, 1, 0, 0, 0]]
    assert batch["input_ids"][1].tolist() == [5, 6, 1, 1, 1]
    assert batch["labels"][1].tolist() == [IGNORED, 6, IGNORED, IGNORED, IGNORED]
    assert "attention_mask" not in batch
    assert count_tokens(batch["position_ids"]) == 7


def test_flat_batch_has_no_padding():
    """For flash attention all rows are one."""
    batch = PackingCollator(1, flat=True)(ROWS)
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2, 0, 1]]
    assert count_tokens(batch["position_ids"]) == 7


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def model(request, tiny_model):
    """The tiny model with each attention that runs here."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation=request.param).eval()


def ask(model):
    """A forward pass as the proof wants it."""
    return lambda ids, positions: model(input_ids=ids, position_ids=positions, use_cache=False).logits.detach()


def test_examples_of_a_row_are_isolated(model):
    """Replacing one example of a packed row leaves the other's logits as they are, bit by bit."""
    found = measure_isolation(ask(model), TOKENS, "cpu")
    assert found.packed == 0
    assert found.proven


def test_packed_logits_are_those_of_the_example_alone(model):
    """In a packed row an example gets the logits it gets in a row of its own."""
    batch = PackingCollator(1, flat=False)([{**ROWS[0], "seq_lengths": [2, 3]}])
    packed = ask(model)(batch["input_ids"], batch["position_ids"])[0, 2:]
    alone = ask(model)(batch["input_ids"][:, 2:], torch.arange(3)[None])[0]
    assert torch.allclose(packed, alone, atol=1e-5)


@pytest.mark.parametrize("broken", ["mask", "positions"])
def test_broken_isolation_is_refused(model, broken):
    """With isolation broken on purpose, by a mask given along or by positions that go on, the proof fails."""

    class Broken:
        training = False

        def eval(self): ...
        def train(self, mode): ...
        def __call__(self, input_ids, position_ids, **_):
            if broken == "positions":
                return model(input_ids=input_ids, position_ids=torch.arange(input_ids.shape[1])[None])
            return model(input_ids=input_ids, position_ids=position_ids, attention_mask=torch.ones_like(input_ids))

    part = ModelPart(path="m", dtype="fp32", attention="sdpa", trust_remote_code=False)
    with pytest.raises(InputFileError, match="see each other"):
        prove_isolation(Broken(), part, TOKENS, "cpu")
