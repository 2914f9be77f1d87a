from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from tests.train.runs import make_run, zero
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmtrain.errors import InputFileError, RankFailedError
from llmtrain.train.checkpoint import check_output, check_resume, read_tensor_shapes, write_model
from llmtrain.train.runjson import read_run


@pytest.fixture
def run(tmp_path, tiny_model):
    """A run on the tiny model."""
    return read_run(make_run(tmp_path / "run", tiny_model, "/d", world=2))


def load(path):
    """Model and tokenizer of a directory."""
    return AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)


def write(run, *, stop_tokens=(), change=lambda weights: None):
    """Write the run's model, its weights changed on the way."""
    model, tokenizer = load(run.model.path)
    weights = dict(model.state_dict())
    change(weights)
    write_model(model, weights, tokenizer, run, card="# card\n", stop_tokens=stop_tokens)


def test_model_is_put_in_place_whole(run, tiny_model):
    """The written directory has the base's tensors under its names, its configuration, and nothing beside it."""
    write(run)
    assert read_tensor_shapes(run.output) == read_tensor_shapes(tiny_model)
    assert (run.output / "README.md").read_text() == "# card\n"
    assert json.loads((run.output / "config.json").read_text())["use_cache"] is True
    assert sorted(path.name for path in run.output.parent.iterdir() if "output" in path.name) == ["output"]
    assert all(path.stat().st_mode & 0o077 == 0o044 for path in run.output.iterdir())


def test_training_settings_do_not_stay(run):
    """What training switched off in the configuration is on again in the written model."""
    model, tokenizer = load(run.model.path)
    model.config.use_cache = False
    write_model(model, dict(model.state_dict()), tokenizer, run, card="", stop_tokens=())
    assert json.loads((run.output / "config.json").read_text())["use_cache"] is True


def test_generation_stops_at_the_trained_token(run):
    """A token that ends trained answers is added to the tokens at which generation stops."""
    write(run, stop_tokens=(257, 258))
    assert json.loads((run.output / "generation_config.json").read_text())["eos_token_id"] == [257, 258]


def test_contradictory_generation_config(run, tiny_model, tmp_path):
    """A base whose generation config contradicts itself can still be tuned; its file is kept as it is."""
    import shutil

    base = tmp_path / "base"
    shutil.copytree(tiny_model, base)
    config = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "eos_token_id": 258}
    (base / "generation_config.json").write_text(json.dumps(config))
    model, tokenizer = load(tiny_model)
    moved = read_run(make_run(tmp_path / "other", base, "/d", world=2))
    write_model(model, dict(model.state_dict()), tokenizer, moved, card="", stop_tokens=(258,))
    assert json.loads((moved.output / "generation_config.json").read_text()) == config


def test_missing_tensors_are_noticed(run):
    """A model that lost tensors on the way is not put in place, and is kept for a look."""
    with pytest.raises(RankFailedError, match=r"missing, for example: \['layers.0.mlp.up_proj.weight'\]") as caught:
        write(run, change=lambda weights: weights.pop("model.layers.0.mlp.up_proj.weight"))
    assert not run.output.exists()
    assert caught.value.where == str(run.output.with_name(".output.partial"))


def test_base_with_older_names(tmp_path, tiny_model):
    """Tensor names that transformers changes on loading are no loss."""
    import shutil

    base = tmp_path / "base"
    shutil.copytree(tiny_model, base)
    old = {f"old.{name}": torch.zeros(shape) for name, shape in read_tensor_shapes(tiny_model).items()}
    save_file(old, base / "model.safetensors")
    run = read_run(make_run(tmp_path / "run", base, "/d", world=2))
    model, tokenizer = load(tiny_model)
    write_model(model, dict(model.state_dict()), tokenizer, run, card="", stop_tokens=())
    assert run.output.is_dir()


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_existing_output(tmp_path, kind):
    """An output that holds something is refused before the training."""
    output = tmp_path / "output"
    if kind == "file":
        output.write_text("")
    else:
        output.mkdir()
        (output / "model.safetensors").write_text("")
    with pytest.raises(InputFileError, match="never overwritten"):
        check_output(output)


def test_empty_output(tmp_path):
    """An empty folder, or none, is a place to write to."""
    check_output(tmp_path)
    check_output(tmp_path / "new")


def test_resume_needs_a_checkpoint(tmp_path):
    """A folder that is no checkpoint of ours is refused by name."""
    run = read_run(make_run(tmp_path / "run", "/m", "/d", resume=str(tmp_path)))
    with pytest.raises(InputFileError, match=r"not a checkpoint .*checkpoint\.json"):
        check_resume(run, tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [("world_size", 4, "has world_size 4, this run has 2"), ("seed", 1, "seed 1"), ("zero_stage", 2, "zero_stage 2")],
)
def test_resume_in_another_shape(tmp_path, key, value, said):
    """A checkpoint of another number of ranks, ZeRO stage, batch or seed is refused with both values."""
    note = {"world_size": 2, "zero_stage": 3, "batch_global": 4, "seed": 42, key: value}
    (tmp_path / "checkpoint.json").write_text(json.dumps(note))
    run = read_run(make_run(tmp_path / "run", "/m", "/d", zero_part=zero(3), resume=str(tmp_path)))
    with pytest.raises(InputFileError, match=said):
        check_resume(run, tmp_path)
