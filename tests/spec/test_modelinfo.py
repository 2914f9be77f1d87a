from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

from llmtrain.errors import ExitCode, InputFileError
from llmtrain.spec.modelinfo import CAUSAL_LM, read_model
from llmtrain.spec.weights import read_header

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 32,
    "max_position_embeddings": 64,
}
TENSORS = {"model.embed_tokens.weight": (32, 8), "model.norm.weight": (8,)}
SIZES = {"BF16": 2, "F16": 2, "F32": 4, "I64": 8, "F8_E4M3": 1, "U8": 1}


def _weights(tensors, dtype="BF16"):
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in tensors.items():
        size = int(np.prod(shape)) * SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


@pytest.fixture
def model(tmp_path):
    """A small, complete model directory."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(_weights(TENSORS))
    return folder


def _shards(folder, shards, weight_map=None):
    (folder / "model.safetensors").unlink()
    for name, tensors in shards.items():
        (folder / name).write_bytes(_weights(tensors))
    weight_map = weight_map or {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _change_config(folder, **changes):
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))


def _fault(path):
    with pytest.raises(InputFileError) as caught:
        read_model(path)
    assert caught.value.exit_code == ExitCode.INPUT
    assert caught.value.where
    assert caught.value.fix
    return caught.value


# What is read


def test_reads_shape_and_weights(model):
    """The shape comes from config.json, the parameters from the headers of the weights."""
    info = read_model(model)
    assert info.path == model
    assert info.architecture == "LlamaForCausalLM"
    assert (info.hidden_size, info.layers, info.vocab_size) == (8, 2, 32)
    assert (info.heads, info.kv_heads, info.intermediate_size, info.max_position) == (4, 2, 16, 64)
    assert info.parameters == 32 * 8 + 8
    assert info.dtype == "bf16"
    assert info.tied_embeddings is True
    assert info.has_chat_template is False
    size = (model / "model.safetensors").stat().st_size
    assert [(file.name, file.size_bytes) for file in info.weights] == [("model.safetensors", size)]
    assert info.weight_bytes == size


def test_a_relative_path_becomes_absolute_and_links_stay(model, tmp_path, monkeypatch):
    """The path is absolute but not resolved: a link is a name that hosts may share."""
    (tmp_path / "link").symlink_to(model)
    monkeypatch.chdir(tmp_path)
    assert read_model("link").path == tmp_path / "link"


def test_reads_shards_through_the_index(model):
    """With an index, the shards it names are the weights; other files do not count."""
    _shards(model, {"a.safetensors": {"x": (2, 3)}, "b.safetensors": {"lm_head.weight": (5,)}})
    (model / "consolidated.safetensors").write_bytes(_weights({"y": (7,)}))
    info = read_model(model)
    assert [file.name for file in info.weights] == ["a.safetensors", "b.safetensors"]
    assert info.parameters == 11
    assert info.tied_embeddings is False


def test_integer_buffers_are_no_parameters(model):
    """Integer tensors, such as position ids, are not counted."""
    _shards(model, {"a.safetensors": {"x": (6,)}, "b.safetensors": {"ids": (5,)}})
    (model / "b.safetensors").write_bytes(_weights({"ids": (5,)}, "I64"))
    assert read_model(model).parameters == 6


@pytest.mark.parametrize(("stored", "dtype"), [("BF16", "bf16"), ("F16", "fp16"), ("F32", "fp32")])
def test_the_type_of_the_weights_is_the_stored_one(model, stored, dtype):
    """The type is that of the tensors, whatever config.json says."""
    (model / "model.safetensors").write_bytes(_weights(TENSORS, stored))
    assert read_model(model).dtype == dtype


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("chat_template.jinja", "{{ x }}"),
        ("chat_template.json", "{}"),
        ("tokenizer_config.json", '{"chat_template": "{{ x }}"}'),
    ],
)
def test_finds_a_chat_template_where_tokenizers_keep_it(model, name, text):
    """A chat template is found in each of the places transformers looks."""
    (model / name).write_text(text)
    assert read_model(model).has_chat_template


def test_a_tokenizer_without_template_has_none(model):
    """A tokenizer configuration without a template does not claim one."""
    (model / "tokenizer_config.json").write_text('{"chat_template": null}')
    assert not read_model(model).has_chat_template


def test_a_tie_written_in_the_configuration_stands(model):
    """tie_word_embeddings is believed over the names of the tensors."""
    _change_config(model, tie_word_embeddings=False)
    assert read_model(model).tied_embeddings is False


def test_headers_are_read_as_the_real_library_writes_them(tmp_path):
    """A file written by the safetensors package is read with its shapes and types."""
    path = tmp_path / "x.safetensors"
    arrays = {"a": np.zeros((2, 3), np.float32), "b": np.zeros((4,), np.float16), "c": np.zeros((), np.int64)}
    save_file(arrays, path)
    header = read_header(path)
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in header.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("F16", (4,)),
        "c": ("I64", ()),
    }


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Llama", {"num_key_value_heads": 2}),
        ("GPT2", {}),
        ("GPTNeoX", {}),
        ("OPT", {}),
        ("Bloom", {}),
        ("Falcon", {}),
        ("Qwen3", {"tie_word_embeddings": True}),
        ("Gemma2", {}),
        ("Phi3", {}),
    ],
)
def test_architectures_are_read_as_transformers_reads_them(model, kind, changes):
    """Whatever an architecture calls its numbers, ours are those transformers shows under the usual names."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(architectures=[f"{kind}ForCausalLM"], **changes)
    config.save_pretrained(model)
    info = read_model(model)
    assert info.hidden_size == config.hidden_size
    assert info.layers == config.num_hidden_layers
    assert info.heads == config.num_attention_heads
    assert info.vocab_size == config.vocab_size
    assert info.intermediate_size == (
        getattr(config, "intermediate_size", None) or getattr(config, "ffn_dim", None) or 4 * config.hidden_size
    )
    if kind in ("Llama", "Qwen3", "Gemma2", "Phi3"):
        assert info.kv_heads == config.num_key_value_heads


def test_a_model_of_transformers_is_counted_right(model):
    """The parameters of a model that transformers saved are those it counts itself."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    built = transformers.LlamaForCausalLM(config)
    built.save_pretrained(model)
    info = read_model(model)
    assert info.parameters == built.num_parameters()
    assert info.architecture == "LlamaForCausalLM"
    assert info.dtype == "fp32"
    assert info.tied_embeddings is False


def test_a_nested_text_config_is_read(model):
    """A vision-language model's text part gives the numbers."""
    text = {key: value for key, value in CONFIG.items() if key != "architectures"}
    nested = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "vision_config": {}}
    (model / "config.json").write_text(json.dumps(nested))
    assert read_model(model).hidden_size == 8


def test_layers_of_different_width_count_as_the_widest(model):
    """Where hidden sizes differ, the largest one counts, as in the Trainer."""
    _change_config(model, hidden_size=None, hidden_sizes=[4, 16, 8])
    assert read_model(model).hidden_size == 16


def test_every_causal_model_of_transformers_is_recognised():
    """Each class that AutoModelForCausalLM can load passes our test of the name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = [name for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() for name in [names] if isinstance(name, str)]
    assert [
        name for name in names if not CAUSAL_LM.search(name) and not name.endswith("ForConditionalGeneration")
    ] == []


def test_a_model_with_code_of_its_own_is_accepted(model):
    """A model that maps AutoModelForCausalLM to its own class is one, whatever the class is called."""
    _change_config(model, architectures=["ChatModel"], auto_map={"AutoModelForCausalLM": "modeling.ChatModel"})
    assert read_model(model).architecture == "ChatModel"


# What is refused


def test_a_hub_name_is_answered_with_the_offline_way(tmp_path, monkeypatch):
    """The name of a model on a hub is refused with the commands that bring it here."""
    monkeypatch.chdir(tmp_path)
    error = _fault("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert "never downloads" in error.error
    assert "huggingface-cli download HuggingFaceTB/SmolLM2-135M-Instruct --local-dir SmolLM2-135M-Instruct" in error.fix
    assert error.where == "--model HuggingFaceTB/SmolLM2-135M-Instruct"


def test_a_missing_directory_is_named(tmp_path, model, monkeypatch):
    """A path that leads nowhere is named in full; a file is not a directory."""
    assert _fault(tmp_path / "none").error == "no such model directory"
    monkeypatch.chdir(tmp_path)
    assert _fault("model/none").where == str(model / "none")
    assert "file, not a directory" in _fault(model / "config.json").error


@pytest.mark.parametrize(
    ("extra", "fix"),
    [
        (None, "config.json"),
        ("adapter_config.json", "LoRA adapter"),
        ("x.Q4_1.gguf", "original safetensors"),
        ("snapshots/abc/config.json", "snapshots/abc"),
        ("hf/config.json", "model/hf"),
    ],
)
def test_a_directory_without_config_says_what_it_looks_like(model, extra, fix):
    """Without config.json, the error guesses what was named instead of a model."""
    (model / "config.json").unlink()
    if extra:
        (model / extra).parent.mkdir(parents=True, exist_ok=True)
        (model / extra).write_text("{}")
    error = _fault(model)
    assert "no config.json" in error.error
    assert fix in error.fix


def test_a_broken_config_is_placed_by_line(model):
    """Broken JSON is reported with its line."""
    (model / "config.json").write_text('{\n "hidden_size": 8,\n}')
    assert _fault(model).where == f"{model / 'config.json'}:3"
    (model / "config.json").write_text("[]")
    assert "not an object" in _fault(model).error


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
        {"architectures": ["BertForMaskedLM"]},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"architectures": ["LlamaModel"]},
        {"architectures": ["BartForCausalLM"], "is_encoder_decoder": True},
        {"architectures": None},
        {"architectures": "LlamaForCausalLM"},
    ],
)
def test_another_kind_of_model_is_refused(model, changes):
    """Only causal language models are tuned; anything else is refused by name."""
    _change_config(model, **changes)
    error = _fault(model)
    assert "not a causal language model" in error.error
    assert error.where == f"{model / 'config.json'} (architectures)"


def test_quantised_weights_are_refused(model):
    """Weights that are quantised, by their configuration or their type, are refused."""
    _change_config(model, quantization_config={"quant_method": "gptq"})
    assert "quantised (gptq)" in _fault(model).error
    _change_config(model)
    (model / "model.safetensors").write_bytes(_weights(TENSORS, "F8_E4M3"))
    assert "stored as F8_E4M3" in _fault(model).error


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
    ],
)
def test_a_shape_that_is_no_number_is_refused(model, changes, message):
    """A number of config.json that is missing or none is named."""
    _change_config(model, **changes)
    assert _fault(model).error == message


def test_a_model_without_tokenizer_is_refused(model):
    """Without a tokenizer there is nothing to train with."""
    (model / "tokenizer.json").unlink()
    assert "no tokenizer" in _fault(model).error


@pytest.mark.parametrize(
    ("extra", "message", "fix"),
    [
        (None, "no safetensors weights", "model.safetensors"),
        ("pytorch_model.bin", "pickles (pytorch_model.bin)", "convert"),
        ("adapter_model.safetensors", "no safetensors weights", "LoRA adapter"),
    ],
)
def test_a_model_without_safetensors_is_refused(model, extra, message, fix):
    """Weights in another form are refused with how to convert them; pickles because they can run code."""
    (model / "model.safetensors").unlink()
    if extra:
        (model / extra).write_bytes(b"x")
    error = _fault(model)
    assert message in error.error
    assert fix in error.fix


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "truncated"),
        (lambda data: data[:20], "truncated"),
        (lambda data: data + b"x", "longer than its header says"),
        (lambda _: b"", "not a safetensors file"),
        (lambda _: b"\x80\x04 a pickle", "not a safetensors file"),
        (lambda data: data[:8] + b"x" + data[9:], "not a safetensors file"),
        (lambda _: struct.pack("<Q", 8) + b'{"a": 1}', "not a safetensors file"),
        (lambda _: struct.pack("<Q", 4) + b"null", "not a safetensors file"),
        (lambda _: b"version https://git-lfs.github.com/spec/v1\n", "git-lfs pointer"),
    ],
)
def test_damaged_weights_are_refused(model, damage, message):
    """A file whose size or header is wrong is named before any host is touched."""
    path = model / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    error = _fault(model)
    assert message in error.error
    assert error.where == str(path)


def test_a_missing_shard_is_named(model):
    """A shard that the index names and the directory lacks is named."""
    _shards(model, {"a.safetensors": {"x": (2,)}}, {"x": "a.safetensors", "y": "b.safetensors"})
    assert _fault(model).error == "the index names b.safetensors, which is missing"


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"x": "a.safetensors", "lost": "a.safetensors"}}, "the index promises lost in a.safetensors"),
        ({"weight_map": {"x": "../a.safetensors"}}, "not a file of this directory"),
        ({"weight_map": {"x": 1}}, "not a file of this directory"),
        ({"weight_map": {}}, "no weight_map"),
        ([], "no weight_map"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(model, index, message):
    """An index that promises what the shards lack, or names files elsewhere, is refused."""
    _shards(model, {"a.safetensors": {"x": (2,)}})
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert message in _fault(model).error
