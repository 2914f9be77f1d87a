"""llmtrain: fine-tune a causal language model over bare SSH hosts with one command."""

from __future__ import annotations

__version__ = "0.1.0"
