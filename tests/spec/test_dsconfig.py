from __future__ import annotations

import copy
import json
from types import SimpleNamespace
from unittest import mock

import pytest
from deepspeed.runtime import config as library
from hypothesis import given
from hypothesis import strategies as st

from llmtrain.errors import ExitCode, InputFileError
from llmtrain.spec.batch import BatchRequest
from llmtrain.spec.dsconfig import Wanted, render_deepspeed
from llmtrain.spec.dskeys import BLOCKS, TOP_LEVEL
from llmtrain.spec.presets import Layer, overrides_layer, preset_names, read_config

NVME = {"zero_optimization": {"offload_optimizer": {"nvme_path": "/nvme"}}}


def _model(hidden_size=64):
    return SimpleNamespace(hidden_size=hidden_size)


def _wanted(**changes):
    usual = {
        "world_size": 4,
        "batch": BatchRequest(global_=32, micro=2),
        "dtype": "bf16",
        "learning_rate": 1e-5,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
    }
    return Wanted(**{**usual, **changes})


def _render(keys, *, over=None, model=None, **changes):
    preset = read_config(keys) if isinstance(keys, str) else Layer(keys=keys, name="mine", file="mine.json")
    if keys == "zero3-nvme":
        over = NVME if over is None else over
    return render_deepspeed(
        preset, overrides_layer(over or {}), model=_model() if model is None else model, wanted=_wanted(**changes)
    )


def _fault(keys, **arguments):
    with pytest.raises(InputFileError) as caught:
        _render(keys, **arguments)
    assert caught.value.exit_code == ExitCode.INPUT
    assert caught.value.where
    assert caught.value.fix
    return caught.value


def _reasons(rendered):
    return {choice.key: choice.reason for choice in rendered.choices}


def _library_config(config, world_size):
    """The real class, told about a world of that size."""
    with mock.patch.multiple(
        library.dist, get_rank=mock.Mock(return_value=0), get_world_size=mock.Mock(return_value=world_size)
    ):
        return library.DeepSpeedConfig(copy.deepcopy(config))


# What is filled in


@pytest.mark.parametrize("name", preset_names())
def test_every_auto_of_a_preset_becomes_a_number_with_a_reason(name):
    """Each "auto" of a shipped preset is resolved, and says why."""
    rendered = _render(name)
    assert "auto" not in json.dumps(rendered.config)
    autos = [
        f"{block}.{key}" if isinstance(value, dict) else block
        for block, value in rendered.template.items()
        for key in (value if isinstance(value, dict) else [block])
        if (value[key] if isinstance(value, dict) else value) == "auto"
    ]
    reasons = _reasons(rendered)
    assert [key for key in autos if not reasons.get(key) and key not in reasons] in (
        [],
        ["train_micro_batch_size_per_gpu", "gradient_accumulation_steps"],
    )
    assert all(choice.reason for choice in rendered.choices)


def test_the_batch_equation_is_the_reason_of_the_batch():
    """The three batch numbers satisfy the equation, and the equation is shown."""
    rendered = _render("zero3")
    config = rendered.config
    assert config["train_batch_size"] == 32
    assert config["train_micro_batch_size_per_gpu"] == 2
    assert config["gradient_accumulation_steps"] == 4
    assert (rendered.batch.global_, rendered.batch.micro, rendered.batch.accumulation) == (32, 2, 4)
    assert _reasons(rendered)["train_batch_size"] == "batch.global 32 = micro 2 x accumulation 4 x 4 ranks"


@pytest.mark.parametrize(
    ("dtype", "enabled"), [("bf16", (True, False)), ("fp16", (False, True)), ("fp32", (False, False))]
)
def test_precision_follows_the_run(dtype, enabled):
    """Exactly the precision of the run is enabled."""
    config = _render("zero3", dtype=dtype).config
    assert (config["bf16"]["enabled"], config["fp16"]["enabled"]) == enabled


def test_precision_is_written_where_a_file_has_none():
    """A file without precision blocks computes as the run does."""
    config = _render({"zero_optimization": {"stage": 2}}, dtype="fp16").config
    assert config["fp16"] == {"enabled": True}
    assert config["bf16"] == {"enabled": False}


def test_sizes_follow_from_the_hidden_size():
    """Bucket sizes are those Hugging Face derives from the hidden size."""
    zero = _render("zero3", model=_model(576)).config["zero_optimization"]
    assert zero["reduce_bucket_size"] == 331776
    assert zero["stage3_prefetch_bucket_size"] == 298598
    assert zero["stage3_param_persistence_threshold"] == 5760


def test_sizes_are_left_to_deepspeed_without_a_model():
    """Rendered without a model, what follows from its shape is left out, with a reason."""
    rendered = render_deepspeed(read_config("zero3"), overrides_layer({}), model=None, wanted=_wanted())
    assert "reduce_bucket_size" not in rendered.config["zero_optimization"]
    assert "DeepSpeed's own default" in _reasons(rendered)["zero_optimization.reduce_bucket_size"]


def test_an_auto_that_nobody_fills_is_left_out_openly():
    """An "auto" where there is nothing to derive it from is dropped with a reason, in lists and below stage 3 too."""
    keys = {"zero_optimization": {"stage": 2, "stage3_prefetch_bucket_size": "auto"}, "wandb": {"tags": [["auto"]]}}
    rendered = _render(keys)
    assert "stage3_prefetch_bucket_size" not in rendered.config["zero_optimization"]
    assert rendered.config["wandb"] == {}
    assert {"zero_optimization.stage3_prefetch_bucket_size", "wandb.tags"} <= set(_reasons(rendered))


def test_no_zero_block_means_plain_data_parallelism():
    """A file without zero_optimization gets stage 0, which accelerate needs to find."""
    assert _render({"steps_per_print": 10}).config["zero_optimization"] == {"stage": 0}


def test_numbers_with_an_exponent_are_numbers():
    """1e9, which YAML 1.1 reads as text, becomes a number, as every other tool reads it."""
    zero = {"stage": 3, "sub_group_size": "1e9"}
    optimizer = {"type": "AdamW", "params": {"lr": "1e-5", "betas": ["9e-1", 0.99]}}
    config = _render({"zero_optimization": zero, "optimizer": optimizer}).config
    assert config["zero_optimization"]["sub_group_size"] == 1_000_000_000
    assert isinstance(config["zero_optimization"]["sub_group_size"], int)
    assert config["optimizer"]["params"]["betas"] == [0.9, 0.99]


@pytest.mark.parametrize("name", preset_names())
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_trainer_fills_the_template_with_the_same_numbers(name, dtype):
    """Hugging Face's own code turns the template into exactly our resolved configuration."""
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    rendered = _render(name, dtype=dtype, model=_model(576))
    arguments = SimpleNamespace(
        world_size=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        max_grad_norm=1.0,
        learning_rate=1e-5,
        weight_decay=0.0,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        save_on_each_node=False,
        fp16=dtype == "fp16",
        fp16_full_eval=False,
        bf16=dtype == "bf16",
        bf16_full_eval=False,
        get_warmup_steps=lambda steps: steps // 10,
    )
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=576))
    for source in (rendered.template, rendered.config):
        theirs = HfTrainerDeepSpeedConfig(source)
        theirs.trainer_config_process(arguments)
        theirs.trainer_config_finalize(arguments, model, num_training_steps=100)
        assert theirs.config == rendered.config


# Overrides


def test_overrides_are_laid_over_the_preset():
    """A nested override replaces one key and leaves its neighbours, in both texts."""
    rendered = _render("zero3", over={"zero_optimization": {"stage3_max_live_parameters": "2e8"}, "steps_per_print": 5})
    for text in (rendered.config, rendered.template):
        assert text["zero_optimization"]["stage3_max_live_parameters"] == 200_000_000
        assert text["zero_optimization"]["stage3_max_reuse_distance"] == 1_000_000_000
        assert text["steps_per_print"] == 5


def test_null_removes_a_key():
    """Null in an override removes the preset's key, so that accelerate never meets a null block."""
    rendered = _render("zero3-offload", over={"zero_optimization": {"offload_param": None}})
    assert "offload_param" not in rendered.config["zero_optimization"]
    assert "offload_param" not in rendered.template["zero_optimization"]


def test_neither_layer_is_changed():
    """Rendering leaves the preset and the overrides as they were."""
    preset, over = read_config("zero3-offload"), {"zero_optimization": {"offload_param": {"pin_memory": True}}}
    before = copy.deepcopy((preset.keys, over))
    render_deepspeed(preset, overrides_layer(over), model=_model(), wanted=_wanted(accelerator="cpu"))
    assert (preset.keys, over) == before


def test_a_fault_is_placed_in_the_layer_it_came_from():
    """An error names the override or the file's line, whichever wrote the key."""
    error = _fault("zero3", over={"zero_optimization": {"stage": 7}})
    assert error.where == "deepspeed: of the run file, or --set deepspeed.KEY=VALUE (zero_optimization.stage)"
    error = _fault({"zero_optimization": {"stage": 7}})
    assert error.where == "mine.json (zero_optimization.stage)"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), [float("nan")], "1e999", [{"a": {2}}]])
def test_a_value_that_json_cannot_hold_is_refused(value):
    """Dates, NaN and the like are refused before they reach a JSON file."""
    assert "JSON cannot hold" in _fault({"wandb": {"project": value}}).error


# What the hosts need


def test_a_host_without_accelerator_pins_and_overlaps_nothing():
    """On the CPU pinned memory and overlapped communication are off, with a reason each."""
    rendered = _render("zero3-offload", accelerator="cpu")
    for text in (rendered.config, rendered.template):
        zero = text["zero_optimization"]
        assert zero["offload_optimizer"]["pin_memory"] is False
        assert zero["offload_param"]["pin_memory"] is False
        assert zero["overlap_comm"] is False
    assert "no accelerator" in _reasons(rendered)["zero_optimization.overlap_comm"]


def test_a_gpu_host_keeps_what_the_preset_says():
    """With an accelerator, pinning and overlap stay as written, and nothing is said about them."""
    rendered = _render("zero3-offload")
    assert rendered.config["zero_optimization"]["offload_param"]["pin_memory"] is True
    assert rendered.config["zero_optimization"]["overlap_comm"] is True
    assert not [key for key in _reasons(rendered) if "pin_memory" in key or "overlap" in key]


def test_checkpoints_on_local_disks_are_told_to_deepspeed():
    """With a disk per host each host writes its own part; a user's own word stands."""
    assert _render("zero3", checkpoint_local_storage=True).config["checkpoint"] == {"use_node_local_storage": True}
    assert "checkpoint" not in _render("zero3").config
    mine = {"checkpoint": {"use_node_local_storage": False}}
    assert _render("zero3", over=mine, checkpoint_local_storage=True).config["checkpoint"] == mine["checkpoint"]


def test_nvme_needs_a_path():
    """The NVMe preset says which option names the drive."""
    error = _fault("zero3-nvme", over={})
    assert "--set deepspeed.zero_optimization.offload_optimizer.nvme_path=" in error.fix
    assert error.where.endswith("(zero_optimization.offload_optimizer.device)")
    relative = {"zero_optimization": {"offload_optimizer": {"nvme_path": "scratch"}}}
    assert "not absolute" in _fault("zero3-nvme", over=relative).error


def test_two_runs_swap_into_different_folders():
    """The run's own folder is added to the NVMe path, and to nothing else."""
    rendered = _render("zero3-nvme", nvme_subfolder="run-7")
    assert rendered.config["zero_optimization"]["offload_optimizer"]["nvme_path"] == "/nvme/run-7"
    assert rendered.template["zero_optimization"]["offload_optimizer"]["nvme_path"] == "/nvme/run-7"
    assert "nvme_path" not in rendered.config["zero_optimization"]["offload_param"]


# The optimizer


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("zero1", "AdamW"), ("zero3", "AdamW"), ("zero2-offload", "DeepSpeedCPUAdam"), ("zero3-nvme", "DeepSpeedCPUAdam")],
)
def test_the_optimizer_is_the_trainers(name, optimizer):
    """No preset writes an optimizer block, so that parameter groups are alike in all; the choice names what runs."""
    rendered = _render(name)
    assert "optimizer" not in rendered.config
    assert {choice.key: choice.value for choice in rendered.choices}["optimizer"] == optimizer


def test_accelerate_keeps_groups_when_it_takes_deepspeeds_cpu_adam():
    """What the choice above relies on: accelerate swaps AdamW for DeepSpeedCPUAdam in AdamW mode, group by group."""
    import torch
    from accelerate.utils.deepspeed import map_pytorch_optim_to_deepspeed
    from deepspeed.ops import adam

    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": weights[:1], "weight_decay": 0.1}, {"params": weights[1:], "weight_decay": 0.0}]
    with mock.patch.object(adam, "DeepSpeedCPUAdam") as cpu_adam:
        map_pytorch_optim_to_deepspeed(torch.optim.AdamW(groups, lr=0.5, betas=(0.8, 0.9)))
    (given_groups,), options = cpu_adam.call_args
    assert [(group["weight_decay"], group["lr"], group["betas"]) for group in given_groups] == [
        (0.1, 0.5, (0.8, 0.9)),
        (0.0, 0.5, (0.8, 0.9)),
    ]
    assert options["adamw_mode"] is True


def test_an_optimizer_block_of_the_users_is_filled():
    """The learning rate and decay of the run fill a user's optimizer block, written as auto or left out."""
    for params in ({"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": "auto"}, {}):
        config = _render({"optimizer": {"type": "AdamW", "params": params}}, weight_decay=0.1).config
        filled = config["optimizer"]["params"]
        assert (filled["lr"], filled["weight_decay"]) == (1e-5, 0.1)
        assert filled.get("betas", [0.9, 0.999]) == [0.9, 0.999]
        assert filled.get("eps", 1e-8) == 1e-8
        assert "torch_adam" not in filled


# What is refused


@pytest.mark.parametrize(
    ("keys", "changes", "message"),
    [
        ({"train_batch_size": 64}, {}, "train_batch_size 64 contradicts batch.global 32 (batch.global 32 = micro 2 x"),
        ({"train_micro_batch_size_per_gpu": 4}, {}, "train_micro_batch_size_per_gpu 4 contradicts batch.micro 2"),
        (
            {"train_batch_size": 30, "train_micro_batch_size_per_gpu": 2},
            {"batch": BatchRequest()},
            "batch.global 30 = micro 2 x accumulation ? x 4 ranks does not divide; nearest: 24 or 32",
        ),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, {}, "bf16 and fp16 are both enabled"),
        ({"fp16": {"enabled": True}}, {}, "fp16.enabled is true, and the run computes in bf16"),
        ({"bf16": {"enabled": False}}, {}, "bf16.enabled is false, and the run computes in bf16"),
        ({"gradient_clipping": 0.5}, {}, "gradient_clipping 0.5 contradicts training.max_grad_norm 1.0"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}, {}, "optimizer.params.lr 0.1 contradicts training."),
        ({"optimizer": {"params": {"lr": "auto"}}}, {}, "the optimizer block has no type"),
        ({"optimizer": {"type": "Adamm"}}, {}, "no optimizer 'Adamm'"),
        ({"scheduler": {"type": "WarmupDecayLR"}}, {}, "schedule is set twice"),
        ({"zero_optimization": {"stage": "auto"}}, {}, "zero_optimization.stage is 'auto'"),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
            {},
            "needs zero_optimization.stage 3",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            {},
            "needs zero_optimization.stage 1 or more",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}},
            {},
            "needs zero_optimization.stage 3",
        ),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, {}, "no nvme_path says where"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "gpu"}}}, {}, "device is 'gpu'"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"ratio": 0.5}}}, {}, "ratio needs stage 3"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}}, {}, "3 does not divide 4 ranks"),
        ({"elasticity": {"enabled": True}}, {}, "DeepSpeed has removed elasticity"),
        ({"zero_optimization": {"cpu_offload": True}}, {}, "zero_optimization.cpu_offload is outdated"),
        ({"gradient_cliping": 1.0}, {}, "DeepSpeed has no key gradient_cliping"),
    ],
)
def test_what_deepspeed_or_the_trainer_would_refuse_is_refused_here(keys, changes, message):
    """A configuration that would fail on the hosts, or train something else, is an input error with place and fix."""
    assert message in _fault(keys, **changes).error


def test_batch_numbers_of_the_file_count():
    """Numbers in a DeepSpeed file fix the batch as those of the run file do."""
    keys = {"train_batch_size": 64, "gradient_accumulation_steps": 4}
    batch = _render(keys, batch=BatchRequest()).batch
    assert (batch.global_, batch.micro, batch.accumulation) == (64, 4, 4)


def test_the_scheduler_fault_names_the_same_schedule_of_ours():
    """A scheduler block is answered with the run file's schedule that does the same."""
    assert "training.schedule=linear" in _fault({"scheduler": {"type": "WarmupDecayLR"}}).fix
    assert "training.schedule=constant" in _fault({"scheduler": {"type": "WarmupLR"}}).fix


ODD = st.sampled_from(
    [
        "auto",
        None,
        True,
        -1,
        0,
        3,
        0.5,
        64.0,
        1e300,
        "",
        "cpu",
        "nvme",
        "1e9",
        "1e999",
        [],
        ["auto"],
        {},
        {"device": "nvme"},
    ]
)
PATHS = [(key,) for key in (*TOP_LEVEL, "nonsense")] + [(*path, key) for path, kinds in BLOCKS.items() for key in kinds]


@given(st.dictionaries(st.sampled_from(PATHS), ODD, max_size=6), st.sampled_from(preset_names()))
def test_odd_values_give_a_configuration_or_an_input_error(odd, name):
    """Whatever stands where a value should, the answer is a configuration without "auto", or one of our errors."""
    over = {}
    for path, value in sorted(odd.items(), key=lambda item: len(item[0])):
        node = over
        for key in path[:-1]:
            node = node.setdefault(key, {}) if isinstance(node.get(key, {}), dict) else {}
        node[path[-1]] = copy.deepcopy(value)
    try:
        rendered = _render(name, over=over)
    except InputFileError as error:
        assert error.where  # noqa: PT017
        return
    assert '"auto"' not in json.dumps(rendered.config, allow_nan=False)


# The real library


@st.composite
def _requests(draw):
    """A preset, keys over it, and a run, as users combine them."""
    name = draw(st.sampled_from(preset_names()))
    stage = int(name[4])
    zero = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "overlap_comm": st.booleans() | st.just("auto"),
                "reduce_scatter": st.booleans(),
                "round_robin_gradients": st.booleans(),
                "reduce_bucket_size": st.integers(1, 10**9) | st.sampled_from(["auto", "5e8", 2e8]),
                "allgather_bucket_size": st.sampled_from(["auto", "5e8", 100]),
                "sub_group_size": st.sampled_from([1e9, "1e8", 10**7, "auto"]),
                "stage3_max_live_parameters": st.sampled_from([0, 1e9, "auto"]),
                "stage3_prefetch_bucket_size": st.sampled_from(["auto", 0, "5e7"]),
            },
        )
    )
    if name == "zero3-nvme":
        zero["offload_optimizer"] = {"nvme_path": "/nvme"}
    if stage == 3 and draw(st.booleans()):
        zero["offload_param"] = {"device": draw(st.sampled_from(["none", "cpu"])), "pin_memory": draw(st.booleans())}
    over = {"zero_optimization": zero}
    if draw(st.booleans()):
        over["optimizer"] = {"type": draw(st.sampled_from(["AdamW", "Lion"])), "params": {"lr": "auto"}}
    if draw(st.booleans()):
        over["steps_per_print"] = draw(st.sampled_from(["auto", 10]))
    world_size, micro, accumulation = draw(st.integers(1, 32)), draw(st.integers(1, 8)), draw(st.integers(1, 8))
    batch = draw(
        st.sampled_from(
            [
                BatchRequest(),
                BatchRequest(micro=micro),
                BatchRequest(micro=micro, accumulation=accumulation),
                BatchRequest(global_=micro * accumulation * world_size, micro=micro),
                BatchRequest(global_=micro * accumulation * world_size),
            ]
        )
    )
    wanted = _wanted(
        world_size=world_size,
        batch=batch,
        dtype=draw(st.sampled_from(["bf16", "fp16", "fp32"])),
        max_grad_norm=draw(st.sampled_from([0, 0.5, 1.0])),
        weight_decay=draw(st.sampled_from([0.0, 0.1])),
        accelerator=draw(st.sampled_from(["cuda", "cpu"])),
        checkpoint_local_storage=draw(st.booleans()),
    )
    model = draw(st.none() | st.integers(1, 16384).map(_model))
    return name, over, wanted, model


@given(_requests())
def test_what_we_render_the_real_library_accepts(request_):
    """A rendered configuration has no "auto", is JSON, and DeepSpeed's own class reads the same batch from it."""
    name, over, wanted, model = request_
    rendered = render_deepspeed(read_config(name), overrides_layer(over), model=model, wanted=wanted)
    text = json.dumps(rendered.config, allow_nan=False)
    assert "auto" not in text
    theirs = _library_config(json.loads(text), wanted.world_size)
    assert theirs.train_batch_size == rendered.batch.global_
    assert theirs.train_micro_batch_size_per_gpu == rendered.batch.micro
    assert theirs.gradient_accumulation_steps == rendered.batch.accumulation
    assert theirs.bfloat16_config.enabled == (wanted.dtype == "bf16")
    assert theirs.float16_config.enabled == (wanted.dtype == "fp16")
    assert theirs.gradient_clipping == wanted.max_grad_norm
    assert theirs.zero_optimization_stage == int(name[4])


def test_the_real_library_refuses_a_batch_that_does_not_hold():
    """The check above has teeth: the library does look at the world size."""
    with pytest.raises(AssertionError, match="train_batch_size is not equal"):
        _library_config(_render("zero3").config, world_size=3)
