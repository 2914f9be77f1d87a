from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmtrain.errors import InputFileError
from llmtrain.train.tinymodel import main, write_tiny_model


def test_loads_in_transformers(tiny_model):
    """The tiny model is an ordinary model directory with a tied head and fewer than two million parameters."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert model.config.model_type == "llama"
    assert model.num_parameters() < 2_000_000
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


@pytest.mark.parametrize("text", ["plain", "naïve Übung ✓ 🙂", "  spaces\n\nand\ttabs", "<|im_end|>"])
def test_tokenizer_loses_nothing(tiny_model, text):
    """Every text survives the byte-level tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_seed_decides_the_weights(tmp_path, tiny_model):
    """The same seed gives the same file, another seed another one."""
    for name, seed in (("same", 42), ("other", 43)):
        write_tiny_model(tmp_path / name, seed=seed)
    original = (tiny_model / "model.safetensors").read_bytes()
    assert (tmp_path / "same/model.safetensors").read_bytes() == original
    assert (tmp_path / "other/model.safetensors").read_bytes() != original


def test_never_overwrites(tmp_path, capsys):
    """An existing directory is refused with exit code 3, and nothing is left beside it."""
    with pytest.raises(InputFileError):
        write_tiny_model(tmp_path)
    assert main([str(tmp_path)]) == 3
    assert "exists already" in capsys.readouterr().err
    assert list(tmp_path.parent.glob("*.partial")) == []
