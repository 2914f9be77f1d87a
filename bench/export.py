"""What an export costs: memory and seconds, beside DeepSpeed's own conversion of the same ZeRO-3 checkpoint.

    python bench/export.py MODEL_DIR

One step of a real training on three ranks of this machine, saved; then its checkpoint becomes a model by
`train/extract` and `train/assemble`, and by `deepspeed.utils.zero_to_fp32`. Memory is the largest resident set less
that of a process that imports the same and does nothing.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.train.runs import launch, make_run  # noqa: E402

WATCHED = (
    "import json, resource, runpy, sys\n"
    "sys.argv = sys.argv[1:]\n"
    "name = sys.argv[0]\n"
    "try: runpy.run_module(name, run_name='__main__', alter_sys=True) if name != '-' else exec(sys.argv[1])\n"
    "except SystemExit as end: assert not end.code\n"
    "print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024), file=sys.stderr)"
)
IDLE = "import torch, transformers, deepspeed"
THEIRS = (
    "from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as convert\n"
    "convert({folder!r}, {out!r}, safe_serialization=False)"  # tied weights: it writes no safetensors of them
)


def measure(*argv: str, stdin: str = "") -> tuple[float, float]:
    """Seconds and MiB of one process."""
    begun = time.monotonic()
    env = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, *argv], input=stdin, capture_output=True, text=True, check=True, env=env
    )
    return time.monotonic() - begun, int(done.stderr.strip().splitlines()[-1]) / 2**20


def main(model: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "chat.jsonl"
        turns = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "This one."}]
        data.write_text((json.dumps({"messages": turns}) + "\n") * 12)
        run = make_run(folder / "run", model, data, world=3, micro=1, dtype="bf16", max_steps=1, save_steps=1)
        launch(3, [run])
        (checkpoint,) = (folder / "run/checkpoints").glob("step-*")
        _, idle = measure("-", IDLE)
        rows = {}
        words = (str(checkpoint), str(folder / "parts"), "--dtype", "bf16", "--ranks", "0,1,2")
        rows["extract"] = measure("llmtrain.train.extract", *words)
        order = {"run": str(run), "checkpoint": str(checkpoint), "parts": [str(folder / "parts")], "dtype": "bf16"}
        begun = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "llmtrain.train.assemble"],
            input=json.dumps({**order, "output": str(folder / "model")}),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        said = json.loads(done.stdout.strip().splitlines()[-1])
        rows["assemble, loaded once besides"] = (time.monotonic() - begun, said["peak_rss_bytes"] / 2**20)
        script = THEIRS.format(folder=str(checkpoint), out=str(folder / "theirs"))
        rows["zero_to_fp32 (pickle of fp32, no configuration)"] = measure("-", script)
        shard = max(size for name, (size, _) in said["files"].items() if name.endswith(".safetensors")) / 2**20
        print(f"largest shard written: {shard:.0f} MiB; imports alone: {idle:.0f} MiB")
        for what, (seconds, peak) in rows.items():
            over = max(0.0, peak - idle)
            print(f"{what}: {seconds:.1f} s, {peak:.0f} MiB, {over:.0f} over the imports = {over / shard:.2f} shards")
        print(f"this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MiB")


if __name__ == "__main__":
    main(sys.argv[1])
