from __future__ import annotations

import typing

import pytest
import torch
from deepspeed.runtime import config as library
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero import config as zero_library
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig

from llmtrain.errors import ExitCode, InputFileError
from llmtrain.spec.dskeys import (
    BLOCKS,
    NOT_DATA_PARALLEL,
    OPTIMIZERS,
    REMOVED,
    REPLACED,
    TOP_LEVEL,
    TORCH_OPTIMIZERS,
    check_keys,
    check_optimizer_type,
)

MODELS = {
    ("zero_optimization",): zero_library.DeepSpeedZeroConfig,
    ("zero_optimization", "offload_param"): DeepSpeedZeroOffloadParamConfig,
    ("zero_optimization", "offload_optimizer"): DeepSpeedZeroOffloadOptimizerConfig,
    ("fp16",): DeepSpeedFP16Config,
    ("bf16",): DeepSpeedBF16Config,
}
LOOKED_UP = ("aio", "checkpoint", "data_types", "activation_checkpointing", "torch_autocast", "optimizer")


class _Recorder(dict):
    """A configuration that notes every key the library asks for."""

    def __init__(self, keys, asked=None):
        super().__init__(keys)
        self.asked = set() if asked is None else asked

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key):
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key):
        self.asked.add(key)
        return super().__contains__(key)

    def keys(self):
        return self

    def __copy__(self):
        return _Recorder(self, self.asked)


def _where(path):
    return f"ds.json ({'.'.join(path)})"


def test_top_level_keys_are_those_the_library_asks_for():
    """The table of top-level keys is what DeepSpeed's config class looks up, besides removed and unsupported ones."""
    config = _Recorder({"train_batch_size": 1})
    library.DeepSpeedConfig(config)
    refused = {path[0] for path in (*REMOVED, *REPLACED) if len(path) == 1} | set(NOT_DATA_PARALLEL)
    assert config.asked - refused == TOP_LEVEL


@pytest.mark.parametrize("name", LOOKED_UP)
def test_block_keys_are_those_the_library_asks_for(name):
    """The keys of blocks without a schema are what DeepSpeed's config class looks up in them."""
    block = _Recorder({"type": "AdamW"} if name == "optimizer" else {})
    library.DeepSpeedConfig({"train_batch_size": 1, name: block})
    assert block.asked == set(BLOCKS[(name,)])


@pytest.mark.parametrize("path", MODELS)
def test_block_keys_are_the_fields_of_the_library(path):
    """The keys of blocks with a schema are its fields, and those we left out are outdated names."""
    fields = {field.alias or name for name, field in MODELS[path].model_fields.items()}
    outdated = {old[-1] for old in REPLACED if old[:-1] == path}
    assert fields - outdated == set(BLOCKS[path])


@pytest.mark.parametrize("path", MODELS)
def test_outdated_names_include_all_that_the_library_deprecates(path):
    """Every field that DeepSpeed marks as deprecated has a replacement named here."""
    fields = MODELS[path].model_fields.items()
    deprecated = {name for name, field in fields if (field.json_schema_extra or {}).get("deprecated")}
    assert deprecated <= {old[-1] for old in REPLACED if old[:-1] == path}


@pytest.mark.parametrize("path", MODELS)
def test_kinds_are_the_types_of_the_library(path):
    """The kind of each value follows from the type DeepSpeed gives it."""
    kinds = {bool: "bool", int: "int", float: "number", str: "text"}
    for name, field in MODELS[path].model_fields.items():
        kind = BLOCKS[path].get(field.alias or name)
        types = [item for item in typing.get_args(field.annotation) or (field.annotation,) if item is not type(None)]
        plain = [base for base in types[0].__mro__ if base in kinds]
        if kind not in (None, "any") and plain:
            assert kinds[plain[0]] == kind, name


def test_removed_keys_are_those_the_library_refuses():
    """The table of removed keys is DeepSpeed's own."""
    top = {(key,) for key in library._REMOVED_TOP_LEVEL_CONFIG_KEYS}
    zero = {("zero_optimization", key) for key in library._REMOVED_ZERO_CONFIG_KEYS}
    assert top | zero == set(REMOVED)


def test_optimizers_are_those_of_the_library():
    """The table of optimizers is DeepSpeed's own, and each torch name is a class of torch.optim."""
    assert set(library.DEEPSPEED_OPTIMIZERS) == OPTIMIZERS
    assert all(hasattr(torch.optim, name) for name in TORCH_OPTIMIZERS)


def _nested(path, value):
    return {path[0]: value} if len(path) == 1 else {path[0]: _nested(path[1:], value)}


@pytest.mark.parametrize("path", REMOVED, ids=".".join)
def test_a_removed_key_fails_there_and_is_explained_here(path):
    """A removed key raises in DeepSpeed, and here says what to do instead, with file and key path."""
    config = {"train_batch_size": 1, **_nested(path, {"enabled": True})}
    with pytest.raises(library.DeepSpeedConfigError):
        library.DeepSpeedConfig(config)
    with pytest.raises(InputFileError) as caught:
        check_keys(config, _where)
    assert caught.value.exit_code == ExitCode.INPUT
    assert caught.value.error == f"DeepSpeed has removed {'.'.join(path)}"
    assert caught.value.where == _where(path)
    assert caught.value.fix == REMOVED[path]


@pytest.mark.parametrize("path", REPLACED, ids=".".join)
def test_an_outdated_name_is_answered_with_the_new_one(path):
    """An older name is refused with what to write today."""
    with pytest.raises(InputFileError) as caught:
        check_keys(_nested(path, value=True), _where)
    assert caught.value.fix == REPLACED[path]
    assert caught.value.where == _where(path)


@pytest.mark.parametrize("key", NOT_DATA_PARALLEL)
def test_several_ranks_on_one_example_are_refused(key):
    """Keys under which the batch equation is wrong are refused."""
    with pytest.raises(InputFileError, match=f"{key} is not supported"):
        check_keys({key: {}}, _where)


@pytest.mark.parametrize(
    ("config", "key", "fix"),
    [
        ({"gradient_cliping": 1.0}, "gradient_cliping", "did you mean gradient_clipping?"),
        ({"zero_optimisation": {}}, "zero_optimisation", "did you mean zero_optimization?"),
        (
            {"zero_optimization": {"overlap_com": True}},
            "zero_optimization.overlap_com",
            "zero_optimization.overlap_comm",
        ),
        ({"aio": {"queue_deph": 8}}, "aio.queue_deph", "did you mean aio.queue_depth?"),
        ({"stage": 3}, "stage", "write it as zero_optimization.stage"),
        ({"zero_optimization": {"gradient_clipping": 1}}, "zero_optimization.gradient_clipping", "at the top level"),
        ({"zero_optimization": {"nvme_path": "/x"}}, "zero_optimization.nvme_path", "offload_param.nvme_path"),
        ({"qqq": 1}, "qqq", "remove it"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest(config, key, fix):
    """A key DeepSpeed does not know is named, with the nearest one or the place it belongs."""
    with pytest.raises(InputFileError) as caught:
        check_keys(config, _where)
    assert caught.value.error == f"DeepSpeed has no key {key}"
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("config", "key", "fix"),
    [
        ({"zero_optimization": {"contiguous_gradients": "yes please"}}, "contiguous_gradients", "true or false"),
        ({"zero_optimization": {"stage": "three"}}, "stage", "a whole number"),
        ({"zero_optimization": {"sub_group_size": 1.5}}, "sub_group_size", "a whole number"),
        ({"zero_optimization": {"stage": True}}, "stage", "a whole number"),
        ({"zero_optimization": {"offload_param": {"nvme_path": 1}}}, "nvme_path", "text"),
        ({"gradient_clipping": "1,0"}, "gradient_clipping", "a number"),
        ({"train_batch_size": "many"}, "train_batch_size", "a whole number"),
        ({"zero_optimization": True}, "zero_optimization", "zero_optimization: {stage: ...}"),
        ({"zero_optimization": {"offload_param": "cpu"}}, "offload_param", "offload_param: {device: ...}"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(config, key, fix):
    """A value DeepSpeed could not read is named with the kind that is wanted."""
    with pytest.raises(InputFileError) as caught:
        check_keys(config, _where)
    assert key in caught.value.error
    assert fix in caught.value.fix


def test_auto_stands_for_every_kind():
    """The word "auto" is accepted wherever a value is."""
    for path, kinds in BLOCKS.items():
        check_keys(_nested(path, {key: "auto" for key, kind in kinds.items() if kind != "any"}), _where)


@pytest.mark.parametrize("name", ["AdamW", "adam", "Lion", "SGD"])
def test_an_optimizer_of_deepspeed_or_torch_is_accepted(name):
    """DeepSpeed's names are matched in any case, torch's exactly."""
    check_optimizer_type(name, _where)


@pytest.mark.parametrize(
    ("name", "fix"), [("AdmaW", "AdamW"), ("OneBitAdam", "Adam"), (None, "AdamW"), ("auto", "AdamW"), ("sgd", "SGD")]
)
def test_an_unknown_optimizer_is_answered_with_the_nearest(name, fix):
    """An optimizer DeepSpeed would not find is refused with a near one."""
    with pytest.raises(InputFileError) as caught:
        check_optimizer_type(name, _where)
    assert fix in caught.value.fix
