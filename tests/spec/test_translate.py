from __future__ import annotations

import pytest
from typer.testing import CliRunner

from llmtrain.cli import app
from llmtrain.errors import InputFileError
from llmtrain.spec.runfile import read_run
from llmtrain.spec.translate import read_foreign, render_run_file

FACTORY = """
model_name_or_path: /m
stage: sft
finetuning_type: full
deepspeed: ds.json
dataset: identity,alpaca_en
dataset_dir: d
cutoff_len: 512
val_size: 0.1
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
learning_rate: 1.0e-5
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
output_dir: saves
"""
AXOLOTL = """
base_model: /m
datasets:
  - {path: chat.jsonl, type: chat_template}
sequence_len: 1024
micro_batch_size: 1
gradient_accumulation_steps: 2
num_epochs: 2
lr_scheduler: cosine
learning_rate: 2e-5
sample_packing: true
bf16: auto
"""


def test_the_commented_file_is_valid(tmp_path):
    """What init writes is accepted as it is."""
    path = tmp_path / "llmtrain.yaml"
    path.write_text(render_run_file(None))
    spec = read_run(str(path))
    assert (spec.config, spec.batch.global_, spec.training.learning_rate) == ("zero3-offload", 32, 1e-5)
    assert all("#" in line for line in path.read_text().splitlines() if not line.endswith(":"))


def test_llama_factory_is_translated(tmp_path):
    """What has a counterpart is taken over, and the rest is named in the file."""
    (tmp_path / "lf.yaml").write_text(FACTORY)
    found = read_foreign(str(tmp_path / "lf.yaml"))
    assert set(found.left) == {"warmup_ratio"}
    path = tmp_path / "llmtrain.yaml"
    path.write_text(render_run_file(found))
    spec = read_run(str(path))
    assert [item.path for item in spec.data.mix] == [
        str(tmp_path / f"d/dataset_info.json#{name}") for name in ("identity", "alpaca_en")
    ]
    assert (spec.model.dtype, spec.batch.micro, spec.batch.accumulation, spec.training.epochs) == ("bf16", 2, 4, 3.0)
    assert (spec.data.max_length, spec.data.eval, spec.config) == (512, 0.1, str(tmp_path / "ds.json"))
    assert "#   warmup_ratio: 0.1" in path.read_text()  # fmt: skip


def test_axolotl_is_translated(tmp_path):
    """An axolotl file with a local data file becomes a valid run file."""
    (tmp_path / "ax.yaml").write_text(AXOLOTL)
    (tmp_path / "chat.jsonl").write_text("")
    found = read_foreign(str(tmp_path / "ax.yaml"))
    assert found.left == {}
    (tmp_path / "llmtrain.yaml").write_text(render_run_file(found))
    spec = read_run(str(tmp_path / "llmtrain.yaml"))
    assert (spec.data.path, spec.data.max_length) == (str(tmp_path / "chat.jsonl"), 1024)
    assert (spec.training.epochs, spec.training.learning_rate) == (2, 2e-5)
    assert spec.data.packing
    assert spec.lora.rank is None


@pytest.mark.parametrize(
    ("text", "lora", "left"),
    [
        ("model_name_or_path: /m", (8, None, 0.0, ()), set()),
        ("model_name_or_path: /m\nfinetuning_type: full\nlora_rank: 4", (None, None, 0.0, ()), {"lora_rank"}),
        ("model_name_or_path: /m\nlora_rank: 16\nlora_alpha: 8\nlora_target: all", (16, 8, 0.0, ()), set()),
        ("model_name_or_path: /m\nlora_target: q_proj, v_proj", (8, None, 0.0, ("q_proj", "v_proj")), set()),
        ("model_name_or_path: /m\nfinetuning_type: freeze", (None, None, 0.0, ()), {"finetuning_type"}),
        ("base_model: /m\nadapter: lora\nlora_r: 4\nlora_dropout: 0.1", (4, None, 0.1, ()), set()),
        (
            "base_model: /m\nadapter: qlora\nlora_r: 4\nload_in_4bit: true",
            (4, None, 0.0, ()),
            {"adapter", "load_in_4bit"},
        ),
        ("base_model: /m\nlora_target_modules: [up_proj]", (None, None, 0.0, ()), {"lora_target_modules"}),
    ],
)
def test_adapters_are_adapters_here_too(tmp_path, text, lora, left):
    """A file that trains adapters, as LLaMA-Factory's do unless they say otherwise, never becomes a full fine-tune."""
    (tmp_path / "x.yaml").write_text(text)
    found = read_foreign(str(tmp_path / "x.yaml"))
    assert set(found.left) == left
    (tmp_path / "llmtrain.yaml").write_text(render_run_file(found))
    spec = read_run(str(tmp_path / "llmtrain.yaml")).lora
    assert (spec.rank, spec.alpha, spec.dropout, spec.targets) == lora


def test_another_file_is_refused(tmp_path):
    """A file of no known tool is an error."""
    (tmp_path / "x.yaml").write_text("a: 1\n")
    with pytest.raises(InputFileError, match="neither"):
        read_foreign(str(tmp_path / "x.yaml"))


def test_init_never_overwrites(tmp_path, monkeypatch):
    """The command writes a file once; a second time it leaves it alone."""
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["init"]).exit_code == 0
    before = (tmp_path / "llmtrain.yaml").read_text()
    assert CliRunner().invoke(app, ["init"]).exit_code != 0
    assert (tmp_path / "llmtrain.yaml").read_text() == before
