"""Names of built-in chat templates; what they are is known where the tokenizer is, in ``train/templates``."""

from __future__ import annotations

import difflib

from llmtrain.errors import InputFileError

TEMPLATES = ("chatml",)


def refuse_unknown(name: str) -> None:
    """Tell a name that no template has, before any host is asked.

    Raises:
        InputFileError: it has none, and it is no file either.
    """
    if name in TEMPLATES:
        return
    near = difflib.get_close_matches(name, TEMPLATES, n=1)
    raise InputFileError(
        f"data.chat_template: no such file and no such template: {name}",
        where="data.chat_template",
        fix=f"did you mean {near[0]}?" if near else f"give the path of a Jinja file, or one of {', '.join(TEMPLATES)}",
    )
