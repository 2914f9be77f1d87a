"""Why a run stands still: read the ranks' Python stacks, see who waits in which collective, name who does not."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmtrain.errors import ExitCode
from llmtrain.launch.rundir import write_private
from llmtrain.launch.verdict import Failure

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmtrain.launch.prepare import LaunchPlan
    from llmtrain.launch.rundir import RunDir
    from llmtrain.launch.state import State

_FAULTHANDLER = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$')
_PY_SPY = re.compile(r"^ {4}(?P<name>.+) \((?P<file>.+):(?P<line>\d+)\)$")
_COLLECTIVE = re.compile(
    r"^(all_?reduce|_?all_?gather|reduce_?scatter|_?reduce_scatter|broadcast|barrier|monitored_barrier|all_to_all"
    r"|reduce|gather|scatter|send|recv|isend|irecv|wait|all_gather_object|broadcast_object_list)"
)
_PLACES = ("torch/distributed/", "deepspeed/comm/", "deepspeed/runtime/", "llmtrain/train/crew.py")
DEEP = 8
"""Innermost frames in which a collective is looked for; wrappers that log and time it lie around it."""


BEAT_S = 3.0
"""How much older the last heartbeat of one rank may be than that of another."""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One Python frame."""

    name: str
    """Function."""
    file: str
    """Its file."""
    line: int
    """The line it is in."""


def parse_stack(text: str) -> tuple[Frame, ...]:
    """The main thread's frames, innermost first, from what faulthandler or py-spy prints. Pure."""
    blocks: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if ("Thread" in line and not line.startswith(" ")) or line.startswith("Current thread"):
            blocks.append((line, []))
        elif blocks and (found := _FAULTHANDLER.match(line) or _PY_SPY.match(line)):
            blocks[-1][1].append(Frame(name=found["name"], file=found["file"], line=int(found["line"])))
    if not blocks:
        return ()
    # py-spy names it; faulthandler prints the oldest thread last.
    main = next((frames for head, frames in blocks if "MainThread" in head), blocks[-1][1])
    return tuple(main)


def find_collective(frames: tuple[Frame, ...]) -> str | None:
    """Name of the collective a rank waits in; None if it is not in one. Pure."""
    found = None
    for frame in frames[:DEEP]:
        if any(place in frame.file for place in _PLACES) and _COLLECTIVE.match(frame.name):
            found = frame.name  # the outermost of them is what the caller asked for
    return found


def judge_stall(plan: LaunchPlan, state: State, silent_s: float, step_s: float | None) -> tuple[Failure, ExitCode]:
    """The rank that is behind, and what the others wait in. Pure."""
    stacks = {rank: parse_stack(item.get("text") or "") for rank, item in state.stacks.items()}
    waits = {rank: find_collective(frames) for rank, frames in stacks.items()}
    behind = choose_behind(state, waits, step_s)
    usual = "" if step_s is None else f" (a step usually takes {step_s:.2g} s)"
    message = f"no progress for {silent_s:.0f} s after step {state.last_step}{usual}"
    advice = "see stacks/ in the run folder for what every rank was doing; stall: in the run file sets the patience"
    waiting = _render_waits(waits, behind)
    if behind is None:
        every = "no rank is behind the others; " if waiting else ""
        failure = Failure(
            host=None, rank=None, cause="stall", message=f"{message}; {every}{waiting}".rstrip("; "), advice=advice
        )
        return failure, ExitCode.STALLED
    host = next(item.name for item in plan.hosts if behind in item.ranks)
    doing = describe_rank(state.stacks.get(behind), stacks.get(behind, ()))
    tail = "\n".join(f"{frame.name} ({frame.file}:{frame.line})" for frame in stacks.get(behind, ())[:12]) or None
    others = f", while {waiting}" if waiting else ""
    failure = Failure(
        host=host,
        rank=behind,
        cause="stall",
        message=f"{message}: rank {behind} on {host} is behind, {doing}{others}",
        tail=tail,
        advice=advice,
    )
    return failure, ExitCode.STALLED


def choose_behind(state: State, waits: Mapping[int, str | None], step_s: float | None = None) -> int | None:
    """A rank at an earlier step; else the only one that is in no collective while others are. Pure."""
    stopped = [rank for rank, item in state.stacks.items() if item.get("state") in {"T", "t", "D"}]
    if len(stopped) == 1:
        return stopped[0]
    steps = {rank: beat["step"] for rank, beat in state.beats.items() if beat["phase"] == "train"}
    free = [rank for rank, collective in waits.items() if collective is None]
    if len(free) == 1 and len(waits) > 1:
        return free[0]
    # Beats are written once a second, so that a difference of less than some seconds of steps means nothing.
    slowest = min(steps, key=lambda rank: steps[rank], default=None)
    if slowest is not None and max(steps.values()) - steps[slowest] > max(1.0, BEAT_S / (step_s or BEAT_S)):
        return slowest
    return free[0] if free and len(free) < len(waits) else None


def describe_rank(item: Mapping[str, Any] | None, frames: tuple[Frame, ...]) -> str:
    """What a rank is doing, in a few words. Pure."""
    state = (item or {}).get("state")
    if state in {"T", "t"}:
        return "its process is stopped (SIGSTOP, or a debugger)"
    if state == "D":
        return "its process is blocked in the kernel (disk or driver)"
    if not frames:
        return "and does not say what it is doing"
    return f"in {frames[0].name} ({frames[0].file}:{frames[0].line})"


def _render_waits(waits: Mapping[int, str | None], behind: int | None) -> str:
    groups: dict[str, list[int]] = defaultdict(list)
    for rank, collective in sorted(waits.items()):
        if collective is not None and rank != behind:
            groups[collective].append(rank)
    parts = []
    for collective, ranks in groups.items():
        some = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
        parts.append(f"rank{'s' if len(ranks) > 1 else ''} {some} wait{'' if len(ranks) > 1 else 's'} in {collective}")
    return " and ".join(parts)


def write_stacks(run_dir: RunDir, stacks: Mapping[int, Mapping[str, Any]]) -> None:
    """Keep what every rank was doing, one file each."""
    folder = run_dir.path / "stacks"
    folder.mkdir(exist_ok=True)
    for rank, item in stacks.items():
        write_private(folder / f"{int(rank)}.txt", str(item.get("text") or "nothing\n"))
