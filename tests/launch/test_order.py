"""What a run was asked for can be read back from its folder, and holds no values of variables."""

from __future__ import annotations

import json

import pytest
from tests.launch.jobs import write_job

from llmtrain.errors import UsageError
from llmtrain.launch.again import read_order
from llmtrain.launch.order import render_order
from llmtrain.launch.rundir import RunDir, write_record


@pytest.fixture
def job(tmp_path):
    """A job with a secret in a variable and settings of every kind."""
    sets = (
        "training.max_steps=7",
        "sync.paths=[]",
        "setup=[module load x]",
        "batch.global=3",
        "per_host.gpu004.python=/x",
    )
    return write_job(tmp_path, sets=sets, envs=("TOKEN=planted-secret",))[0]


def test_an_order_is_read_back_as_it_was(job, tmp_path):
    """All settings and options are the same; the variable's value is given anew."""
    write_record(RunDir(tmp_path).order, render_order(job))
    order = read_order(RunDir(tmp_path), envs={"TOKEN": "planted-secret"}, sets=["training.seed=5"])
    assert order.selection == job.selection
    assert order.spec.training.seed == 5
    training = job.spec.training
    assert order.spec.model_copy(update={"training": training}) == job.spec


def test_values_of_variables_are_not_kept(job, tmp_path, monkeypatch):
    """The record holds the variable's name alone; without a value the error names the option."""
    monkeypatch.delenv("TOKEN", raising=False)
    assert "planted-secret" not in json.dumps(render_order(job))
    write_record(RunDir(tmp_path).order, render_order(job))
    with pytest.raises(UsageError, match="TOKEN") as caught:
        read_order(RunDir(tmp_path), envs={})
    assert "--env TOKEN=VALUE" in str(caught.value)


def test_variables_of_the_run_file_are_read_again(job, tmp_path, monkeypatch):
    """A variable that stands in the run file needs no option."""
    monkeypatch.delenv("TOKEN", raising=False)
    (tmp_path / "mine.yaml").write_text("env: {TOKEN: other}\n")
    document = render_order(job)
    document["selection"]["run_file"] = str(tmp_path / "mine.yaml")
    write_record(RunDir(tmp_path).order, document)
    assert read_order(RunDir(tmp_path), envs={}).spec.env == {"TOKEN": "other"}
