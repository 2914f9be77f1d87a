"""What is seen before a launch, and how soon: false alarms, refused launches, and raw `deepspeed` on the same faults.

    python bench/check_faults.py [healthy] [launch] [raw]      all three without a word; needs root (see tests/lab)

healthy: 20 checks of a healthy cluster of six hosts; every finding is a false alarm.
launch:  a launch on each fault of level fail; exit code and seconds until it has refused.
raw:     `deepspeed` over pdsh on three of them, with a program that adds one number over all ranks; ended at 120 s.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.lab.lab import Lab  # noqa: E402
from tests.lab.life import default_shares  # noqa: E402
from tests.lab.model import LabOptions  # noqa: E402
from tests.launch import faults  # noqa: E402
from tests.launch.faults import HOSTFILE, RUN_FILE, Fault, check  # noqa: E402
from tests.launch.launchlab import write_sums  # noqa: E402

NODES = [f"node{number}" for number in range(1, 7)]
RUN = "/root/run.yaml"
RAW_S = 120
REFUSED = (
    "changed host key",
    "unknown host key",
    "sshd stopped",
    "host off",
    "black hole",
    "firewall that lets only ssh through",
    "hosts cut apart, seen from one",
    "truncated shard",
    "full disk",
    "working folder noexec",
    "no compiler",
    "other torch",
    "no trl",
)
RAW = ("sshd stopped", "firewall that lets only ssh through", "hosts cut apart, seen from one")
PROGRAM = """\
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
one = torch.ones(1); dist.all_reduce(one); print("sum", one.item(), flush=True)
"""


def make_lab(here: Path) -> Lab:
    """Six hosts with model and data, as in the tests."""
    from llmtrain.train.tinymodel import write_tiny_model

    write_tiny_model(here / "model")
    write_sums(here / "data.jsonl", 64)
    lab = Lab.create(6, LabOptions(shares=(*default_shares(), faults.SOURCE)))
    for host in lab.names:
        restore(lab, here, host)
    lab.write("head", HOSTFILE, "".join(f"{node} slots=1\n" for node in NODES))
    lab.write("head", RUN, RUN_FILE)
    lab.write("head", "/root/sum.py", PROGRAM)
    for node in NODES:
        lab.write(node, "/root/sum.py", PROGRAM)
    return lab


def restore(lab: Lab, here: Path, host: str) -> None:
    """Model and data at their place."""
    home = lab.state.disk(host) / "root"
    shutil.rmtree(home / "model", ignore_errors=True)
    shutil.copytree(here / "model", home / "model")
    shutil.copy(here / "data.jsonl", home / "data.jsonl")


def healthy(lab: Lab) -> None:
    """Checks of a cluster on which nothing is wrong."""
    seconds, alarms = [], []
    for _ in range(20):
        begun = time.monotonic()
        alarms += check(lab, RUN)["findings"]
        seconds.append(time.monotonic() - begun)
    print(f"healthy: {len(alarms)} findings in 20 checks, median {statistics.median(seconds):.1f} s", flush=True)
    for one in alarms:
        print(f"  {one}")


def pick(names: tuple[str, ...]) -> list[Fault]:
    """Faults by name."""
    tables = (faults.REACH, faults.NETWORK, faults.FILES, faults.MACHINE, faults.SOFTWARE)
    by_name = {fault.name: fault for table in tables for fault in table}
    return [by_name[name] for name in names]


def launches(lab: Lab, here: Path) -> None:
    """Launches that must be refused."""
    known = lab.read("head", "/root/.ssh/known_hosts")
    for fault in pick(REFUSED):
        lab.run("head", ["rm", "-f", "/root/.cache/llmtrain/passes.json"])
        fault.make(lab)
        argv = [sys.executable, "-c", faults.MAIN, "launch", RUN, "--json"]
        begun = time.monotonic()
        done = lab.run("head", argv, env={"PYTHONPATH": faults.SOURCE}, check=False, timeout=120, cwd="/root")
        seconds = time.monotonic() - begun
        said = next((line for line in done.stderr.splitlines() if line.startswith("error:")), "")
        print(f"launch: {fault.name}: exit {done.returncode} in {seconds:.1f} s  {said[:110]}", flush=True)
        fault.heal(lab)
        restore(lab, here, fault.host)
        lab.write("head", "/root/.ssh/known_hosts", known)


def raw(lab: Lab) -> None:
    """DeepSpeed's own launcher."""
    for fault in [None, *pick(RAW)]:
        if fault is not None:
            fault.make(lab)
        words = f"--hostfile {HOSTFILE} --master_addr 10.77.0.1 --master_port 29512 /root/sum.py"
        begun = time.monotonic()
        process = lab.popen(
            "head",
            ["bash", "-c", f"timeout -s KILL {RAW_S} {Path(sys.executable).parent}/deepspeed {words} 2>&1"],
            env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "DS_ACCELERATOR": "cpu"},
            cwd="/root",
            stdout=subprocess.PIPE,
        )
        out, _ = process.communicate()
        seconds = time.monotonic() - begun
        name = fault.name if fault else "nothing wrong"
        last = [line for line in str(out).splitlines() if line.strip()][-1:]
        end = "did not end" if seconds >= RAW_S - 1 else f"exit {process.returncode} in {seconds:.1f} s"
        print(f"deepspeed: {name}: {end}; last words: {(last or [''])[0][:140]}", flush=True)
        for node in NODES:
            lab.run(node, ["pkill", "-KILL", "-f", "sum.py"], check=False)
        if fault is not None:
            fault.heal(lab)


def main() -> None:
    """What is asked for."""
    words = sys.argv[1:] or ["healthy", "launch", "raw"]
    with tempfile.TemporaryDirectory() as folder, make_lab(Path(folder)) as lab:
        if "healthy" in words:
            healthy(lab)
        if "launch" in words:
            launches(lab, Path(folder))
        if "raw" in words:
            raw(lab)


if __name__ == "__main__":
    main()
