"""The small JSON files by which a rank tells the head how it is (standard library only)."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from llmtrain.process import write_json

if TYPE_CHECKING:
    from pathlib import Path

SCHEMA = 1


def append_json(path: Path, document: dict[str, Any]) -> None:
    """Append one line to a JSONL file in a single write; NaN, which is not JSON, is refused."""
    line = json.dumps(document, allow_nan=False) + "\n"
    with path.open("a", encoding="utf-8") as file:
        file.write(line)


class Beat:
    """One rank's heartbeat: phase and step, at most one write a second while stepping."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._path = run_dir / "beat" / f"{rank}.json"
        self._path.parent.mkdir(exist_ok=True)
        self._rank = rank
        self._written_at = float("-inf")
        self.phase = ""
        self.step = 0

    def enter(self, phase: str, step: int | None = None) -> None:
        """Say that a phase begins: load, data, train, eval, save, script or done."""
        self.step = self.step if step is None else step
        if phase != self.phase:
            self.phase = phase
            self._write()

    def advance(self, step: int) -> None:
        """Say that a step is done."""
        self.step = step
        if time.monotonic() - self._written_at >= 1.0:
            self._write()

    def _write(self) -> None:
        write_json(
            self._path,
            {"schema": SCHEMA, "rank": self._rank, "phase": self.phase, "step": self.step, "time": time.time()},
        )
        self._written_at = time.monotonic()
