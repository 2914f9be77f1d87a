"""Formats of examples, known by the keys of a record. Adding one is one entry in ``FORMATS``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmtrain.spec.foreign import parse_alpaca, parse_prompt_completion, parse_sharegpt
from llmtrain.spec.messages import Example, parse_messages, parse_plain_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmtrain.spec.datafile import Record


@dataclass(frozen=True, kw_only=True)
class Format:
    """One way to write an example as a record."""

    name: str
    """What ``data.format`` and run.json call it."""
    columns: tuple[str, ...]
    """Top-level keys it uses; the first one must be there and recognises the format."""
    sample: str
    """One short valid line, shown to the user."""
    parse: Callable[[Record], tuple[Example, set[str]]]
    """Record to (example, ignored inner keys); raises ``RecordError`` at the first fault."""

    def recognises(self, record: Record) -> bool:
        """Whether the record looks like this format (it may still be invalid)."""
        return self.columns[0] in record


FORMATS: tuple[Format, ...] = (
    Format(
        name="messages",
        columns=("messages",),
        sample='{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}',
        parse=parse_messages,
    ),
    Format(name="text", columns=("text",), sample='{"text": "..."}', parse=parse_plain_text),
    Format(
        name="sharegpt",
        columns=("conversations", "system", "tools"),
        sample='{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}',
        parse=parse_sharegpt,
    ),
    Format(
        name="alpaca",
        columns=("instruction", "input", "output", "system", "history"),
        sample='{"instruction": "...", "input": "", "output": "..."}',
        parse=parse_alpaca,
    ),
    Format(
        name="prompt-completion",
        columns=("prompt", "completion", "system"),
        sample='{"prompt": "...", "completion": "..."}',
        parse=parse_prompt_completion,
    ),
)
"""In the order in which they are tried."""


def recognise(record: Record) -> str | None:
    """Name of the first format that recognises the record, or None."""
    return next((known.name for known in FORMATS if known.recognises(record)), None)
