from __future__ import annotations

import base64
import json
import re

import pytest
from tests.cluster.hosts import gpu
from tests.launch.jobs import write_job

from llmtrain.errors import InputFileError, PreflightError
from llmtrain.launch.job import Selection
from llmtrain.launch.prepare import plan_launch
from llmtrain.launch.rundir import RunDir

ENVIRON = {
    "HOME": "/home/me",
    "PATH": "/usr/bin",
    "SSH_AUTH_SOCK": "/run/agent",
    "WANDB_API_KEY": "hush",
    "LD_PRELOAD": "x",
}


def _plan(folder, **options):
    job, contact = write_job(folder, **options)
    return plan_launch(job, contact, "run-1", ENVIRON)


def _file(plan, host, path):
    (text,) = [file.text for one in plan.hosts if one.name == host for file in one.files if file.path == path]
    return text


def test_the_same_input_gives_the_same_plan(tmp_path):
    """A plan is a pure value: planned twice it is equal, so that a dry run shows what a run does."""
    assert _plan(tmp_path) == _plan(tmp_path)


def test_ranks_follow_the_hostfile(tmp_path):
    """Ranks, slots and world size are those of the hostfile, in its order."""
    plan = _plan(tmp_path)
    assert [(host.name, host.slots, host.ranks) for host in plan.hosts] == [
        ("gpu004", (0, 1), (0, 1)),
        ("gpu006", (0,), (2,)),
    ]
    assert plan.world_size == 3
    assert json.loads(_file(plan, "gpu006", "run.json"))["ranks"] == [2]


def test_the_command_is_explicit_and_safe(tmp_path):
    """DeepSpeed is told everything, and only plain paths are its user arguments."""
    plan = _plan(tmp_path)
    argv = plan.argv(RunDir(tmp_path / "runs/run-1"))
    text = " ".join(argv)
    for option in (
        "--force_multi",
        "--no_ssh_check",
        "--no_local_rank",
        "--launcher pdsh",
        "--include gpu004:0,1@gpu006:0",
    ):
        assert option in text
    assert f"--master_addr 10.0.0.1 --master_port {plan.master_port}" in text
    script, argument = argv[-2:]
    assert script == f"{plan.run_dir}/code/llmtrain/train/entry.py"
    assert argument == f"{plan.run_dir}/run.json"
    assert re.fullmatch(r"[A-Za-z0-9_./-]+", script + argument + argv[3])


def test_the_launchers_environment_is_an_allow_list(tmp_path):
    """Nothing of our environment reaches the launcher but what ssh needs, and no .deepspeed_env is read."""
    env = _plan(tmp_path).env(RunDir(tmp_path / "runs/run-1"))
    assert "WANDB_API_KEY" not in env
    assert "LD_PRELOAD" not in env
    assert env["SSH_AUTH_SOCK"] == "/run/agent"
    assert env["PDSH_RCMD_TYPE"] == "ssh"
    assert env["DS_ENV_FILE"] == str(tmp_path / "runs/run-1/ds_env")
    assert env["PDSH_SSH_ARGS_APPEND"].startswith("-F /")
    assert env["PDSH_SSH_ARGS_APPEND"].endswith("/run-1/ssh_config")


def test_a_folder_with_a_space_does_not_break_pdsh(tmp_path):
    """Pdsh splits its ssh arguments at spaces, so a run folder with one gets the configuration past it."""
    folder = tmp_path / "a b"
    folder.mkdir()
    env = _plan(folder).env(RunDir(folder / "runs/run-1"))
    assert len(env["PDSH_SSH_ARGS_APPEND"].split()) == 2


def test_each_host_is_told_its_own_interface(tmp_path):
    """Interfaces differ between hosts; NCCL's is exact, since it would match prefixes."""
    env = json.loads(_file(_plan(tmp_path), "gpu004", "env.json"))["set"]
    assert env["NCCL_SOCKET_IFNAME"] == "=eth0"
    assert env["GLOO_SOCKET_IFNAME"] == "eth0"
    assert env["LLMTRAIN_RUN_ID"] == "run-1"


def test_the_users_environment_wins_and_is_named_private(tmp_path):
    """env: and --env win over our defaults; their names are marked so that no report shows their values."""
    plan = _plan(tmp_path, envs=["NCCL_DEBUG=INFO", "TOKEN=hush"])
    env = json.loads(_file(plan, "gpu004", "env.json"))["set"]
    assert (env["NCCL_DEBUG"], env["TOKEN"]) == ("INFO", "hush")
    assert plan.private_env == {"NCCL_DEBUG", "TOKEN"}
    assert "hush" not in _file(plan, "gpu004", "run.json")
    assert "hush" not in _file(plan, "gpu004", "bin/python")


def test_threads_and_cores_share_a_host(tmp_path):
    """Every rank of a host gets an equal, consecutive share of its processors."""
    run = json.loads(_file(_plan(tmp_path), "gpu004", "run.json"))
    assert run["threads"] == 4
    assert run["cores"] == {"0": [0, 1, 2, 3], "1": [4, 5, 6, 7]}


def test_more_ranks_than_processors_are_not_bound(tmp_path):
    """With fewer processors than ranks nothing is bound and each rank has one thread."""
    run = json.loads(_file(_plan(tmp_path, gpu004={"cpus": (0,)}), "gpu004", "run.json"))
    assert (run["threads"], run["cores"]) == (1, {})


def test_different_homes_get_one_path(tmp_path):
    """Where working folders differ, one path that is valid everywhere is used, and each host has its own behind it."""
    plan = _plan(tmp_path, gpu006={"node_dir": "/mnt/fast/llmtrain"})
    assert [host.own_dir for host in plan.hosts] == ["/home/user/.llmtrain/runs/run-1", "/mnt/fast/llmtrain/runs/run-1"]
    assert str(plan.run_dir) not in {host.own_dir for host in plan.hosts}
    assert str(plan.run_dir) in plan.runner_argv[-1]


def test_per_host_interpreter(tmp_path):
    """per_host gives one host another interpreter, behind the same stand-in."""
    plan = _plan(tmp_path, sets=["python=/opt/a/bin/python", "per_host.gpu006.python=/opt/b/bin/python"])
    assert [host.python for host in plan.hosts] == ["/opt/a/bin/python", "/opt/b/bin/python"]
    assert "/opt/b/bin/python" in _file(plan, "gpu006", "bin/python")
    assert json.loads(_file(plan, "gpu006", "env.json"))["path"] == ["/opt/b/bin"]


def test_slots_are_spelled_out(tmp_path):
    """A selection reaches DeepSpeed slot by slot, in the hostfile it is given and in its filter."""
    plan = _plan(tmp_path, selection=Selection(include="gpu004:1"))
    assert plan.head_files["hostfile"] == "gpu004 slots=2\n"
    assert "gpu004:1" in plan.runner_argv
    assert plan.world_size == 1


def test_gpus_before_ampere_get_fp16(tmp_path):
    """bf16 is chosen where every GPU has it, fp16 where one came before Ampere, each with its reason."""
    new = {"accelerators": (gpu("8.0"), gpu("8.0"))}
    old = {"accelerators": (gpu("7.0", "Tesla V100"),)}
    assert _plan(tmp_path, gpu004=new, gpu006=new).run["model"]["dtype"] == "bf16"
    plan = _plan(tmp_path, gpu004=new, gpu006=old)
    assert plan.run["model"]["dtype"] == "fp16"
    assert any("Tesla V100" in choice.reason for choice in plan.choices)


def test_mixed_hosts_with_and_without_gpu_are_refused(tmp_path):
    """A host without a GPU among hosts with GPUs is an error, not a slow run."""
    with pytest.raises(PreflightError) as caught:
        write_job(tmp_path, gpu004={"accelerators": (gpu(), gpu())})
    assert caught.value.where == "gpu006"


def test_length_is_bounded_by_the_model(tmp_path):
    """data.max_length never passes what the model was made for, and says so."""
    plan = _plan(tmp_path)
    assert plan.run["data"]["max_length"] == 64
    assert any(choice.key == "data.max_length" for choice in plan.choices)


def test_one_epoch_is_the_default(tmp_path):
    """Without steps or epochs the data is seen once; with both, the steps win and it is said."""
    assert _plan(tmp_path).run["training"]["epochs"] == 1.0
    plan = _plan(tmp_path, sets=["training.epochs=3", "training.max_steps=5"])
    assert any(choice.key == "training.max_steps" and "wins" in choice.reason for choice in plan.choices)


def test_nvme_swap_has_a_folder_of_the_run(tmp_path):
    """Two runs on one NVMe path do not share swap files, and the run's folder is known for removal."""
    path = "deepspeed.zero_optimization.offload_optimizer"
    plan = _plan(tmp_path, sets=[f"{path}.device=nvme", f"{path}.nvme_path=/nvme"])
    assert plan.scratch == ("/nvme/run-1",)


def test_options_about_the_meeting_point_win(tmp_path):
    """--master-addr and --master-port are taken as they are."""
    plan = _plan(tmp_path, selection=Selection(master_addr="10.9.9.9", master_port=25000))
    assert (plan.master_addr, plan.master_port) == ("10.9.9.9", 25000)


def test_faults_of_the_batch_are_found_before_any_host(tmp_path):
    """A global batch that does not divide is refused while the job is read."""
    with pytest.raises(InputFileError, match="does not divide"):
        write_job(tmp_path, sets=["batch.global=10", "batch.micro=1"])


def test_adapters_and_packing_reach_the_ranks(tmp_path):
    """lora.rank brings its alpha and a learning rate for adapters, and packing is passed on; both say so."""
    plan = _plan(tmp_path, sets=["data.packing=true", "lora.rank=8"])
    assert plan.run["lora"] == {"rank": 8, "alpha": 16.0, "dropout": 0.0, "targets": ()}
    assert plan.run["training"]["learning_rate"] == 2e-4
    assert plan.run["data"]["packing"] is True
    assert {"lora.rank", "data.packing"} <= {choice.key for choice in plan.choices}


def test_world_info_is_what_deepspeed_would_make(tmp_path):
    """DeepSpeed's own runner, given our hostfile and filter, numbers the ranks as the plan does."""
    from deepspeed.launcher import runner

    plan = _plan(tmp_path)
    path = tmp_path / "rendered"
    path.write_text(plan.head_files["hostfile"])
    include = plan.runner_argv[plan.runner_argv.index("--include") + 1]
    active = runner.parse_inclusion_exclusion(runner.fetch_hostfile(str(path)), include, "")
    info = json.loads(base64.urlsafe_b64decode(runner.encode_world_info(active)))
    assert info == {host.name: list(host.slots) for host in plan.hosts}
