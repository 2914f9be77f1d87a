"""What a run needs of its hosts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

MIN_FREE_BYTES = 1 << 30
PACKAGES = ("torch", "deepspeed", "transformers", "trl", "accelerate", "datasets")
"""Packages the ranks of our own fine-tune import."""
SCRIPT_PACKAGES = ("torch", "deepspeed")
"""The same for a user's program; what else it imports is between it and its environment."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a run needs of its hosts; without a run only what any run needs."""

    trees: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Path -> digest of the tree here that hosts must have or lack, see :func:`hostfacts.tree_digest`."""
    bring: Mapping[str, str] = field(default_factory=dict)
    """Path -> ``missing``, ``same`` or ``never``: where ours may be put there; ``missing`` if not named."""
    free_bytes: int = MIN_FREE_BYTES
    """Free space wanted in the working folder of every host."""
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    """Host -> RAM below which the run certainly cannot live."""
    ops: tuple[str, ...] = ()
    """DeepSpeed operations the run compiles on first use."""
    cuda: bool = False
    """Whether the ranks compute on NVIDIA GPUs."""
    bf16: bool = False
    """Whether the run file asks for bf16."""
    packages: tuple[str, ...] = PACKAGES
    """Packages the ranks import."""
