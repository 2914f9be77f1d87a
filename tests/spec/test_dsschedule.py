from __future__ import annotations

import dataclasses

import pytest

from llmtrain.errors import InputFileError
from llmtrain.spec.batch import BatchRequest
from llmtrain.spec.dsconfig import Wanted, render_deepspeed
from llmtrain.spec.presets import overrides_layer, read_config

WANTED = Wanted(
    world_size=2,
    batch=BatchRequest(global_=8, micro=2, accumulation=None),
    dtype="bf16",
    learning_rate=1e-4,
    weight_decay=0.1,
    max_grad_norm=1.0,
    own_script=True,
)
AUTO = {
    "type": "WarmupDecayLR",
    "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"},
}


def render(block=None, **wanted):
    """Both texts of a preset with this scheduler, for a script."""
    overrides = overrides_layer({"scheduler": block} if block else {})
    return render_deepspeed(read_config("zero2"), overrides, model=None, wanted=dataclasses.replace(WANTED, **wanted))


def test_scripts_get_an_optimizer_in_the_resolved_text_only():
    """A script that calls deepspeed.initialize needs one; Hugging Face's Trainer makes its own."""
    rendered = render()
    params = {"lr": 1e-4, "weight_decay": 0.1, "betas": [0.9, 0.999], "eps": 1e-8}
    assert rendered.config["optimizer"] == {"type": "AdamW", "params": params}
    assert "optimizer" not in rendered.template
    assert render(accelerator="cpu").config["optimizer"]["params"]["torch_adam"] is True


def test_schedule_is_filled_from_the_run():
    """What a scheduler block leaves open comes from the recipe; the other text keeps it open."""
    rendered = render(AUTO, max_steps=200, reads_resolved=True)
    expected = {"warmup_max_lr": 1e-4, "warmup_num_steps": 6, "total_num_steps": 200}
    assert rendered.config["scheduler"]["params"] == expected
    assert rendered.template["scheduler"] == AUTO


def test_steps_only_the_script_knows():
    """Without max_steps the block cannot be resolved: an error for a script that reads it, left out otherwise."""
    with pytest.raises(InputFileError, match="only the script knows") as caught:
        render(AUTO, reads_resolved=True)
    assert "training.max_steps" in caught.value.fix
    rendered = render(AUTO)
    assert "scheduler" not in rendered.config
    assert rendered.template["scheduler"] == AUTO


def test_our_own_training_still_refuses_a_schedule():
    """Two schedules at once are refused as before."""
    with pytest.raises(InputFileError, match="set twice"):
        render(AUTO, own_script=False)
