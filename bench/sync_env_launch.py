"""From a host with nothing but sshd and python3 to training: `sync-env`, then `launch`, with a real environment.

    python bench/sync_env_launch.py [--nodes 2] [--ask]

Needs root. The hosts are those of the lab; only the head sees the environment this runs in (torch, DeepSpeed,
transformers, its interpreter and this checkout). `--ask` leaves sync-env out: `launch --yes` brings the environment.
Prints one JSON line per step.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "src"))

from tests.lab.lab import Lab  # noqa: E402
from tests.lab.life import default_shares  # noqa: E402
from tests.lab.model import LabOptions  # noqa: E402
from tests.launch.launchlab import write_sums  # noqa: E402
from tests.opcache import build_ops  # noqa: E402

from llmtrain.cluster.probes import ops_name  # noqa: E402
from llmtrain.train.tinymodel import write_tiny_model  # noqa: E402

RUN = f"""\
model: {{path: /root/model, dtype: fp32}}
data: {{path: /root/data.jsonl, max_length: 64}}
batch: {{micro: 1, accumulation: 1}}
training: {{max_steps: 3, loader_workers: 0}}
env: {{OMP_NUM_THREADS: 1}}
environment: {sys.prefix}
hosts: hostfile
"""


def bare(lab: Lab, node: str) -> dict:
    """What a host has that could train."""
    script = "command -v python3; python3 -V; python3 -c 'import torch' 2>&1 | tail -1; which sshd"
    seen = lab.run(node, ["sh", "-c", script], check=False).stdout.split("\n")
    paths = (sys.prefix, sys.base_prefix, str(ROOT))
    return {"has": seen, "prefixes": [lab.run(node, ["test", "-e", one], check=False).returncode == 0 for one in paths]}


def timed(lab: Lab, name: str, *argv: str) -> dict:
    """One command of the head: its JSON document and seconds."""
    begun = time.monotonic()
    command = [sys.executable, "-m", "llmtrain.cli", *argv, "--json"]
    done = lab.run("head", command, cwd="/root/run", env={"PYTHONPATH": str(ROOT / "src")}, timeout=500, check=False)
    seconds = time.monotonic() - begun
    sys.stderr.write(done.stderr)
    document = json.loads(done.stdout) if done.stdout.strip() else {}
    print(json.dumps({"step": name, "code": done.returncode, "seconds": round(seconds, 1)}), flush=True)
    return document


def prepare(lab: Lab) -> None:
    """Model, data and compiled operations on the head."""
    disk = lab.state.disk("head")
    write_tiny_model(disk / "root/model")
    write_sums(disk / "root/data.jsonl", 64)
    done = subprocess.run([sys.executable, "-c", VERSIONS], capture_output=True, text=True, check=True)
    python, packages = json.loads(done.stdout)
    name = ops_name(python, packages, f"{sys.prefix}/bin/python")
    shutil.copytree(build_ops(), disk / "root/.llmtrain/ops" / name)
    lab.write("head", "/root/run/hostfile", "".join(f"{node} slots=1\n" for node in lab.nodes))
    lab.write("head", "/root/run/llmtrain.yaml", RUN)


VERSIONS = (
    "import json, platform; from importlib.metadata import version;"
    "print(json.dumps([platform.python_version(), {n: version(n) for n in ('torch', 'deepspeed')}]))"
)


def main() -> None:
    """All steps."""
    nodes = int(sys.argv[sys.argv.index("--nodes") + 1]) if "--nodes" in sys.argv else 2
    options = LabOptions(shares=(), head_shares=default_shares())
    with Lab.create(nodes, options) as lab:
        prepare(lab)
        print(json.dumps({"step": "before", **bare(lab, "node1")}), flush=True)
        if "--ask" in sys.argv:
            end = timed(lab, "launch --yes", "launch", "--config", "zero3-offload", "--yes")
        else:
            first = timed(lab, "sync-env", "sync-env", "--ops")
            keys = ("head_bytes_sent", "transfer_seconds", "seconds", "tree_bytes", "files", "hosts")
            print(json.dumps({key: first.get(key) for key in keys}), flush=True)
            timed(lab, "sync-env again", "sync-env", "--ops")
            end = timed(lab, "launch", "launch", "--config", "zero3-offload")
        print(json.dumps({key: end.get(key) for key in ("ok", "reason", "last_step", "final_loss")}), flush=True)


if __name__ == "__main__":
    main()
