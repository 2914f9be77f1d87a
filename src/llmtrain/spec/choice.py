"""A value that llmtrain picked, and why: every automatic choice is printed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One automatic choice."""

    key: str
    """What was chosen, as a dotted key of the run file or of DeepSpeed's JSON."""
    value: Any
    """What it was set to; None when the key was left out."""
    reason: str
    """Why, in half a sentence."""
