"""What llmtrain adds to a training: one script over two hosts of the lab, started by raw `deepspeed` and by llmtrain.

    python bench/overhead.py [ROUNDS]

The script trains a small network with deepspeed.initialize (ZeRO-2) and needs nothing else. Raw `deepspeed` finds it in
place on both hosts; llmtrain sends it, checks the hosts, watches, fetches the result and verifies the end. Wall time
of the whole command, in turn; medians. Needs root.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.lab import Lab, LabOptions  # noqa: E402
from tests.lab.fixtures import default_shares  # noqa: E402
from tests.opcache import build_ops  # noqa: E402

BIN = Path(sys.executable).parent
SCRIPT = """
import json, os, sys, deepspeed, torch
config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
          "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": 2}}
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 1))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for step in range(20):
    loss = engine(torch.ones(1, 256)).square().mean()
    engine.backward(loss)
    engine.step()
print("loss", float(loss), torch.distributed.get_world_size(), flush=True)
if os.environ["RANK"] == "0":
    os.makedirs(sys.argv[-1], exist_ok=True)
    torch.save(model.state_dict(), sys.argv[-1] + "/model.pt")
"""
HOSTS = "node1 slots=1\nnode2 slots=1\n"


def main(rounds: int) -> None:
    raw = [str(BIN / "deepspeed"), "--hostfile", "hostfile", "--master_addr", "", "train.py", "/root/raw"]
    ours = [str(BIN / "llmtrain"), "launch", "--hosts", "hostfile", "--config", "zero2"]
    ours += ["--set", "env.OMP_NUM_THREADS=1"]
    ours += ["--set", "env.TORCH_EXTENSIONS_DIR=/root/ops"]
    path = f"{BIN}:/usr/sbin:/usr/bin:/sbin:/bin"
    ranks = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TORCH_EXTENSIONS_DIR": "/root/ops", "PATH": path}
    options = LabOptions(shares=default_shares(), private_copies=((str(build_ops()), "/root/ops"),))
    with Lab.create(2, options) as lab:
        raw[4] = lab.address("node1")
        for host in lab.names:
            lab.write(host, "/root/work/train.py", SCRIPT)
            lab.write(host, "/root/.deepspeed_env", "".join(f"{key}={value}\n" for key, value in ranks.items()))
        lab.write("head", "/root/work/hostfile", HOSTS)
        times: dict[str, list[float]] = {"deepspeed": [], "llmtrain": []}
        for number in range(rounds + 1):
            own = [*ours, "--output", f"/root/own-{number}", "--", "train.py", "{output}"]
            for name, argv in (("deepspeed", raw), ("llmtrain", own)):
                begun = time.monotonic()
                done = lab.run("head", argv, cwd="/root/work", env={"PATH": path}, timeout=100, check=False)
                seconds = time.monotonic() - begun
                if done.returncode:
                    raise SystemExit(f"{name}: {done.stdout[-3000:]}\n{done.stderr[-3000:]}")
                print(f"{name} {seconds:.2f} s{'' if number else ' (not counted: the first)'}", flush=True)
                if number:
                    times[name].append(seconds)
                if number == rounds and name == "llmtrain":
                    print(done.stderr)
        before, after = (statistics.median(times[name]) for name in ("deepspeed", "llmtrain"))
        print(
            f"medians: deepspeed {before:.2f} s, llmtrain {after:.2f} s:"
            f" {after - before:+.2f} s, ratio {after / before:.2f}"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
