"""How long `--help` takes: `llmtrain` against `deepspeed`, the program a user would otherwise start.

    python bench/startup.py [ROUNDS]

Both from the environment of this interpreter, in turn; medians.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path


def measure(name: str) -> float:
    begun = time.monotonic()
    subprocess.run([Path(sys.executable).with_name(name), "--help"], check=False, capture_output=True)
    return time.monotonic() - begun


def main(rounds: int) -> None:
    times: dict[str, list[float]] = {"llmtrain": [], "deepspeed": []}
    for _ in range(rounds):
        for name, found in times.items():
            found.append(measure(name))
    medians = {name: statistics.median(found) for name, found in times.items()}
    for name, found in times.items():
        print(f"{name:10} median {medians[name]:.3f} s  ({min(found):.3f} to {max(found):.3f}, {rounds} rounds)")
    print(f"ratio      {medians['llmtrain'] / medians['deepspeed']:.3f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 7)
