"""Which checkpoints stay on a host, and when one is due."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from llmtrain.train import stopping
from llmtrain.train.keeping import place_copies, prune
from llmtrain.train.stopping import StopOnRequest


def make(folder, *names, sealed=True):
    """Checkpoint folders."""
    for name in names:
        (folder / name).mkdir(parents=True)
        if sealed:
            (folder / name / "manifest.json").write_text("{}")


def test_old_checkpoints_and_old_copies_go(tmp_path):
    """The newest sealed ones stay, with their copies; half-written ones and copies of a newer one are not touched."""
    make(tmp_path, "step-000003", "step-000006", "step-000009")
    make(tmp_path / "copies" / "b", "step-000003", "step-000006", "step-000012")
    make(tmp_path, "step-000001", sealed=False)
    prune(tmp_path, 2)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("step-*")) == [
        "copies/b/step-000006",
        "copies/b/step-000012",
        "step-000001",
        "step-000006",
        "step-000009",
    ]


def test_what_is_held_stays(tmp_path):
    """What was copied last stays on both hosts until a newer one is copied, however few are kept."""
    make(tmp_path, "step-000003", "step-000006", "step-000009")
    make(tmp_path / "copies" / "b", "step-000003", "step-000006")
    (tmp_path / ".held.json").write_text('{"names": ["step-000003"]}')
    prune(tmp_path, 1)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("step-*")) == [
        "copies/b/step-000003",
        "step-000003",
        "step-000009",
    ]


def test_the_manifest_says_where_copies_lie():
    """Each host's files are copied to the next one, the last host's to the first."""
    hosts = place_copies([{"host": name, "first_rank": rank} for rank, name in enumerate("abc")], "step-000003")
    assert [entry["copy"]["host"] for entry in hosts] == ["b", "c", "a"]
    assert hosts[2]["copy"]["path"] == "copies/c/step-000003"
    assert hosts[1]["first_rank"] == 1


class Ranks:
    """A crew whose other ranks want nothing."""

    def __init__(self, first):
        self.place = SimpleNamespace(is_first=first)

    def highest(self, mine):
        return mine


@pytest.mark.parametrize(
    ("minutes", "later_s", "first", "step", "due"),
    [
        (30, 1801, True, 5, True),
        (30, 1799, True, 5, False),
        (0, 1e6, True, 5, False),
        (30, 1801, False, 5, False),
        (30, 1801, True, 9, False),
    ],
)
def test_a_save_is_due_by_rank_0s_clock(tmp_path, monkeypatch, minutes, later_s, first, step, due):
    """After `save_minutes` without one a checkpoint is due, by the clock of rank 0, but not after the last step."""
    monkeypatch.setattr(stopping.time, "monotonic", lambda: 100.0)
    control = SimpleNamespace(should_save=False, should_training_stop=False)
    state = SimpleNamespace(global_step=step, max_steps=9)
    callback = StopOnRequest(tmp_path, Ranks(first), minutes)
    callback.on_train_begin(None, state, control)
    monkeypatch.setattr(stopping.time, "monotonic", lambda: 100.0 + later_s)
    callback.on_step_end(None, state, control)
    assert (callback.due, control.should_save, control.should_training_stop) == (due, due, False)
    callback.note_save()
    assert not callback.on_step_end(None, state, control).should_training_stop
    assert not callback.due


def test_a_request_wins_over_the_clock(tmp_path):
    """A rank that is asked to save and stop does both."""
    (tmp_path / "stop.json").write_text("{}")
    control = SimpleNamespace(should_save=False, should_training_stop=False)
    callback = StopOnRequest(tmp_path, Ranks(first=True), 30)
    callback.on_step_end(None, SimpleNamespace(global_step=1, max_steps=9), control)
    assert (callback.asked, callback.due, control.should_save, control.should_training_stop) == (
        True,
        False,
        True,
        True,
    )
