"""Adapters on packed rows, from data that were tokenized on the head, on two hosts; one launch serves all tests."""

from __future__ import annotations

import json

import pytest
from tests.documented import stale_lines

SETS = ("--set", "env.OMP_NUM_THREADS=1", "--set", "data.max_length=256", "--set", "lora.rank=4")
SETS += ("--set", "data.packing=true", "--set", "training.max_steps=3", "--set", "training.loader_workers=0")
SETS += ("--set", "model.dtype=fp32", "--set", "batch.micro=1", "--set", "training.learning_rate=1e-2")
FILES = ("--model", "/root/model", "--data", "chat.jsonl")


@pytest.fixture(scope="module")
def recipe(script_lab):
    """`data`, `launch` and `merge`, one after the other."""
    folder = script_lab.folder("/root/recipe", {"chat.jsonl": script_lab.head / "root/data.jsonl"})
    counted = script_lab.llmtrain(folder, "data", *FILES, *SETS, "--json")
    assert counted.code == 0, counted.err
    argv = ["launch", "--hosts", "hostfile", "--config", "zero3", *FILES, *SETS, "--output", "adapter", "--json"]
    trained = script_lab.llmtrain(folder, *argv)
    assert trained.code == 0, trained.err + trained.log("node1", 0)
    merged = script_lab.llmtrain(folder, "merge", "adapter", "--output", "merged")
    assert merged.code == 0, merged.err
    assert stale_lines("merge", "llmtrain merge", merged.out + merged.err) == []
    return counted, trained


def test_launch_takes_what_data_tokenized(recipe, script_lab):
    """The set made on the head goes to the hosts in place of the data, and no rank tokenizes."""
    counted, trained = recipe
    place = counted.json["tokenized"]
    run = json.loads((trained.run / "run.json").read_text())
    assert run["data"]["tokenized"] == place
    for host in ("node1", "node2"):
        disk = script_lab.lab.state.disk(host)
        assert (disk / place.lstrip("/") / "set.json").exists()
        assert not (disk / "root/recipe/chat.jsonl").exists()
    log = trained.log("node1", 0)
    assert f"packing: {counted.json['trained_on']} examples in {counted.json['rows']} rows" in log
    assert "an example changes another's logits by 0 (by " in log


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks under the old name
def test_adapter_comes_home_and_merges(recipe):
    """The loss falls, and the merged model on the head says what base and adapter say together."""
    import torch
    from peft import LoraConfig, PeftModel
    from transformers import AutoModelForCausalLM

    folder = recipe[1].folder
    losses = [json.loads(line) for line in (recipe[1].run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in losses if "loss" in line]
    assert losses == sorted(losses, reverse=True)
    base = AutoModelForCausalLM.from_pretrained(folder.parent / "model")
    config = LoraConfig.from_pretrained(folder / "adapter")
    assert config.base_model_name_or_path == "/root/model"
    applied = PeftModel.from_pretrained(base, folder / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged")
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        expected, found = (one(ids).logits for one in (applied, merged))
        with applied.disable_adapter():
            plain = applied(ids).logits
    assert torch.allclose(found, expected, atol=1e-4)
    assert (plain - expected).abs().max() > 0.01
