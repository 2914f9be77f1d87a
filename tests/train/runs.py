"""Make a run.json, run it under DeepSpeed's launcher, read what it left."""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.opcache import build_ops

from llmtrain.train.guardian import remove_buffers

HERE = Path(__file__).parent


def zero(stage, *, offload=False):
    """The ZeRO part of a DeepSpeed configuration; the threshold makes ZeRO-3 divide even tiny parameters."""
    part = {"stage": stage}
    if stage == 3:
        part |= {"stage3_param_persistence_threshold": 10, "stage3_gather_16bit_weights_on_model_save": True}
    if offload:
        device = {"device": "cpu", "pin_memory": False}
        part |= {"offload_optimizer": device, "offload_param": device}
    return part


def make_run(
    folder,
    model,
    data,
    *,
    world=2,
    micro=2,
    accumulation=1,
    zero_part=None,
    dtype="fp32",
    data_part=None,
    lora=None,
    attention="sdpa",
    **training,
):
    """Write a run.json into a new folder; returns its path."""
    folder.mkdir(parents=True)
    batch = {"global": micro * accumulation * world, "micro": micro, "accumulation": accumulation}
    document = {
        "schema": 1,
        "run_id": folder.name,
        "host": "here",
        "run_dir": str(folder),
        "world_size": world,
        "ranks": list(range(world)),
        "task": "finetune",
        "model": {"path": str(model), "dtype": dtype, "attention": attention, "trust_remote_code": False},
        "data": {
            "path": str(data),
            "format": "messages",
            "max_length": 128,
            "packing": False,
            "eval": None,
            "chat_template": None,
            **(data_part or {}),
        },
        "batch": batch,
        "training": {
            "max_steps": 4,
            "epochs": None,
            "learning_rate": 1e-3,
            "schedule": "cosine",
            "warmup_steps": None,
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
            "seed": 42,
            "save_steps": None,
            "eval_steps": None,
            "gradient_checkpointing": True,
            "resume": None,
            "loader_workers": 0,
            **training,
        },
        "deepspeed": {
            "train_batch_size": batch["global"],
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": 1.0,
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": dtype == "bf16"},
            "zero_optimization": zero_part or zero(3),
        },
        "lora": lora,
        "threads": 1,
        "cores": {},
        "output": str(folder / "output"),
        "checkpoints": str(folder / "checkpoints"),
        "checkpoint": {"keep": 2, "save_minutes": 0, "copies": False},
        "grace_s": 10,
    }
    path = folder / "run.json"
    path.write_text(json.dumps(document))
    return path


@dataclass(frozen=True)
class Finished:
    """What a run left behind."""

    dir: Path

    def read(self, name):
        return json.loads((self.dir / name).read_text())

    @property
    def metrics(self):
        return [json.loads(line) for line in (self.dir / "metrics.jsonl").read_text().splitlines()]

    @property
    def losses(self):
        return [line["loss"] for line in self.metrics if "loss" in line]

    def done(self, rank=0):
        return self.read(f"done/{rank}.json")


def launch(world, run_files, *, timeout=900):
    """Run each file in turn on *world* ranks under DeepSpeed's own launcher; returns the completed process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    slots = base64.urlsafe_b64encode(json.dumps({"localhost": list(range(world))}).encode()).decode()
    command = [sys.executable, "-m", "deepspeed.launcher.launch", f"--world_info={slots}", "--no_local_rank"]
    command += ["--master_addr=127.0.0.1", f"--master_port={port}", str(HERE / "rankworker.py"), *map(str, run_files)]
    env = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "LOCAL_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
        "TORCH_EXTENSIONS_DIR": str(build_ops()),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # ninja, where DeepSpeed's ops must be built
    }
    try:
        return subprocess.run(  # noqa: PLW1510 - its exit code is what is tested
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout
        )
    finally:
        remove_buffers(f"127.0.0.1_{port}")
