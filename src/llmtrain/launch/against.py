"""What a run measured, for setting beside what was predicted of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from llmtrain.errors import InputFileError, UsageError
from llmtrain.launch.rundir import RunDir, state_dir

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmtrain.plan.setup import Setup

WARM_UP = 2
"""First optimizer steps that are left out: they compile, allocate and fill caches."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The speed a run reached."""

    name: str
    """Its id."""
    steps: int
    """Optimizer steps that were timed."""
    seconds: float
    """Median of an optimizer step."""


def read_measured(name: str, setup: Setup) -> Measured:
    """Read the step time of a run, given by its folder or its id.

    Args:
        name: the run.
        setup: what is predicted; the run must have had the same batch, ranks and row length.

    Raises:
        InputFileError: there is no such run, or it has too few steps to be timed.
        UsageError: it ran with another batch, or other rows or ranks.
    """
    path = Path(name) if Path(name).is_dir() else state_dir() / "runs" / name
    run_dir = RunDir(path.resolve())
    try:
        run = json.loads(run_dir.run_file.read_text(encoding="utf-8"))
        lines = run_dir.metrics.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        raise InputFileError("no such run, or no metrics in it", where=name, fix="name a run folder or an id") from None
    _refuse_others(name, run, setup)
    times = [_seconds(first, second) for first, second in _pairs([json.loads(line) for line in lines])]
    if not times:
        raise InputFileError(f"fewer than {WARM_UP + 1} steps one after another", where=name, fix="name a longer run")
    return Measured(name=path.name, steps=len(times), seconds=median(times))


def _refuse_others(name: str, run: Mapping[str, Any], setup: Setup) -> None:
    batch = run.get("batch") or {}
    had = (
        batch.get("micro"),
        batch.get("accumulation"),
        batch.get("global"),
        (run.get("data") or {}).get("max_length"),
    )
    wanted = (setup.micro, setup.accumulation, setup.micro * setup.accumulation * setup.ranks, setup.length)
    if had != wanted:
        keys = ("batch.micro", "batch.accumulation", "batch.global", "data.max_length")
        other = [f"{key} {a} there, {b} here" for key, a, b in zip(keys, had, wanted, strict=True) if a != b]
        raise UsageError(
            f"the run was not what is predicted: {', '.join(other)}",
            where=name,
            fix="give plan the run file, hosts and options that the run was launched with",
        )


def _pairs(rows: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Neighbouring steps with nothing (an evaluation) written between them, without the warm-up."""
    return [
        (first, second)
        for first, second in pairwise(rows)
        if "loss" in first and "loss" in second and second["step"] == first["step"] + 1 and first["step"] >= WARM_UP
    ]


def _seconds(first: Mapping[str, Any], second: Mapping[str, Any]) -> float:
    return float(second["time"]) - float(first["time"])
