from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.train.runs import make_run

from llmtrain.errors import InputFileError
from llmtrain.train.runjson import read_run


@pytest.fixture
def run_file(tmp_path):
    """A good run file."""
    return make_run(tmp_path / "run", "/m", "/d.jsonl", world=2, accumulation=3)


def change(path, edit):
    """Edit a run file in place."""
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))
    return path


def test_every_value_arrives(run_file):
    """A run file is read into the values it holds; cores go by local rank."""
    run = read_run(change(run_file, lambda document: document.update(cores={"0": [0, 2], "1": [1]})))
    assert run.run_dir == run_file.parent
    assert (run.batch.global_size, run.batch.micro, run.batch.accumulation) == (12, 2, 3)
    assert run.cores == {0: (0, 2), 1: (1,)}
    assert run.output == run_file.parent / "output"
    assert run.deepspeed["zero_optimization"]["stage"] == 3
    assert run.training.save_steps is None


@pytest.mark.parametrize("schema", [2, "1", None])
def test_other_schema(run_file, schema):
    """Another schema is refused, because its keys may mean something else."""
    with pytest.raises(InputFileError, match="has schema"):
        read_run(change(run_file, lambda document: document.update(schema=schema)))


@pytest.mark.parametrize(
    ("part", "key", "named"),
    [(None, "output", "output"), ("batch", "global", "batch.global"), ("training", "resume", "training.resume")],
)
def test_missing_key(run_file, part, key, named):
    """A missing key is named with its part."""
    with pytest.raises(InputFileError, match=f"lacks {named}\n"):
        read_run(change(run_file, lambda document: (document[part] if part else document).pop(key)))


def test_absent_cores_mean_no_binding(run_file):
    """Cores may be absent."""
    assert read_run(change(run_file, lambda document: document.pop("cores"))).cores == {}


@pytest.mark.parametrize("text", ["", "{", "[]", "7"])
def test_broken_file(tmp_path, text):
    """A file that is not a run file is refused, not crashed on."""
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(InputFileError):
        read_run(path)


def test_no_file():
    """A missing file is refused with its path."""
    with pytest.raises(InputFileError) as caught:
        read_run(Path("/nowhere/run.json"))
    assert caught.value.where == "/nowhere/run.json"
