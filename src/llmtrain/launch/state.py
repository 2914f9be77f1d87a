"""What is known about a run while it is watched, and the picture of it that others may read."""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmtrain.errors import ExitCode
    from llmtrain.launch import verdict
    from llmtrain.launch.prepare import LaunchPlan
    from llmtrain.spec.runspec import StallPart

ENOUGH = 3
"""Steps after which their median says something."""
STEPPING = "train"


class Progress:
    """When the run last got on, and how long a step usually takes."""

    def __init__(self, now: float) -> None:
        self.at = now
        self.phase = ""
        self.step = 0
        self._row: tuple[int, float] | None = None
        self._seconds: deque[float] = deque(maxlen=64)

    def note(self, now: float, record: Mapping[str, Any]) -> None:
        """Take a heartbeat. While it trains only a step counts; otherwise any sign does."""
        phase, step = record["phase"], record["step"]
        if phase == STEPPING and self.phase == STEPPING and step <= self.step:
            return
        self.at, self.phase, self.step = now, phase, max(step, self.step)

    def note_step(self, now: float, row: Mapping[str, Any]) -> None:
        """Take a line of the metrics: there is one for every step, with the time on the rank's own clock."""
        step, at, before = row["step"], row.get("time") or now, self._row
        if before is not None and step == before[0] + 1 and self.phase == STEPPING:
            self._seconds.append(at - before[1])
        self._row = (step, at)
        self.at, self.step = now, max(step, self.step)

    @property
    def step_s(self) -> float | None:
        """Median seconds of a step."""
        return statistics.median(self._seconds) if len(self._seconds) >= ENOUGH else None

    def limit_s(self, stall: StallPart) -> float:
        """So long nothing may happen."""
        if self.phase != STEPPING or self.step_s is None:
            return stall.setup
        return max(stall.floor, stall.factor * self.step_s)


@dataclass
class State:
    """What is known about the run."""

    started: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Rank -> its start record."""
    beats: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Rank -> last heartbeat."""
    done: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Rank -> done record."""
    failed: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """(host, done record) of failures in order of arrival."""
    stopped: dict[str, list[int]] = field(default_factory=dict)
    """Host -> pids left, once its guardian has ended everything."""
    lost: list[str] = field(default_factory=list)
    """Hosts whose guardian is out of reach."""
    last_step: int = 0
    final_loss: float | None = None
    metric: dict[str, Any] = field(default_factory=dict)
    """The last line of the metrics that holds a loss."""
    usage: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Host -> memory of the host and its ranks, in bytes."""
    kernel: dict[str, list[str]] = field(default_factory=dict)
    """Host -> what its kernel has said about its accelerators."""
    stacks: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Rank -> what it was doing when the run stood still."""
    noted: list[tuple[verdict.Failure, ExitCode]] = field(default_factory=list)
    """Failures that no rank reported, in order."""

    def is_success(self, world_size: int) -> bool:
        """Whether there is a good done record from every rank."""
        return len(self.done) == world_size and all(record["ok"] for record in self.done.values())

    @property
    def saved(self) -> str | None:
        """The checkpoint after which the ranks ended because they were asked to."""
        return next((record["saved"] for record in self.done.values() if record.get("saved")), None)


def render_state(
    plan: LaunchPlan, state: State, progress: Progress, heard: Mapping[str, float], phase: str | None = None
) -> dict[str, Any]:
    """The picture of a run: one entry for every host and rank.

    Args:
        plan: the run.
        state: what is known about it.
        progress: how it gets on.
        heard: host -> when it was last heard (monotonic).
        phase: what is done besides; the ranks' own phase if None.
    """
    now = time.monotonic()
    steps, step_s = state.metric.get("max_steps"), progress.step_s
    left = None if not steps or step_s is None else round(max(0, steps - state.last_step) * step_s, 1)
    return {
        "time": round(time.time(), 3),
        "phase": phase or progress.phase or "start",
        "step": state.last_step,
        "max_steps": steps,
        "loss": state.final_loss,
        "tokens_per_s": state.metric.get("tokens_per_s"),
        "step_s": None if step_s is None else round(step_s, 4),
        "left_s": left,
        "hosts": [
            {
                "name": host.name,
                "alive": host.name not in state.lost,
                "silent_s": round(now - heard[host.name], 1) if host.name in heard else None,
                "memory": {key: state.usage.get(host.name, {}).get(key) for key in ("total", "available")},
                "ranks": [_render_rank(rank, state, state.usage.get(host.name, {})) for rank in host.ranks],
            }
            for host in plan.hosts
        ],
    }


def _render_rank(rank: int, state: State, usage: Mapping[str, Any]) -> dict[str, Any]:
    beat, started = state.beats.get(rank, {}), state.started.get(rank, {})
    return {
        "rank": rank,
        "pid": started.get("pid"),
        "phase": beat.get("phase") or ("start" if started else "waiting"),
        "step": beat.get("step", 0),
        "beat": beat.get("time"),
        "rss": (usage.get("ranks") or {}).get(str(rank)),
        "ok": (state.done.get(rank) or {}).get("ok"),
    }
