"""Chat templates: which one a model is trained with, and the default for a model that has none."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.errors import InputFileError
from llmtrain.spec.templates import refuse_unknown

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmtrain.train.runjson import RankRun

DEFAULT = "chatml"


@dataclass(frozen=True, kw_only=True)
class Template:
    """A chat template and where it comes from."""

    name: str
    """``the model's own``, the name of a built-in one, or a path."""
    text: str
    """Jinja source."""
    reason: str
    """Why this one was taken."""

    @property
    def has_markers(self) -> bool:
        """Whether the template itself marks what the assistant says."""
        return has_markers(self.text)


def has_markers(text: str) -> bool:
    """Whether the template has ``{% generation %}`` blocks around the assistant's words."""
    return re.search(r"\{%-?\s*generation\s*-?%\}", text) is not None


def render_chatml(tokenizer: Any) -> str:
    """ChatML whose turns end in a token that the model can learn to stop at.

    That is ``<|im_end|>`` where the vocabulary has it as one token. Elsewhere it is the model's end-of-sequence
    token: no row is added to the embedding, and every inference engine stops there already.
    """
    end = "<|im_end|>"
    if end not in tokenizer.get_vocab() and tokenizer.eos_token:
        end = tokenizer.eos_token
    return (
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + " + repr(end) + " + '\\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )


NAMED: dict[str, Callable[[Any], str]] = {"chatml": render_chatml}
"""Built-in templates by name; each is rendered for the model's vocabulary."""


def choose_template(setting: str | None, tokenizer: Any) -> Template:
    """Decide which template the conversations are rendered with.

    Args:
        setting: ``data.chat_template``: None, a built-in name, or the path of a Jinja file.
        tokenizer: the model's tokenizer.

    Raises:
        InputFileError: neither a built-in name nor a readable file.
    """
    if setting is None and tokenizer.chat_template:
        return Template(name="the model's own", text=tokenizer.get_chat_template(), reason="the model has one")
    if setting is None:
        text = NAMED[DEFAULT](tokenizer)
        return Template(name=DEFAULT, text=text, reason="the model has none, and this is the most common one")
    if setting in NAMED:
        return Template(name=setting, text=NAMED[setting](tokenizer), reason="data.chat_template names it")
    if not Path(setting).is_file():
        refuse_unknown(setting)
    try:
        text = Path(setting).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise InputFileError(f"data.chat_template cannot be read: {problem}", where=setting) from None
    return Template(name=setting, text=text, reason="data.chat_template names it")


def load_tokenizer(run: RankRun) -> tuple[Any, Template | None]:
    """The model's tokenizer, with the chosen chat template set (None for plain text)."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        run.model.path, trust_remote_code=run.model.trust_remote_code, local_files_only=True
    )
    if tokenizer.pad_token is None:
        # Padding is masked out of attention and loss, so any token will do.
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    if run.data.format == "text":
        return tokenizer, None
    template = choose_template(run.data.chat_template, tokenizer)
    tokenizer.chat_template = template.text
    return tokenizer, template
