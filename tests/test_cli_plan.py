from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from llmtrain.cli import app
from llmtrain.errors import UsageError

CONFIG = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "intermediate_size": 22016,
}


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A model that exists as a config.json only."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return "config.json"


def call(*argv):
    """Run a command; its exit code must be 0."""
    result = CliRunner().invoke(app, list(argv), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_plan_prints_one_json_document(config):
    """--json prints the promised keys for hosts one does not have."""
    document = json.loads(
        call("plan", "--model", config, "--cluster", "6x8xA100-80G", "--config", "zero3-offload", "--json")
    )
    assert document["verdict"] == "fits"
    assert document["gpu"]["peak_allocated_bytes"] < document["gpu"]["peak_reserved_bytes"]
    assert 250e9 < document["host"]["ram_bytes"] < 450e9


def test_cost_of_a_whole_run(config):
    """With a number of steps the whole run has hours and GPU-hours."""
    argv = ["plan", "--model", config, "--cluster", "6x8xA100-80G", "--config", "zero3-offload", "--json"]
    document = json.loads(call(*argv, "--set", "training.max_steps=1000"))
    assert document["run"]["hours"] == pytest.approx(1000 * document["step"]["seconds"] / 3600)
    assert document["run"]["gpu_hours"] == pytest.approx(48 * document["run"]["hours"])


def test_plan_offers_changes(config):
    """A run that does not fit comes with changes that would."""
    document = json.loads(call("plan", "--model", config, "--cluster", "1x8xA100-80G", "--config", "zero3", "--json"))
    assert document["verdict"] == "no"
    assert document["changes"]


def test_assumptions_count(config):
    """--assume overrides the catalogue."""
    argv = ["plan", "--model", config, "--cluster", "2x8xA100-80G", "--config", "zero3-offload", "--json"]
    document = json.loads(call(*argv, "--assume", "host.ram=100GB"))
    assert document["verdict"] == "no"
    assert document["host"]["capacity_bytes"] == 100 * 10**9


def test_compare_ranks(config):
    """--compare prints configurations, the best first."""
    document = json.loads(
        call("plan", "--model", config, "--cluster", "6x8xA100-80G", "--set", "batch.global=96", "--compare", "--json")
    )
    assert document["rows"][0]["verdict"] == "fits"
    assert document["reason"]


def test_map_writes_a_page(config, tmp_path):
    """Map --html writes one page and --param says where a slice is."""
    page = tmp_path / "map.html"
    told = call("map", "--model", config, "--cluster", "2x4xA100-80G", "--config", "zero3", "--html", str(page))
    assert "No layer lives on a GPU" in " ".join(told.split())
    assert page.read_text().startswith("<!doctype html>")
    told = call(
        "map",
        "--model",
        config,
        "--cluster",
        "2x4xA100-80G",
        "--config",
        "zero3",
        "--param",
        "layers.3.mlp.up_proj",
        "--rank",
        "5",
    )
    assert "rank 5 on host1: numbers 112,721,920 to 135,266,304" in " ".join(told.split())


def test_hosts_are_needed(config):
    """Without hosts or a cluster the way out is told."""
    with pytest.raises(UsageError, match="neither --hosts nor --cluster"):
        call("plan", "--model", config)


def test_torch_is_not_needed(config):
    """Help, plan and map run without importing torch."""
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom llmtrain.cli import app\n"
        "ask = ['plan', '--model', 'config.json', '--cluster', '6x8xA100-80G', '--compare']\n"
        "for argv in (['plan', '--help'], ask):\n"
        "    assert CliRunner().invoke(app, argv, catch_exceptions=False).exit_code == 0\n"
        "assert not {'torch', 'transformers', 'deepspeed'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (("--assume", "lora.rank=abc"), "lora.rank=abc is not a number"),
        (("--assume", "host.ram=much"), "'much' is not a size"),
        (("--html", "/nonexistent/page.html"), "the page cannot be written"),
    ],
)
def test_bad_options_are_told(config, argv, told):
    """What cannot be read or written is named, without a traceback."""
    with pytest.raises(UsageError, match=told):
        call("plan", "--model", config, "--cluster", "6x8xA100-80G", "--config", "zero3-offload", *argv)
