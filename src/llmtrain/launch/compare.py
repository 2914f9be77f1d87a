"""Two runs side by side: what was asked, what it ran on, how it learned."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.errors import InputFileError
from llmtrain.launch.rundir import RunDir, state_dir

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

OWN = {"run_id", "run_dir", "output", "checkpoints", "schema"}
"""Keys that differ between any two runs."""
POINTS = 5
"""Steps of the learning curve that are shown."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What a run left on the head."""

    name: str
    """Its id."""
    settings: Mapping[str, Any]
    """Dotted key -> value, of run.json and versions.json."""
    losses: Mapping[int, float]
    """Optimizer step -> loss."""
    outcome: Mapping[str, Any]
    """How it ended; empty while it runs."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One key in which two runs differ."""

    key: str
    """Dotted name."""
    first: Any
    """In the first run; None where it is missing."""
    second: Any
    """In the second run."""


def read_record(name: str) -> RunRecord:
    """Read a run by its folder or its id.

    Raises:
        InputFileError: there is none.
    """
    path = Path(name) if Path(name).is_dir() else state_dir() / "runs" / name
    run_dir = RunDir(path.resolve())
    if not run_dir.run_file.is_file():
        raise InputFileError("no such run", where=name, fix="name a run folder, or an id: ls runs")
    settings = dict(_flatten(_read(run_dir.run_file), ""))
    settings.update((f"versions.{key}", value) for key, value in _flatten(_read(run_dir.versions), ""))
    lines = run_dir.metrics.read_text(encoding="utf-8").splitlines() if run_dir.metrics.is_file() else []
    rows = [json.loads(line) for line in lines]
    return RunRecord(
        name=path.name,
        settings={key: value for key, value in settings.items() if key.partition(".")[0] not in OWN},
        losses={row["step"]: row["loss"] for row in rows if "loss" in row},
        outcome=_read(run_dir.outcome),
    )


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputFileError(f"not JSON: {error}", where=str(path)) from None
    return found if isinstance(found, dict) else {}


def _flatten(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def compare(first: RunRecord, second: RunRecord) -> tuple[Difference, ...]:
    """Every key in which they differ, in the order of the first. Pure."""
    keys = [*first.settings, *(key for key in second.settings if key not in first.settings)]
    pairs = ((key, first.settings.get(key), second.settings.get(key)) for key in keys)
    return tuple(Difference(key=key, first=a, second=b) for key, a, b in pairs if a != b and not key.endswith("schema"))


def choose_steps(first: RunRecord, second: RunRecord) -> tuple[int, ...]:
    """Some steps that both have, from the first to the last. Pure."""
    both = sorted(first.losses.keys() & second.losses.keys())
    if len(both) <= POINTS:
        return tuple(both)
    return tuple(both[round(at * (len(both) - 1) / (POINTS - 1))] for at in range(POINTS))
