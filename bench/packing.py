"""Useful tokens a second on short mixed data: packed rows against padding, through the real training.

    python bench/packing.py MODEL_DIR [STEPS]

One process on this machine's processors, ZeRO-2, fp32, SDPA: padded batches of 4 examples against one packed row of 256
tokens, which holds about as many. Four of them make a step, so that the optimizer's share, the same for both and large
on one processor, does not hide the difference. Useful tokens are those of examples.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.train.runs import Finished, launch, make_run, zero  # noqa: E402


def write_data(path: Path) -> None:
    """Questions with answers of very different lengths."""
    draw = random.Random(0)
    words = [
        "host",
        "rank",
        "shard",
        "gradient",
        "adapter",
        "network",
        "disk",
        "batch",
        "loss",
        "step",
        "memory",
        "tensor",
    ]
    with path.open("w") as file:
        for _ in range(400):
            answer = " ".join(draw.choices(words, k=int(draw.lognormvariate(3.2, 0.9)) + 1))
            turns = [{"role": "user", "content": "Explain."}, {"role": "assistant", "content": answer + "."}]
            file.write(json.dumps({"messages": turns}) + "\n")


def main(model: str, steps: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "chat.jsonl")
        write_data(data)
        options = {"world": 1, "zero_part": zero(2), "max_steps": steps, "learning_rate": 1e-5}
        runs = {
            name: make_run(
                Path(folder, name),
                model,
                data,
                micro=micro,
                accumulation=4,
                data_part={"packing": packed, "max_length": 256},
                **options,
            )
            for name, micro, packed in (("padding", 4, False), ("packing", 1, True))
        }
        ended = launch(1, list(runs.values()))
        print("\n".join(line for line in ended.stdout.splitlines() if line.startswith("packing:")))
        rates = {}
        for name, file in runs.items():
            lines = [line for line in Finished(file.parent).metrics if "loss" in line][1:]
            rates[name] = statistics.median(line["tokens_per_s"] for line in lines)
            print(f"{name}: median {rates[name]:.0f} useful tokens/s over {len(lines)} steps")
        print(f"ratio {rates['packing'] / rates['padding']:.2f}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 4)
