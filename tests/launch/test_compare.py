from __future__ import annotations

import json

import pytest
from tests.documented import read_example
from typer.testing import CliRunner

from llmtrain.cli import app
from llmtrain.errors import InputFileError
from llmtrain.launch.compare import choose_steps, compare, read_record


def write_run(folder, name, *, rate, torch, losses):
    """A run folder as a launch leaves it."""
    path = folder / name
    path.mkdir()
    run = {"run_id": name, "run_dir": f"/x/{name}", "training": {"learning_rate": rate, "seed": 1}, "schema": 1}
    (path / "run.json").write_text(json.dumps(run))
    (path / "versions.json").write_text(json.dumps({"schema": 1, "hosts": {"a": {"torch": torch}}}))
    rows = [{"step": step, "loss": loss} for step, loss in enumerate(losses, start=1)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "outcome.json").write_text(json.dumps({"reason": "1 ranks done"}))
    return str(path)


@pytest.fixture
def runs(tmp_path):
    """Two runs that differ in the learning rate, a version and the curve."""
    first = write_run(tmp_path, "a-1", rate=1e-5, torch="2.6", losses=[3.0, 2.0])
    return first, write_run(tmp_path, "b-2", rate=1e-4, torch="2.7", losses=[3.0 - step / 10 for step in range(9)])


def test_what_differs_is_named(runs):
    """Settings and versions that differ are listed, names and places of the runs are not."""
    found = {item.key: (item.first, item.second) for item in compare(*map(read_record, runs))}
    assert found == {"training.learning_rate": (1e-5, 1e-4), "versions.hosts.a.torch": ("2.6", "2.7")}


def test_curves_are_compared_at_common_steps(runs):
    """Losses stand side by side at steps that both runs have, at most five."""
    first, second = map(read_record, runs)
    assert choose_steps(first, second) == (1, 2)
    assert choose_steps(second, second) == (1, 3, 5, 7, 9)


def test_diff_prints_one_line_each(runs):
    """The command shows each difference, the curve and both ends."""
    done = CliRunner().invoke(app, ["diff", *runs])
    wanted = [
        "a-1 -> b-2",
        "training.learning_rate: 1e-05 -> 0.0001",
        "versions.hosts.a.torch: 2.6 -> 2.7",
        "loss at step 1: 3.0000 -> 3.0000 (+0.0000)",
        "loss at step 2: 2.0000 -> 2.9000 (+0.9000)",
        "end: 1 ranks done -> 1 ranks done",
    ]
    assert done.output.splitlines() == wanted == read_example("diff", "llmtrain diff a-1 b-2")


def test_no_such_run(tmp_path, monkeypatch):
    """A name that is no run is an error."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(InputFileError, match="no such run"):
        read_record("absent")
