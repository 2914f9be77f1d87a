from __future__ import annotations

import pytest

from llmtrain.train.masking import IGNORED, MaskError, encode_by_prefixes, encode_marked, encode_text
from llmtrain.train.tinymodel import make_tokenizer

# SmolLM2's own template: no generation blocks, a system message of its own when the conversation has none.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are S.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The block holds the words alone; the end of the turn is outside of it, as in many templates.
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TWO_TURNS = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "bc"},
    {"role": "user", "content": "d"},
    {"role": "assistant", "content": "e"},
]


@pytest.fixture
def tokenizer():
    """One token per byte."""
    return make_tokenizer()


def show(tokenizer, encoded):
    """Tokens as a table: each token's text, and a star where it is trained on."""
    texts = [tokenizer.decode([token]) for token in encoded.ids]
    for token, label in zip(encoded.ids, encoded.labels, strict=True):
        assert label in (token, IGNORED)
    return [(text, "*" if label != IGNORED else "") for text, label in zip(texts, encoded.labels, strict=True)]


def spell(text, mark=""):
    """Rows of the table for plain letters."""
    return [(letter, mark) for letter in text]


S, E = ("<|im_start|>", ""), ("<|im_end|>", "")


def test_smollm2_template_token_by_token(tokenizer):
    """Without generation blocks exactly the answers and the tokens that end their turns are trained on."""
    tokenizer.chat_template = SMOLLM2
    encoded = encode_by_prefixes(tokenizer, TWO_TURNS)
    assert show(tokenizer, encoded) == [
        *[S, *spell("system\nYou are S."), E, ("\n", "")],
        *[S, *spell("user\na"), E, ("\n", "")],
        *[S, *spell("assistant\n"), *spell("bc", "*"), ("<|im_end|>", "*"), ("\n", "")],
        *[S, *spell("user\nd"), E, ("\n", "")],
        *[S, *spell("assistant\n"), *spell("e", "*"), ("<|im_end|>", "*"), ("\n", "")],
    ]
    assert encoded.stops
    assert not encoded.split


def test_marked_template_token_by_token(tokenizer):
    """With generation blocks their words are trained on, and the end of the turn also when it stands outside."""
    tokenizer.chat_template = MARKED
    encoded = encode_marked(tokenizer, TWO_TURNS)
    assert show(tokenizer, encoded) == [
        *[S, *spell("user\na"), E, ("\n", "")],
        *[S, *spell("assistant\n"), *spell("bc", "*"), ("<|im_end|>", "*"), ("\n", "")],
        *[S, *spell("user\nd"), E, ("\n", "")],
        *[S, *spell("assistant\n"), *spell("e", "*"), ("<|im_end|>", "*"), ("\n", "")],
    ]
    assert encoded.stops


@pytest.mark.parametrize("inside", [True, False])
def test_only_the_end_of_the_turn(tokenizer, inside):
    """Where the next turn starts right after the end-of-turn token, its first token is not trained on."""
    end = "<|im_end|>"
    text = MARKED.replace("\n' }}{% endfor", "' }}{% endfor")
    if inside:
        text = text.replace(
            "{{ message['content'] }}{% endgeneration", "{{ message['content'] + '<|im_end|>' }}{% endgeneration"
        )
        text = text.replace(
            "{{ '<|im_end|>' }}{% endfor", "{{ '<|im_end|>' if message['role'] != 'assistant' }}{% endfor"
        )
    tokenizer.chat_template = text
    table = show(tokenizer, encode_marked(tokenizer, TWO_TURNS))
    at = table.index((end, "*"))
    assert table[at - 1 : at + 2] == [("c", "*"), (end, "*"), S]
    assert [mark for _, mark in table].count("*") == 5


@pytest.mark.parametrize(
    "messages",
    [
        TWO_TURNS,
        [{"role": "system", "content": "be\nbrief"}, *TWO_TURNS],
        [{"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": " two  words\n"}],
        [{"role": "user", "content": "✓"}, {"role": "assistant", "content": "\n\n🙂"}],
    ],
)
def test_both_ways_agree(tokenizer, messages):
    """Generation blocks and prefixes find the same tokens in the same conversation."""
    tokenizer.chat_template = MARKED
    marked = encode_marked(tokenizer, messages)
    tokenizer.chat_template = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    prefixed = encode_by_prefixes(tokenizer, messages)
    assert (marked.ids, marked.labels) == (prefixed.ids, prefixed.labels)


def test_prompt_is_what_inference_sees(tokenizer):
    """The tokens before an answer are those of the generation prompt, none of them trained on."""
    tokenizer.chat_template = SMOLLM2
    encoded = encode_by_prefixes(tokenizer, TWO_TURNS)
    prompt = tokenizer.apply_chat_template(TWO_TURNS[:3], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert encoded.ids[: len(prompt)] == prompt
    assert encoded.labels[len(prompt)] == encoded.ids[len(prompt)]


def test_border_inside_a_token(tokenizer):
    """When prompt and answer share a token they are tokenized apart, and the prompt stays what inference sees."""
    from tokenizers import AddedToken

    tokenizer.chat_template = SMOLLM2
    tokenizer.add_tokens([AddedToken("\n\n", normalized=False)])
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\nb"}]
    encoded = encode_by_prefixes(tokenizer, messages)
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert encoded.split
    assert encoded.ids[: len(prompt)] == prompt
    assert show(tokenizer, encoded)[len(prompt) :] == [*spell("\nb", "*"), ("<|im_end|>", "*"), ("\n", "")]


def test_template_that_rewrites_history(tokenizer):
    """A template that shows earlier answers differently is refused, not trained on at the wrong place."""
    tokenizer.chat_template = SMOLLM2.replace(
        "message['content'] +", "(message['content'] if loop.last or message['role'] == 'user' else '...') +"
    )
    with pytest.raises(MaskError, match="message 2 differently when more messages follow"):
        encode_by_prefixes(tokenizer, TWO_TURNS)


def test_template_whose_prompt_differs(tokenizer):
    """A template whose generation prompt is not how an answer begins is refused."""
    tokenizer.chat_template = SMOLLM2.replace("'<|im_start|>assistant\n'", "'Answer: '")
    with pytest.raises(MaskError, match="message 2 differently when it is asked for"):
        encode_by_prefixes(tokenizer, TWO_TURNS)


def test_template_that_refuses(tokenizer):
    """What a template raises is passed on in its own words."""
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(MaskError, match="roles must alternate"):
        encode_by_prefixes(tokenizer, TWO_TURNS)


def test_marks_that_mark_nothing(tokenizer):
    """A conversation in which no generation block is reached is refused."""
    tokenizer.chat_template = MARKED.replace("== 'assistant'", "== 'nobody'")
    with pytest.raises(MaskError, match="mark nothing"):
        encode_marked(tokenizer, TWO_TURNS)


@pytest.mark.parametrize("way", [encode_marked, encode_by_prefixes])
def test_answer_without_an_end(tokenizer, way):
    """An answer that no special token ends is trained on and reported."""
    text = MARKED.replace("<|im_end|>", "")
    if way is encode_by_prefixes:
        text = text.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    tokenizer.chat_template = text
    encoded = way(tokenizer, TWO_TURNS)
    assert not encoded.stops
    assert ("b", "*") in show(tokenizer, encoded)


def test_plain_text_ends_once(tokenizer):
    """Plain text is trained on whole and ends in one end-of-sequence token, whether or not it had one."""
    expected = [*spell("ab", "*"), ("<|im_end|>", "*")]
    assert show(tokenizer, encode_text(tokenizer, "ab")) == expected
    assert show(tokenizer, encode_text(tokenizer, "ab<|im_end|>")) == expected
