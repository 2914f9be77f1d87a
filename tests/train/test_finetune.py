"""Real runs of the tiny model under DeepSpeed's own launcher, on the CPU with Gloo."""

from __future__ import annotations

import json

import pytest
from tests.train.runs import Finished, launch, make_run, zero

from llmtrain.train.assemble import assemble
from llmtrain.train.extract import extract

pytestmark = pytest.mark.timeout(900)  # a cold cache compiles DeepSpeed's operations first

STAGES = ("zero1", "zero2", "zero3", "zero3-offload")


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory, tiny_model, chat_file):
    """All runs on two ranks, by name; the last one fails on rank 0 alone."""
    root = tmp_path_factory.mktemp("two")

    def run(name, **options):
        return make_run(root / name, tiny_model, chat_file, **options)

    saved = root / "zero3" / "checkpoints" / "step-000002"
    refusing = root / "refusing.jinja"
    # Rank 0 alone meets the first example; rank 1 tokenizes the second half of the file.
    first = json.loads(chat_file.read_text().splitlines()[0])["messages"][0]["content"]
    refusing.write_text(
        "{% for m in messages %}{{ raise_exception('not like this') if m.content == '" + first + "' else m.content }}"
        "{% endfor %}"
    )
    files = [
        run("zero1", zero_part=zero(1), save_steps=4),
        run("zero2", zero_part=zero(2)),
        run("zero3-whole"),
        run("zero3", save_steps=2, eval_steps=3, data_part={"eval": 0.1}),
        run("zero3-offload", zero_part=zero(3, offload=True)),
        run("resumed", resume=str(saved), data_part={"eval": 0.1}),
        run("fallen-back", resume=str(saved.with_name("step-000004")), data_part={"eval": 0.1}),
        run("unsaved", zero_part=zero(2), save_steps=2),
        run("offload-saved", zero_part=zero(2), save_steps=2),
        run("bf16", zero_part=zero(3, offload=True), dtype="bf16", save_steps=4),
        run("padded", micro=32, max_steps=1),
        run("packed", micro=8, max_steps=1, data_part={"packing": True, "max_length": 256}),
        run("packed-eager", micro=8, max_steps=1, data_part={"packing": True, "max_length": 256}, attention="eager"),
        run("lora", lora={"rank": 4, "alpha": 8.0, "dropout": 0.0, "targets": []}, learning_rate=1e-2, save_steps=4),
        run("nonfinite", learning_rate=1e30, zero_part=zero(2)),
        run("refused", data_part={"chat_template": str(refusing)}),
    ]
    ended = launch(2, files)
    (root / "log").write_text(ended.stdout)
    runs = {file.parent.name: Finished(file.parent) for file in files}
    assert (runs["refused"].dir / "done" / "0.json").exists(), ended.stdout[-6000:]
    return runs, ended


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory, tiny_model, chat_file):
    """All runs on one rank, by name."""
    from llmtrain.train.tinymodel import write_tiny_model

    root = tmp_path_factory.mktemp("one")
    untied = root / "models" / "untied"
    write_tiny_model(untied, tied=False, template=False)
    texts = root / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"line number {at}"}) + "\n" for at in range(10)))
    spoilt = root / "models" / "spoilt"
    write_tiny_model(spoilt)
    spoil(spoilt)
    files = [
        make_run(root / "same", tiny_model, chat_file, world=1, accumulation=2, zero_part=zero(3, offload=True)),
        make_run(root / "nonfinite", spoilt, chat_file, world=1, zero_part=zero(2)),
        make_run(root / "stuck", tiny_model, chat_file, world=1, zero_part=zero(2), learning_rate=1e30, max_steps=20),
        make_run(
            *(root / "text", untied, texts),
            world=1,
            accumulation=2,
            zero_part=zero(1),
            dtype="bf16",
            data_part={"format": "text"},
            max_steps=None,
            epochs=2.0,
            loader_workers=1,
        ),
        make_run(root / "chat", untied, chat_file, world=1, zero_part=zero(2), max_steps=2),
    ]
    ended = launch(1, files)
    return {file.parent.name: Finished(file.parent) for file in files}, ended


def spoil(directory):
    """Put one NaN into a model."""
    from safetensors.torch import load_file, save_file

    weights = load_file(directory / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_learns(two_ranks, stage):
    """Under every ZeRO stage both ranks end well and the loss falls at each of the four steps."""
    run = two_ranks[0][stage]
    assert [run.done(rank)["ok"] for rank in (0, 1)] == [True, True]
    assert run.done()["step"] == 4
    losses = run.losses
    assert len(losses) == 4
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.5


def test_stages_agree(two_ranks, one_rank):
    """In fp32 the loss of each step is the same under every ZeRO stage, and with one rank that accumulates."""
    runs = two_ranks[0]
    expected = runs["zero1"].losses
    names = ("zero2", "zero3-whole", "zero3-offload", "offload-saved")
    others = [*(runs[name] for name in names), one_rank[0]["same"]]
    for run in others:
        assert run.losses == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("stage", STAGES)
def test_model_is_divided_while_loading(two_ranks, stage):
    """Under ZeRO-3 every parameter is divided over the ranks as soon as it is loaded; below it none is."""
    for rank in (0, 1):
        loaded = two_ranks[0][stage].read(f"loaded-{rank}.json")
        assert loaded["divided"] == (loaded["parameters"] if stage.startswith("zero3") else 0)
        assert loaded["whole_here"] == 0


@pytest.mark.parametrize("name", [*STAGES, "bf16"])
def test_output_is_what_was_trained(two_ranks, name):
    """The written model loads in transformers and equals DeepSpeed's own master weights, rounded once."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = two_ranks[0][name]
    model, loading = AutoModelForCausalLM.from_pretrained(run.dir / "output", dtype="auto", output_loading_info=True)
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    dtype = torch.bfloat16 if name == "bf16" else torch.float32
    assert model.dtype == dtype
    masters = torch.load(run.dir / "master.pt")
    written = dict(model.named_parameters())
    assert written.keys() == masters.keys()
    for key, master in masters.items():
        assert torch.equal(written[key], master.to(dtype).reshape(written[key].shape)), key
    assert AutoTokenizer.from_pretrained(run.dir / "output").chat_template
    assert model.generation_config.eos_token_id == 258
    assert model.config.use_cache is True


def export(run, folder, dtype):
    """The last checkpoint of a run on this machine as a model directory, by way of its ranks' parts."""
    (checkpoint,) = (run.dir / "checkpoints").glob("step-*")
    assert extract(checkpoint, folder / "parts", dtype=dtype, ranks=[0, 1]) > 0
    order = {"run": str(run.dir / "run.json"), "checkpoint": str(checkpoint), "parts": [str(folder / "parts")]}
    return assemble({**order, "dtype": dtype, "output": str(folder / "exported")})


@pytest.mark.parametrize(("name", "dtype"), [("zero1", "fp32"), ("bf16", "bf16")])
def test_a_checkpoint_is_exported_as_the_run_gathered_it(two_ranks, name, dtype, tmp_path):
    """Parts of two ranks make the model of the run's own end bit for bit, with its settings and tokenizer."""
    from safetensors.torch import load_file

    run = two_ranks[0][name]
    said = export(run, tmp_path, dtype)
    assert (said["loaded"], said["merged"]) == ("yes", False)
    mine, theirs = load_file(tmp_path / "exported/model.safetensors"), load_file(run.dir / "output/model.safetensors")
    assert {key: tensor.dtype for key, tensor in mine.items()} == {key: tensor.dtype for key, tensor in theirs.items()}
    assert all(bool((mine[key] == theirs[key]).all()) for key in theirs)
    for path in (run.dir / "output").glob("*.json"):
        assert json.loads((tmp_path / "exported" / path.name).read_text()) == json.loads(path.read_text()), path.name
    assert {path.name for path in (run.dir / "output").iterdir()} == set(said["files"])


def test_adapters_are_merged_when_they_are_exported(two_ranks, tmp_path):
    """A checkpoint of a LoRA run becomes the same whole model as its adapter and base do."""
    from safetensors.torch import load_file

    from llmtrain.train.merge import merge

    run = two_ranks[0]["lora"]
    assert export(run, tmp_path, "fp32")["merged"]
    merge(run.dir / "output", tmp_path / "merged")
    mine, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("exported", "merged"))
    assert mine.keys() == theirs.keys()
    assert all(bool((mine[key] == theirs[key]).all()) for key in theirs)


def test_resume_goes_on_as_if_nothing_had_happened(two_ranks):
    """A run resumed after step 2 has the losses, rates and norms of steps 3 and 4 of the uninterrupted run."""
    whole = [line for line in two_ranks[0]["zero3"].metrics if "loss" in line][2:]
    resumed = [line for line in two_ranks[0]["resumed"].metrics if "loss" in line]
    assert [line["step"] for line in resumed] == [3, 4]
    for key in ("loss", "learning_rate", "grad_norm", "epoch"):
        assert [line[key] for line in resumed] == pytest.approx([line[key] for line in whole], abs=1e-6), key


def test_damaged_checkpoint_is_passed_over(two_ranks):
    """Where the checkpoint asked for has a truncated shard, the run says so and goes on from the one before."""
    runs, ended = two_ranks
    assert "going on from step-000002 instead of step-000004: step-000004 on here: global_step4/" in ended.stdout
    assert runs["fallen-back"].losses == pytest.approx(runs["zero3"].losses[2:], abs=1e-6)


def test_full_disk_fails_the_save_and_not_the_run(two_ranks):
    """A disk that is full on one rank fails that save on all, keeps the earlier checkpoint, and the run ends well."""
    runs, ended = two_ranks
    assert "checkpoint not saved, the previous one stays: here: [Errno 28] No space left on device" in ended.stdout
    run = runs["unsaved"]
    assert [path.name for path in (run.dir / "checkpoints").iterdir()] == ["step-000002"]
    assert run.losses == pytest.approx(runs["zero2"].losses, abs=1e-6)
    assert (run.dir / "output" / "model.safetensors").is_file()


def test_checkpoints_are_whole(two_ranks):
    """A checkpoint has a part of every rank, what a host needs to resume on its own, and no unfinished neighbour."""
    for name, parts in (("zero3", 4), ("offload-saved", 3)):
        folder = two_ranks[0][name].dir / "checkpoints"
        assert sorted(path.name for path in folder.iterdir()) == ["step-000002", "step-000004"]
        saved = folder / "step-000004"
        assert (saved / "latest").read_text() == "global_step4"
        assert len(list((saved / "global_step4").iterdir())) == parts
        needed = {
            "trainer_state.json",
            "scheduler.pt",
            "rng_state_0.pth",
            "rng_state_1.pth",
            "checkpoint.json",
            "manifest.json",
        }
        assert needed <= {path.name for path in saved.iterdir()}


def test_evaluation(two_ranks):
    """The held-out loss is written at its step and once more at the end, and is part of the card."""
    run = two_ranks[0]["zero3"]
    evaluations = [line for line in run.metrics if "eval_loss" in line]
    assert [line["step"] for line in evaluations] == [3, 4]
    assert evaluations[1]["eval_loss"] < evaluations[0]["eval_loss"]
    card = (run.dir / "output" / "README.md").read_text()
    assert f"| held-out loss | {evaluations[1]['eval_loss']:.4f} |" in card
    assert "58 trained on, 6 held out" in card


def test_metrics_end_with_a_summary(two_ranks):
    """The last line of the metrics holds the last loss and the tokens of all ranks without padding."""
    run = two_ranks[0]["zero1"]
    summary = run.metrics[-1]
    assert summary["final_loss"] == run.losses[-1]
    assert summary["step"] == 4
    mean = sum(run.read(f"cache/here/train-{block}.json")["tokens"] for block in (0, 1)) / 64
    assert summary["tokens"] == pytest.approx(16 * mean, abs=16)


def test_failure_of_one_rank(two_ranks):
    """A rank that fails alone records its own error, the others end too, and the launcher reports failure."""
    runs, ended = two_ranks
    record = runs["refused"].done(0)
    assert (record["ok"], record["exit_code"], record["error"]["type"]) == (False, 1, "InputFileError")
    assert "not like this" in record["error"]["message"]
    assert record["error"]["where"].endswith("sums.jsonl")
    assert ended.returncode != 0
    assert not (runs["refused"].dir / "output").exists()


def test_loss_that_is_no_number(one_rank):
    """A NaN loss ends the run in that step, with a valid line of metrics and no model."""
    run = one_rank[0]["nonfinite"]
    assert run.done()["error"]["type"] == "NonFiniteLossError"
    assert "in step 1" in run.done()["error"]["message"]
    assert (run.metrics[-1]["loss"], run.metrics[-1]["nonfinite"]) == (None, True)
    assert not (run.dir / "output").exists()


def test_gradients_that_stay_infinite(one_rank):
    """A run in which DeepSpeed only skips steps (or, before 0.17, the loss is soon NaN) ends before its time."""
    run = one_rank[0]["stuck"]
    assert run.done()["error"]["type"] in {"NonFiniteGradientsError", "NonFiniteLossError"}
    assert run.done()["step"] < 20


def test_plain_text_for_two_epochs(one_rank):
    """Plain text trains for whole epochs whose last step is filled up, and an untied head is written too."""
    run = one_rank[0]["text"]
    steps = [line for line in run.metrics if "loss" in line]
    assert [line["epoch"] for line in steps] == pytest.approx([1 / 3, 2 / 3, 1, 4 / 3, 5 / 3, 2], abs=1e-6)
    from llmtrain.train.checkpoint import read_tensor_shapes

    assert "lm_head.weight" in read_tensor_shapes(run.dir / "output")


def test_default_template_travels_with_the_model(one_rank):
    """A model without a chat template is tuned with ChatML and can be asked afterwards."""
    from llmtrain.train.answer import answer

    runs, ended = one_rank
    assert "chat template: chatml (the model has none" in ended.stdout
    assert (runs["chat"].dir / "output" / "chat_template.jinja").is_file()
    assert isinstance(answer(runs["chat"].dir / "output", "1+1?", max_tokens=4), str)


def test_a_good_run_ends_well(one_rank):
    """After a good run communication is torn down and the process ends with 0."""
    runs, ended = one_rank
    assert ended.returncode == 0, ended.stdout[-3000:]
    assert runs["chat"].read("beat/0.json")["phase"] == "done"


@pytest.mark.parametrize("name", ["packed", "packed-eager"])
def test_packing_changes_no_loss(two_ranks, name):
    """One step over all examples has the same loss per token, and the same gradients, packed or padded, in fp32."""
    runs, ended = two_ranks
    (padded,), (packed,) = ([line for line in runs[which].metrics if "loss" in line] for which in ("padded", name))
    assert packed["loss"] == pytest.approx(padded["loss"], abs=1e-4)
    assert packed["grad_norm"] == pytest.approx(padded["grad_norm"], rel=1e-4)
    fillers = 2 * (16 - 10)  # ten rows of sixteen
    assert runs[name].metrics[-1]["tokens"] == runs["padded"].metrics[-1]["tokens"] + fillers
    assert "packing: an example changes another's logits by 0 (by " in ended.stdout


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks under the old name
def test_adapters_are_trained_and_merged(two_ranks, tiny_model, tmp_path):
    """Under ZeRO-3 only the adapters are trained and written, and the merged model says what model and adapter say."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from llmtrain.train.merge import main

    run = two_ranks[0]["lora"]
    assert run.losses == sorted(run.losses, reverse=True)
    adapter = run.dir / "output"
    assert (adapter / "adapter_model.safetensors").stat().st_size < (tiny_model / "model.safetensors").stat().st_size
    assert main([str(adapter), "--output", str(tmp_path / "merged")]) == 0
    applied = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), adapter)
    merged, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        expected, found = (one(ids).logits for one in (applied, merged))
        with applied.disable_adapter():
            plain = applied(ids).logits
    assert torch.allclose(found, expected, atol=1e-4)
    assert (plain - expected).abs().max() > 0.1
