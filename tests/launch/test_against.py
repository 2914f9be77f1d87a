from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from llmtrain.cli import app
from llmtrain.errors import InputFileError, UsageError
from llmtrain.launch.against import read_measured
from llmtrain.plan.setup import plan_setup

TIMES = [0.0, 9.0, 10.0, 11.0, 15.0, 16.0]
"""When six steps ended: the first took long, and an evaluation lies before the fifth."""


def write_run(folder, *, micro, times=TIMES):
    """A run folder as a launch leaves it, of four ranks."""
    batch = {"micro": micro, "accumulation": 1, "global": 4 * micro}
    (folder / "run.json").write_text(json.dumps({"batch": batch, "data": {"max_length": 128}}))
    rows = [{"step": step, "loss": 1.0, "time": at} for step, at in enumerate(times, start=1)]
    rows.insert(4, {"step": 4, "eval_loss": 1.0, "time": 14.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


@pytest.fixture
def setup():
    """Four ranks, one row of 128 tokens each."""
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    return plan_setup(config, ranks=4, slots=2, length=128)


def test_step_time_leaves_out_warm_up_and_evaluations(tmp_path, setup):
    """The first steps and the time of an evaluation are not in the measured step time."""
    found = read_measured(write_run(tmp_path, micro=1), setup)
    assert (found.steps, found.seconds) == (3, 1.0)


def test_another_run_is_not_compared(tmp_path, setup):
    """A run with another batch is refused, and the difference is named."""
    with pytest.raises(UsageError, match=r"batch\.micro 2 there, 1 here"):
        read_measured(write_run(tmp_path, micro=2), setup)


def test_too_few_steps_are_not_timed(tmp_path, setup):
    """A run that ended in its warm-up has no step time."""
    with pytest.raises(InputFileError, match="fewer than 3 steps"):
        read_measured(write_run(tmp_path, micro=1, times=TIMES[:2]), setup)


def test_plan_tells_both_in_json(tmp_path):
    """With --against, --json holds the measured seconds, the estimated ones and the error between them."""
    keys = {"model_type": "llama", "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2}
    model = {**keys, "num_attention_heads": 4, "intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(model))
    argv = ["plan", "--model", str(tmp_path / "config.json"), "--cluster", "2x2xA100-80G", "--json"]
    sets = ["batch.micro=1", "batch.accumulation=1", "data.max_length=128"]
    argv += [part for item in sets for part in ("--set", item)]
    result = CliRunner().invoke(app, [*argv, "--against", write_run(tmp_path, micro=1)], catch_exceptions=False)
    told = json.loads(result.stdout)["against"]
    assert told["error"] == pytest.approx(told["estimated_seconds"] / told["measured_seconds"] - 1)
