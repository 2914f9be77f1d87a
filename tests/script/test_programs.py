"""Programs of the user's own on two hosts; each launch serves several tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
HOSTILE = [
    "two words",
    "'single' \"double\"",
    "$HOME `touch /tmp/canary` $(touch /tmp/canary)",
    "a;touch /tmp/canary",
    "100%n %h %u %%",
    "first\nsecond\n",
    '{"a": [1, "b c"], "d": {}}',
    "",
    "*.py",
    "\\ back\\slash",
    "grüße 漢字",
    "--num_nodes",
    "--",
]
SETS = ("--set", "env.OMP_NUM_THREADS=1", "--hosts", "hostfile")


@pytest.fixture(scope="module", params=["pdsh", "ssh"])
def trainer(request, script_lab):
    """The example with Hugging Face's Trainer, with a hostile run name, on each launcher."""
    name = request.param
    folder = script_lab.folder(f"/root/hf {name} $(touch canary)", {"train.py": EXAMPLES / "hf-trainer/train.py"})
    words = ["--model", "{model}", "--data", "{data}", "--output_dir", "{output}", "--deepspeed", "{ds_config}"]
    words += ["--max_steps", "2", "--per_device_train_batch_size", "1", "--use_cpu", "true", "--report_to", "none"]
    words += ["--run_name", "\n".join(HOSTILE), "--save_strategy", "no", "--logging_steps", "1"]
    argv = ["launch", *SETS, "--launcher", name, "--config", "zero3-offload", "--model", "/root/model"]
    argv += ["--data", "/root/data.jsonl", "--output", "tuned", "--json", "--", "train.py", *words]
    done = script_lab.llmtrain(folder, *argv)
    assert done.code == 0, done.err + done.log("node1", 0)
    return name, done, words


def test_trainer_example_trains(trainer):
    """The 30-line script of a stock Trainer runs unchanged, and its model comes home."""
    _, done, _ = trainer
    assert len((EXAMPLES / "hf-trainer/train.py").read_text().splitlines()) <= 36
    assert "loss:" in done.log("node1", 0)
    assert (done.folder / "tuned" / "model.safetensors").stat().st_size > 10_000
    assert done.json["ok"]


def test_arguments_arrive_byte_for_byte(trainer):
    """Every rank sees the arguments as they were typed, but for the places in braces."""
    _, done, words = trainer
    run = json.loads((done.run / "run.json").read_text())["run_dir"]
    places = {"{model}": "/root/model", "{data}": "/root/data.jsonl", "{output}": f"{run}/output"}
    expected = [places.get(word, word) for word in words]
    expected[expected.index("{ds_config}")] = f"{run}/ds_config.json"
    for rank, host in enumerate(("node1", "node2")):
        line = next(line for line in done.log(host, rank).splitlines() if line.startswith("arguments: "))
        assert json.loads(line.removeprefix("arguments: ")) == expected


def test_launcher_says_itself(trainer):
    """The plan names the launcher, and DeepSpeed's own log comes to the head on both."""
    name, done, _ = trainer
    assert f"launcher = {name}: as asked" in done.err
    assert "dist_world_size=2" in (done.run / "logs/launcher.log").read_text()


def test_nothing_is_left_on_the_hosts(trainer, script_lab):
    """No process of the run and no run folder stays, and no shell has read the arguments."""
    _, done, _ = trainer
    for host in script_lab.lab.nodes:
        disk = script_lab.lab.state.disk(host)
        assert not (disk / "root/.llmtrain/runs" / done.run.name).exists()
        assert not (disk / "tmp/canary").exists()
        assert not [item for item in script_lab.lab.processes(host) if done.run.name in " ".join(item.argv)]


def test_accelerate_example_trains(script_lab):
    """A loop under Accelerate's DeepSpeed plugin counts both ranks, trains under ZeRO-3, and its model comes home."""
    folder = script_lab.folder("/root/accelerate", {"train.py": EXAMPLES / "accelerate/train.py"})
    argv = ["launch", *SETS, "--config", "zero3", "--model", "/root/model", "--data", "/root/data.jsonl"]
    argv += ["--set", "batch.micro=2", "--set", "model.dtype=fp32", "--output", "tuned", "--json"]
    words = ["train.py", "{model}", "{data}", "{output}", "{ds_config_resolved}"]
    done = script_lab.llmtrain(folder, *argv, "--", *words)
    assert done.code == 0, done.err + done.log("node1", 0)
    for rank, host in enumerate(("node1", "node2")):
        assert f"rank {rank} of 2, DistributedType.DEEPSPEED" in done.log(host, rank)
    assert "step 3 loss" in done.log("node1", 0)
    assert (done.folder / "tuned" / "model.safetensors").stat().st_size > 1_000_000
