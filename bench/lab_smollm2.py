"""A real model over three hosts: SmolLM2-135M, private disks, real sshd and pdsh, ZeRO-3 with CPU offload.

    python bench/lab_smollm2.py MODEL_DIR OPS_DIR

Runs the literal command on the lab, prints the loss of every step, and the tuned model's answer on this machine.
OPS_DIR is a TORCH_EXTENSIONS_DIR with DeepSpeed's compiled kernels; each host gets a copy. Needs root.
"""

from __future__ import annotations

import itertools
import json
import shutil
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.lab import Lab, LabOptions  # noqa: E402
from tests.lab.fixtures import default_shares  # noqa: E402

from llmtrain.train.answer import answer  # noqa: E402

RUN_FILE = """
model: {path: /root/model}
data: {path: data.jsonl, max_length: 128}
output: tuned
batch: {global: 12, micro: 4}
training: {max_steps: 16, learning_rate: 5e-4, warmup_steps: 2, gradient_checkpointing: false}
env: {OMP_NUM_THREADS: 1, TORCH_EXTENSIONS_DIR: /root/ops}
"""
EXAMPLES = 48


def main(model: str, ops: str) -> None:
    options = LabOptions(
        shares=default_shares(), private_copies=((ops, "/root/ops"),), loopback_name=True, docker0=True
    )
    rows = (ROOT / "examples/data/multihost-qa.jsonl").read_text().splitlines()[:EXAMPLES]
    question = json.loads(rows[0])["messages"][-2]["content"]
    with Lab.create(3, options) as lab:
        shutil.copytree(model, lab.state.disk("head") / "root/model")
        lab.write("head", "/root/data.jsonl", "\n".join(rows) + "\n")
        lab.write("head", "/root/hostfile", "node1 slots=1\nnode2 slots=1\nnode3 slots=1\n")
        lab.write("head", "/root/llmtrain.yaml", RUN_FILE)
        command = [
            str(Path(sys.executable).parent / "llmtrain"),
            "launch",
            "--hosts",
            "hostfile",
            "--config",
            "zero3-offload",
        ]
        begun = time.monotonic()
        done = lab.run("head", [*command, "--json"], timeout=1800, check=False)
        seconds = time.monotonic() - begun
        print(done.stderr)
        outcome = json.loads(done.stdout)
        metrics = [json.loads(line) for line in lab.read("head", outcome["run_dir"] + "/metrics.jsonl").splitlines()]
        tuned = lab.state.root / "tuned"
        shutil.copytree(lab.state.disk("head") / "root/tuned", tuned)
        losses = [row["loss"] for row in metrics if "loss" in row]
        for step, loss in enumerate(losses, start=1):
            print(f"step {step:3}  loss {loss:.3f}")
        stamps = [row["time"] for row in metrics if "loss" in row]
        pauses = [after - before for before, after in itertools.pairwise(stamps)]
        print(f"exit {outcome['exit_code']}, {seconds:.0f} s in all, median {statistics.median(pauses):.1f} s a step")
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, ratio {losses[-1] / losses[0]:.2f}")
        print(f"{question}\n  before: {answer(Path(model), question)}\n  after:  {answer(tuned, question)}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
