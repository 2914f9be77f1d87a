"""Run the commands of docs/day-one.md and docs/day-thirty.md as they stand there, on a head and two hosts of the lab.

    python bench/days.py [PAGE...]

Too long for the suite: a training for each launch of the pages. Stops at the first command that fails. Needs root.
"""

from __future__ import annotations

import platform
import re
import sys
import time
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.lab import Lab, LabOptions  # noqa: E402
from tests.lab.fixtures import default_shares  # noqa: E402
from tests.launch.launchlab import write_sums  # noqa: E402
from tests.opcache import build_ops  # noqa: E402

from llmtrain.cluster.probes import ops_name  # noqa: E402
from llmtrain.train.tinymodel import write_tiny_model  # noqa: E402

PAGES = ("day-one.md", "day-thirty.md")


def read_blocks(page: str) -> list[str]:
    """The shell blocks of a page."""
    return re.findall(r"^```sh\n(.*?)^```$", (ROOT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)


def main(pages: list[str]) -> None:
    packages = {name: version(name) for name in ("torch", "deepspeed")}
    ops = f"/root/.llmtrain/ops/{ops_name(platform.python_version(), packages, sys.executable)}"
    options = LabOptions(shares=default_shares(), loopback_name=True, private_copies=((str(build_ops()), ops),))
    path = f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
    with Lab.create(2, options) as lab:
        disk = lab.state.disk("head")
        write_tiny_model(disk / "srv/model")
        (disk / "root/days").mkdir()
        write_sums(disk / "root/days/chat.jsonl", 24)
        for block in [block for page in pages for block in read_blocks(page)]:
            begun = time.monotonic()
            script = ["bash", "-ec", "exec 2>&1\n" + block]
            done = lab.run("head", script, cwd="/root/days", env={"PATH": path}, timeout=600, check=False)
            print(
                f"--- {time.monotonic() - begun:.0f} s, exit {done.returncode}\n{block}{done.stdout[-1500:]}",
                flush=True,
            )
            if done.returncode:
                raise SystemExit(1)
            if "llmtrain.yaml <<" in block:  # two ranks share a small machine's processors
                lab.run("head", ["sh", "-c", "echo 'env: {OMP_NUM_THREADS: 1}' >> llmtrain.yaml"], cwd="/root/days")


if __name__ == "__main__":
    main(sys.argv[1:] or list(PAGES))
