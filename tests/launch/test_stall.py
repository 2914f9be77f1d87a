"""A run that stands still: when it counts as such, and which rank is named."""

from __future__ import annotations

import pytest

from llmtrain.launch.stall import choose_behind, describe_rank, find_collective, parse_stack
from llmtrain.launch.state import Progress, State
from llmtrain.spec.runspec import StallPart

WAITING = """\
Thread 0x00007f2 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/env/torch/_inductor/pool.py", line 10 in run

Thread 0x00007f1 (most recent call first):
  File "/env/torch/distributed/distributed_c10d.py", line 2810 in all_reduce
  File "/env/torch/distributed/c10d_logger.py", line 81 in wrapper
  File "/run/code/llmtrain/train/crew.py", line 60 in is_any
  File "/run/code/llmtrain/train/rank.py", line 120 in <module>
"""
SLEEPING = """\
Current thread 0x00007f1 (most recent call first):
  File "/home/me/train.py", line 12 in load_batch
  File "/home/me/train.py", line 90 in <module>
"""
PY_SPY = """\
Process 77: python -u -m llmtrain.train.rank run.json
Python v3.11.2 (/usr/bin/python3.11)

Thread 77 (idle): "MainThread"
    barrier (torch/distributed/distributed_c10d.py:4159)
    wrapper (torch/distributed/c10d_logger.py:81)
    <module> (train.py:3)
Thread 78 (idle): "Thread-1"
    wait (threading.py:324)
"""


@pytest.mark.parametrize(
    ("text", "collective", "top"),
    [
        (WAITING, "all_reduce", "all_reduce"),
        (SLEEPING, None, "load_batch"),
        (PY_SPY, "barrier", "barrier"),
        ("", None, None),
    ],
)
def test_the_main_threads_stack_tells_the_collective(text, collective, top):
    """Faulthandler's and py-spy's text give the main thread's frames and the collective it waits in."""
    frames = parse_stack(text)
    assert find_collective(frames) == collective
    assert (frames[0].name if frames else None) == top


def beats(**steps):
    """Heartbeats by rank."""
    return {int(name[1:]): {"rank": int(name[1:]), "phase": "train", "step": step} for name, step in steps.items()}


def test_the_only_rank_outside_a_collective_is_behind():
    """At equal steps the rank that is in no collective is the one that the others wait for."""
    assert choose_behind(State(beats=beats(r0=6, r1=6, r2=6)), {0: "all_reduce", 1: None, 2: "all_reduce"}) == 1


def test_a_stopped_process_is_behind():
    """A rank whose process is stopped is named, whatever the others do."""
    state = State(beats=beats(r0=6, r1=6), stacks={0: {"state": "S"}, 1: {"state": "T"}})
    assert choose_behind(state, {0: "all_reduce", 1: None}) == 1
    assert "stopped" in describe_rank({"state": "T"}, ())


def test_nobody_is_named_where_all_wait_alike():
    """Ranks that all wait in collectives at one step leave open who is behind."""
    assert choose_behind(State(beats=beats(r0=6, r1=6)), {0: "all_reduce", 1: "all_reduce"}) is None


def test_patience_follows_the_median_step():
    """The limit is the setup's until steps are known, then factor times the median, at least the floor."""
    progress, stall = Progress(0.0), StallPart(factor=10, floor=5, setup=900)
    assert progress.limit_s(stall) == 900
    progress.note(1.0, {"phase": "train", "step": 0})
    for step in range(1, 6):
        progress.note_step(float(step), {"step": step, "time": step * 2.0})
    assert (progress.step_s, progress.limit_s(stall), progress.at) == (2.0, 20.0, 5.0)
    progress.note(6.0, {"phase": "train", "step": 5})
    assert progress.at == 5.0
    progress.note(7.0, {"phase": "save", "step": 5})
    assert (progress.at, progress.limit_s(stall)) == (7.0, 900)
