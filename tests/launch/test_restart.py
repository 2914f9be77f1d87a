"""Which failures a restart may cure, how long it waits, and on which hosts it goes on."""

from __future__ import annotations

import pytest

from llmtrain.errors import ExitCode
from llmtrain.launch.again import checkpoint_step
from llmtrain.launch.restart import choose_hosts, choose_pause, judge_again
from llmtrain.launch.verdict import Failure, Outcome
from llmtrain.spec.hostfile import Cluster, Host


def failed(cause, step):
    """An attempt that failed after a step."""
    failure = Failure(host="b", rank=1, cause=cause, message="x")
    return Outcome(ok=False, exit_code=ExitCode.BUG, run_dir="", reason="x", first_failure=failure, last_step=step)


@pytest.mark.parametrize(
    ("cause", "step", "ok"),
    [
        ("killed", 9, True),
        ("host-lost", 9, True),
        ("host-frozen", 9, True),
        ("xid", 9, True),
        ("stall", 9, True),
        ("launcher", 9, True),
        ("crash", 9, True),
        ("crash", 5, False),
        ("crash", 4, False),
        ("out-of-memory", 9, False),
        ("disk-full", 9, False),
        ("nonfinite", 9, False),
        ("world-size", 9, False),
    ],
)
def test_what_a_restart_may_cure(cause, step, ok):
    """Hardware and killed processes may go well the next time; a crash only after steps that went well."""
    assert judge_again(failed(cause, step), used=0, allowed=3, begun_at=4, fruitless=0).ok is ok


def test_restarts_end():
    """None is left after the allowed number, nor after two attempts in a row that did no step."""
    assert not judge_again(failed("killed", 9), used=3, allowed=3, begun_at=0, fruitless=0).ok
    assert judge_again(failed("killed", 4), used=1, allowed=3, begun_at=4, fruitless=0).ok
    assert not judge_again(failed("killed", 4), used=2, allowed=3, begun_at=4, fruitless=1).ok


def test_pauses_grow_up_to_five_minutes():
    """Each pause is twice the one before."""
    assert [choose_pause(used, 10) for used in (0, 1, 2, 9)] == [10, 20, 40, 300]


def test_a_spare_takes_the_place_and_the_slots_of_a_lost_host():
    """Ranks stay where they were; a host that is in the run already is no spare."""
    hosts = tuple(Host(name=name, slots=(0, 1)) for name in "abc")
    found, swapped = choose_hosts(Cluster(hosts=hosts, origin="hostfile"), ["b"], ["a", "d"])
    assert (found.names, swapped) == (("a", "d", "c"), {"b": "d"})
    assert found.hosts[1].slots == (0, 1)


def test_the_step_of_a_checkpoint_is_in_its_name():
    """No checkpoint counts as step 0."""
    assert [checkpoint_step(path) for path in ("/r/checkpoints/step-000012", None)] == [12, 0]
