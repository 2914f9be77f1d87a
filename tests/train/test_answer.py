from __future__ import annotations

import pytest

from llmtrain.errors import InputFileError
from llmtrain.train.answer import answer, main
from llmtrain.train.tinymodel import write_tiny_model


def test_same_answer_each_time(tiny_model):
    """The answer is found greedily and holds neither the question nor special tokens."""
    first = answer(tiny_model, "1+1?", max_tokens=8)
    assert first == answer(tiny_model, "1+1?", max_tokens=8)
    assert "1+1?" not in first
    assert "<|" not in first


def test_not_a_model(tmp_path, capsys):
    """A folder without a model is an error of one line, exit code 3."""
    assert main([str(tmp_path), "hi"]) == 3
    assert capsys.readouterr().err.startswith("error: not a model directory")


def test_no_template(tmp_path):
    """A model without a chat template cannot be asked."""
    write_tiny_model(tmp_path / "mute", template=False)
    with pytest.raises(InputFileError, match="no chat template"):
        answer(tmp_path / "mute", "hi")
