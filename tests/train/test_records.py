from __future__ import annotations

import json

import pytest

from llmtrain.train.records import Beat, append_json


def read(tmp_path):
    """The beat of rank 1."""
    return json.loads((tmp_path / "beat" / "1.json").read_text())


def test_beat_on_every_phase(tmp_path):
    """A new phase is written at once, whatever the clock says."""
    beat = Beat(tmp_path, 1)
    for phase in ("load", "data", "train"):
        beat.enter(phase, 3)
        document = read(tmp_path)
        document.pop("time")
        assert document == {"schema": 1, "rank": 1, "phase": phase, "step": 3}


def test_beat_at_most_once_a_second(tmp_path, monkeypatch):
    """Within a second of the last write steps are only counted; after it the latest is written."""
    now = [100.0]
    monkeypatch.setattr("llmtrain.train.records.time.monotonic", lambda: now[0])
    beat = Beat(tmp_path, 1)
    beat.enter("train", 0)
    now[0] = 100.9
    beat.advance(5)
    assert read(tmp_path)["step"] == 0
    now[0] = 101.0
    beat.advance(6)
    assert read(tmp_path)["step"] == 6


def test_nan_never_becomes_json(tmp_path):
    """A line that other tools could not parse is refused."""
    with pytest.raises(ValueError, match="not JSON compliant"):
        append_json(tmp_path / "metrics.jsonl", {"loss": float("nan")})
    assert not (tmp_path / "metrics.jsonl").exists()
