from __future__ import annotations

import pytest

from llmtrain.errors import InputFileError
from llmtrain.train.templates import choose_template, has_markers, render_chatml
from llmtrain.train.tinymodel import make_tokenizer

ASK = [{"role": "user", "content": "hi"}]
TALK = [*ASK, {"role": "assistant", "content": "yo"}]


@pytest.fixture
def tokenizer():
    """A tokenizer without a chat template."""
    return make_tokenizer()


def test_own_template_wins(tokenizer):
    """A model's own template is kept when nothing else is asked for."""
    tokenizer.chat_template = "mine"
    assert choose_template(None, tokenizer).text == "mine"


def test_default_is_chatml(tokenizer):
    """A model without a template gets ChatML, with the reason."""
    template = choose_template(None, tokenizer)
    assert template.name == "chatml"
    assert "has none" in template.reason
    tokenizer.chat_template = template.text
    assert tokenizer.apply_chat_template(ASK, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_chatml_ends_turns_with_a_known_token(tokenizer):
    """Where ``<|im_end|>`` is no token, turns end in the model's end-of-sequence token."""
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.get_vocab = lambda: {"<|endoftext|>": 0}
    tokenizer.chat_template = render_chatml(tokenizer)
    assert tokenizer.apply_chat_template(TALK, tokenize=False) == (
        "<|im_start|>user\nhi<|endoftext|>\n<|im_start|>assistant\nyo<|endoftext|>\n"
    )


def test_file_wins_over_own(tokenizer, tmp_path):
    """data.chat_template as a path replaces the model's own template."""
    tokenizer.chat_template = "mine"
    (tmp_path / "t.jinja").write_text("yours")
    template = choose_template(str(tmp_path / "t.jinja"), tokenizer)
    assert (template.text, template.name) == ("yours", str(tmp_path / "t.jinja"))


def test_name_wins_over_own(tokenizer):
    """data.chat_template as a name replaces the model's own template."""
    tokenizer.chat_template = "mine"
    assert choose_template("chatml", tokenizer).text == render_chatml(tokenizer)


def test_unknown_name(tokenizer):
    """A name that is neither a file nor known is refused with the nearest one."""
    with pytest.raises(InputFileError) as caught:
        choose_template("chatm", tokenizer)
    assert "chatml" in caught.value.fix


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{% generation %}x{% endgeneration %}", True),
        ("{%- generation -%}x", True),
        ("{{ generation }}", False),
        ("{% if add_generation_prompt %}", False),
    ],
)
def test_markers_are_recognised(text, expected):
    """Only a generation block counts as a marker."""
    assert has_markers(text) is expected
