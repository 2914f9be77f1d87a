"""Named parts of an estimate: what a number is made of, and when it is there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

Phase = Literal["load", "forward", "loss", "backward", "first step", "step", "save"]
Place = Literal["gpu", "ram", "nvme"]
PHASES: tuple[Phase, ...] = ("load", "forward", "loss", "backward", "first step", "step", "save")
ALWAYS = PHASES
TRAINING: tuple[Phase, ...] = ("forward", "loss", "backward", "first step", "step", "save")
AFTER_STEP: tuple[Phase, ...] = ("forward", "loss", "backward", "step", "save")
"""Adam's moments are made by the first step and stay: what comes after counts, and a first pass is smaller."""


@dataclass(frozen=True, kw_only=True)
class Term:
    """One part of the memory of a rank or host."""

    name: str
    """What it is, in a word or two."""
    place: Place
    """Where it lies: ``gpu`` per rank, ``ram`` and ``nvme`` per host."""
    size_bytes: int
    """How much."""
    formula: str
    """How the number came about, in symbols."""
    source: str
    """Where the formula is from."""
    phases: tuple[Phase, ...] = TRAINING
    """When it is there."""
    pinned: bool = False
    """Page-locked."""


def sum_at(terms: Iterable[Term], place: Place, phase: Phase) -> int:
    """Bytes in a place at a phase."""
    return sum(term.size_bytes for term in terms if term.place == place and phase in term.phases)


def peak_of(terms: Iterable[Term], place: Place) -> tuple[int, Phase]:
    """Most bytes in a place, and the phase they are there at."""
    kept = tuple(terms)
    phase = max(PHASES, key=lambda item: sum_at(kept, place, item))
    return sum_at(kept, place, phase), phase
