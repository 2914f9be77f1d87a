from __future__ import annotations

import json

import pytest

from llmtrain.errors import ExitCode, InputFileError
from llmtrain.spec import presets
from llmtrain.spec.dskeys import check_keys
from llmtrain.spec.presets import preset_names, presets_folder, read_config

NAMES = ("zero1", "zero2", "zero2-offload", "zero3", "zero3-nvme", "zero3-offload")

SEED_WITHOUT_OFFLOAD = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}
SEED_OFFLOAD = {
    "zero_optimization": {
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
    },
}


def _leaves(tree, path=()):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def test_the_six_presets_are_found_by_name():
    """Exactly the documented presets are shipped."""
    assert preset_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_holds_known_deepspeed_keys_only(name):
    """No shipped preset has a key that DeepSpeed does not know."""
    layer = read_config(name)
    check_keys(layer.keys, layer.where)
    assert layer.name == name


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("zero3", SEED_WITHOUT_OFFLOAD),
        ("zero3-offload", SEED_WITHOUT_OFFLOAD),
        ("zero3-offload", SEED_OFFLOAD),
    ],
)
def test_zero3_presets_hold_the_examples_of_the_notes(name, seed):
    """Key by key, zero3 and zero3-offload contain the two configurations of the multi-node notes."""
    mine = dict(_leaves(read_config(name).keys))
    assert {path: mine.get(path) for path, _ in _leaves(seed)} == dict(_leaves(seed))


def test_zero3_does_not_offload():
    """zero3 differs from zero3-offload by the two offload blocks alone."""
    plain, offload = (dict(_leaves(read_config(name).keys)) for name in ("zero3", "zero3-offload"))
    assert set(offload) - set(plain) == {path for path, _ in _leaves(SEED_OFFLOAD)}
    assert plain.items() <= offload.items()


def test_presets_are_found_in_a_wheel_too(tmp_path, monkeypatch):
    """A configs folder inside the package, as a wheel has it, wins over the repository's."""
    (tmp_path / "llmtrain/configs").mkdir(parents=True)
    (tmp_path / "llmtrain/configs/mine.yaml").write_text("bf16: {enabled: auto}\n")
    monkeypatch.setattr(presets, "__file__", str(tmp_path / "llmtrain/spec/presets.py"))
    assert presets_folder() == tmp_path / "llmtrain/configs"
    assert preset_names() == ("mine",)


@pytest.mark.parametrize("suffix", [".json", ".yaml", ".yml"])
def test_reads_a_users_file_and_knows_its_lines(tmp_path, suffix):
    """A user's JSON or YAML is read by path, and each key is found at its line."""
    path = tmp_path / f"mine{suffix}"
    keys = {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}}
    path.write_text(json.dumps(keys, indent=2))
    layer = read_config(str(path))
    assert layer.keys == keys
    assert layer.where(("zero_optimization", "stage")) == f"{path}:6 (zero_optimization.stage)"
    assert layer.where(("zero_optimization", "absent")) == f"{path}:5 (zero_optimization.absent)"
    assert layer.where(("absent",)) == f"{path} (absent)"


def test_names_the_nearest_presets():
    """A misspelt preset is answered with the nearest names."""
    with pytest.raises(InputFileError) as caught:
        read_config("zero3-ofload")
    assert caught.value.exit_code == ExitCode.INPUT
    assert "zero3-offload" in caught.value.fix
    assert caught.value.where == "--config zero3-ofload"


def test_lists_all_presets_when_none_is_near():
    """A name that resembles no preset is answered with all of them."""
    with pytest.raises(InputFileError) as caught:
        read_config("fsdp")
    assert all(name in caught.value.fix for name in NAMES)


def test_points_at_a_file_of_the_name(tmp_path, monkeypatch):
    """A bare file name that is no preset is answered with how to name the file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").write_text("{}")
    with pytest.raises(InputFileError) as caught:
        read_config("mine")
    assert "./mine" in caught.value.fix


@pytest.mark.parametrize(
    ("name", "text", "line", "message"),
    [
        ("a.yaml", "bf16:\n  enabled: auto\nbf16: {}\n", 3, "stands twice"),
        ("a.json", '{"bf16": {},\n "bf16": {}}', 2, "stands twice"),
        ("a.yaml", "bf16: !!python/object/apply:os.system ['id']\n", 1, "not valid YAML"),
        ("a.yaml", "bf16: {enabled: auto\n", 2, "not valid YAML"),
        ("a.json", '{"bf16": {"enabled": true,}}', 1, "not valid JSON"),
        ("a.json", '{\n  "steps_per_print": NaN}', 2, "is not part of JSON"),
        ("a.yaml", "- bf16\n", 1, "a list, not a mapping"),
        ("a.yaml", "zero3\n", 1, "a str, not a mapping"),
        ("a.yaml", "", 1, "empty, not a mapping"),
        ("a.json", "{}", 1, "empty, not a mapping"),
        ("a.json", "[1]", 1, "a list, not a mapping"),
    ],
)
def test_a_faulty_file_is_named_with_its_line(tmp_path, name, text, line, message):
    """Every fault of a user's file is one input error with file and line."""
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InputFileError) as caught:
        read_config(str(path))
    assert caught.value.where == f"{path}:{line}"
    assert message in caught.value.error
    assert caught.value.fix


def test_a_missing_file_is_named(tmp_path):
    """A path that leads nowhere is an input error."""
    with pytest.raises(InputFileError, match="no such DeepSpeed configuration"):
        read_config(str(tmp_path / "none.json"))
