"""Tokens and labels of one example: which tokens are trained on.

In a conversation only what the assistant says is learned, with the token that ends its turn, so that the model
learns to stop. A template that marks the assistant's words is believed; for any other the words are found by
rendering the conversation up to each answer, exactly as an inference engine would to ask for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

IGNORED = -100
"""Label of a token that is not trained on (what PyTorch's cross entropy ignores)."""

Messages = list[dict[str, str]]


class MaskError(Exception):
    """This example cannot be masked with this template; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """One example as the model sees it."""

    ids: list[int]
    """Token ids."""
    labels: list[int]
    """The same ids where they are trained on, ``IGNORED`` elsewhere; same length."""
    stops: bool
    """Whether each answer ends in a special token that is trained on."""
    split: bool = False
    """Whether prompt and answer were tokenized apart, because their border would otherwise fall inside a token."""


def encode_text(tokenizer: Any, text: str) -> Encoded:
    """Plain text: everything is trained on, and the text ends in the end-of-sequence token."""
    ids = list(tokenizer(text)["input_ids"])
    stop = tokenizer.eos_token_id
    if stop is not None and (not ids or ids[-1] != stop):
        ids.append(stop)
    return Encoded(ids=ids, labels=list(ids), stops=stop is not None)


def encode_marked(tokenizer: Any, messages: Messages) -> Encoded:
    """A conversation under a template with ``{% generation %}`` blocks."""
    rendered = _apply(
        tokenizer,
        messages,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"return_offsets_mapping": True},
    )
    ids, mask = list(rendered["input_ids"]), list(rendered["assistant_masks"])
    if not any(mask):
        raise MaskError("the template's generation blocks mark nothing in it")
    special = set(tokenizer.all_special_ids)
    spans = rendered["offset_mapping"]
    stops = True
    for at in range(1, len(ids) + 1):
        if not mask[at - 1] or ids[at - 1] in special or (at < len(ids) and mask[at]):
            continue
        if at < len(ids) and (ids[at] in special or spans[at] == spans[at - 1]):
            # Templates often leave the end-of-turn token just outside of the block, and transformers 4 the last bytes
            # of a letter that is several tokens.
            mask[at] = 1
        else:
            stops = False
    labels = [token if trained else IGNORED for token, trained in zip(ids, mask, strict=True)]
    return Encoded(ids=ids, labels=labels, stops=stops)


def encode_by_prefixes(tokenizer: Any, messages: Messages) -> Encoded:
    """A conversation under a template without such blocks.

    Raises:
        MaskError: the conversation up to an answer is not the beginning of the whole conversation, so the answer's
            place cannot be known.
    """
    full = _apply(tokenizer, messages)
    borders = _find_borders(tokenizer, messages, full)
    pieces = [full[start:end] for start, end in pairwise([0, *borders, len(full)])]
    prefixes = [full[:border] for border in borders]
    whole, *encoded = tokenizer([full, *prefixes], add_special_tokens=False)["input_ids"]
    split = any(whole[: len(ids)] != ids for ids in encoded)
    if split:
        # A token spans the border, e.g. two newlines. The model will see the prompt's own tokens when it is asked,
        # so these are the ones to learn from.
        tokens = [list(ids) for ids in tokenizer(pieces, add_special_tokens=False)["input_ids"]]
    else:
        cuts = [0, *(len(ids) for ids in encoded), len(whole)]
        tokens = [whole[start:end] for start, end in pairwise(cuts)]
    special = set(tokenizer.all_special_ids)
    labels: list[int] = []
    stops = True
    for at, ids in enumerate(tokens):
        # Pieces alternate: prompt, answer, prompt, answer, ..., rest.
        if at % 2 == 0:
            labels += [IGNORED] * len(ids)
            continue
        trained = _trim_after_stop(tokenizer, ids, special)
        stops = stops and bool(ids) and ids[trained - 1] in special
        labels += ids[:trained] + [IGNORED] * (len(ids) - trained)
    return Encoded(ids=[token for ids in tokens for token in ids], labels=labels, stops=stops, split=split)


def _find_borders(tokenizer: Any, messages: Messages, full: str) -> list[int]:
    """Where each answer starts and ends in the rendered conversation: start, end, start, end, ..."""
    borders: list[int] = []
    for at, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = _apply(tokenizer, messages[:at], add_generation_prompt=True)
        answered = _apply(tokenizer, messages[: at + 1])
        if not answered.startswith(prompt):
            raise MaskError(f"the template renders message {at + 1} differently when it is asked for")
        if not full.startswith(answered):
            raise MaskError(f"the template renders message {at + 1} differently when more messages follow")
        borders += [len(prompt), len(answered)]
    return borders


def _trim_after_stop(tokenizer: Any, ids: list[int], special: set[int]) -> int:
    """How many tokens of an answer are trained on: white space after the end of the turn is never generated."""
    last = max((at for at, token in enumerate(ids) if token in special), default=None)
    if last is None or tokenizer.decode(ids[last + 1 :]).strip():
        return len(ids)
    return last + 1


def _apply(tokenizer: Any, messages: Messages, **options: Any) -> Any:
    options.setdefault("tokenize", False)
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except Exception as problem:  # templates raise what they like, e.g. when roles do not alternate
        raise MaskError(f"the chat template refuses it: {problem}") from problem
