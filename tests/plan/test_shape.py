from __future__ import annotations

import json

import pytest
from tests.plan.models import CASES

from llmtrain.errors import InputFileError
from llmtrain.plan.families import FAMILIES
from llmtrain.plan.shape import plan_shape, read_shape


@pytest.mark.parametrize(("model_type", "keys"), CASES, ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)])
def test_equals_transformers(model_type, keys):
    """Names, shapes and order equal the real class on the meta device, from the config.json it would save."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **keys)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    real = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    for text in (config.to_json_string(use_diff=True), config.to_json_string(use_diff=False)):
        shape = plan_shape(json.loads(text), name="config.json")
        assert [(item.name, item.shape) for item in shape.parameters] == real


def test_every_family_has_a_case():
    """No family stands in the table without a comparison against the real class."""
    untested = set(FAMILIES) - {model_type for model_type, _ in CASES}
    assert untested == set()


def test_groups_are_the_trainers():
    """The two optimizer groups hold the parameters that transformers' Trainer would put there."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer

    seen = set()
    for model_type, keys in CASES:
        if model_type in seen:
            continue
        seen.add(model_type)
        config = AutoConfig.for_model(model_type, **keys)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        decayed = set(Trainer.get_decay_parameter_names(None, model))
        shape = plan_shape(json.loads(config.to_json_string()), name="config.json")
        names = {item.name for item in shape.parameters}
        assert {item.name for item in shape.parameters if item.is_decayed} == decayed & names, model_type


def test_unknown_family_without_weights():
    """A family that is not in the table is refused with the way out, not guessed."""
    with pytest.raises(InputFileError, match="'rwkv'"):
        plan_shape({"model_type": "rwkv"}, name="config.json")


def test_unknown_family_with_weights(tmp_path):
    """A family that is not in the table is read from the headers of its safetensors files."""
    import torch
    from safetensors.torch import save_file

    save_file({"a.weight": torch.zeros(3, 5), "lm_head.weight": torch.zeros(7, 5)}, tmp_path / "model.safetensors")
    keys = {"model_type": "rwkv", "hidden_size": 5, "num_hidden_layers": 1, "vocab_size": 7, "num_attention_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    shape = read_shape(tmp_path)
    assert (shape.total, shape.tied) == (50, False)
