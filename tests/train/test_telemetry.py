from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest

from llmtrain.train.place import Place
from llmtrain.train.records import Beat
from llmtrain.train.telemetry import MAX_SKIPPED, NonFiniteGradientsError, NonFiniteLossError, Telemetry


class Watched:
    """A telemetry of rank *rank* under a clock that we turn."""

    def __init__(self, tmp_path, monkeypatch, rank=0):
        self.now = 1000.0
        monkeypatch.setattr("llmtrain.train.telemetry.time.monotonic", lambda: self.now)
        self.path = tmp_path / "metrics.jsonl"
        place = Place(rank=rank, local_rank=rank, world_size=2)
        self.telemetry = Telemetry(metrics=self.path, place=place, beat=Beat(tmp_path, rank))
        self.state = SimpleNamespace(global_step=0, max_steps=9, epoch=0.0)
        self.telemetry.on_train_begin(None, self.state, None)

    def step(self, *, seconds=2.0, **logs):
        self.now += seconds
        self.state.global_step += 1
        self.telemetry.on_log(None, self.state, None, logs=logs)

    @property
    def lines(self):
        # parse_constant would be called for NaN and Infinity, which are not JSON.
        return [json.loads(line, parse_constant=pytest.fail) for line in self.path.read_text().splitlines()]


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """The telemetry of rank 0."""
    return Watched(tmp_path, monkeypatch)


def test_one_line_a_step(watched):
    """Each step gives one line with the keys that other tools read, and its speed over all ranks."""
    watched.step(loss=2.5, learning_rate=1e-4, grad_norm=0.5, num_tokens=100)
    watched.step(loss=2.0, learning_rate=9e-5, grad_norm=0.4, num_tokens=160)
    first, second = watched.lines
    assert set(first) == {
        *("schema", "step", "max_steps", "epoch", "loss", "learning_rate", "tokens_per_s", "grad_norm", "time"),
    }
    assert (first["step"], first["loss"], first["tokens_per_s"]) == (1, 2.5, 50.0)
    assert (second["step"], second["loss"], second["tokens_per_s"]) == (2, 2.0, 30.0)


def test_evaluation_does_not_slow_the_run(watched):
    """The time of an evaluation is not counted as training time."""
    watched.step(loss=2.5, num_tokens=100)
    watched.now += 500
    watched.telemetry.on_evaluate(None, watched.state, None, metrics={"eval_loss": 3.0})
    watched.step(loss=2.0, num_tokens=200)
    assert watched.lines[1]["eval_loss"] == 3.0
    assert watched.lines[2]["tokens_per_s"] == 50.0


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_loss_that_is_no_number(watched, loss):
    """A loss that is not finite is recorded as valid JSON and ends the run, naming the step."""
    watched.step(loss=2.5, num_tokens=1)
    with pytest.raises(NonFiniteLossError, match="in step 2"):
        watched.step(loss=loss, grad_norm=math.nan, num_tokens=2)
    assert watched.lines[1]["loss"] is None
    assert watched.lines[1]["nonfinite"] is True


def test_gradients_that_stay_infinite(watched):
    """DeepSpeed skips steps whose gradients are not finite; when it goes on skipping, the run ends."""
    for _ in range(MAX_SKIPPED - 1):
        watched.step(loss=5.0, grad_norm=math.inf, num_tokens=1)
    watched.step(loss=5.0, grad_norm=1.0, num_tokens=1)
    for _ in range(MAX_SKIPPED - 1):
        watched.step(loss=5.0, grad_norm=math.inf, num_tokens=1)
    with pytest.raises(NonFiniteGradientsError, match="nothing is learned"):
        watched.step(loss=5.0, grad_norm=math.nan, num_tokens=1)
    assert all("nonfinite" not in line for line in watched.lines)


def test_other_ranks_write_no_metrics(tmp_path, monkeypatch):
    """Only rank 0 writes metrics, but every rank refuses a loss that is not a number."""
    other = Watched(tmp_path, monkeypatch, rank=1)
    other.step(loss=2.5, num_tokens=1)
    assert not other.path.exists()
    with pytest.raises(NonFiniteLossError):
        other.step(loss=math.nan, num_tokens=1)


def test_last_line(watched):
    """The last line sums the run up."""
    watched.step(loss=2.5, num_tokens=100)
    watched.telemetry.write_final(1)
    last = watched.lines[-1]
    assert (last["step"], last["final_loss"], last["tokens"], last["seconds"]) == (1, 2.5, 100, 2.0)
