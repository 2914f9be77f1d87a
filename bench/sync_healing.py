"""What a failing host costs the others: a sync in which one is lost half way, beside the undisturbed one.

    python bench/sync_healing.py [ROUNDS]

Four hosts of the lab, cables of 100 Mbit/s, 256 MiB; the second host's agent is killed, or it loses its power, or it
freezes, when it has half. Transfer seconds of the hosts that are left, medians, as ratio to the undisturbed ones. Needs
root.
"""

from __future__ import annotations

import contextlib
import json
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.lab.lab import Lab  # noqa: E402
from tests.lab.life import default_shares  # noqa: E402
from tests.lab.model import LabError, LabOptions  # noqa: E402

PLACE = "/data/bench"
BYTES = 256 << 20
VICTIM = "node2"
FAULTS = ("undisturbed", "agent killed", "power cut", "frozen")


def received(lab: Lab) -> int:
    """Bytes that came in over the victim's cable."""
    return int(lab.read(VICTIM, "/sys/class/net/eth0/statistics/rx_bytes"))


def strike(lab: Lab, fault: str) -> None:
    """Make the fault."""
    if fault == "agent killed":
        for process in lab.processes(VICTIM):
            if "zlib.decompress" in " ".join(process.argv):
                with contextlib.suppress(LabError):  # one of them is the shell that waits for the other
                    lab.signal(VICTIM, process.pid, signal.SIGKILL)
    elif fault == "power cut":
        lab.power_cut(VICTIM)
    elif fault == "frozen":
        lab.freeze(VICTIM)


def heal(lab: Lab, fault: str) -> None:
    """Undo it."""
    if fault == "power cut":
        lab.boot(VICTIM)
        lab.rate(VICTIM, "100mbit")
    elif fault == "frozen":
        lab.thaw(VICTIM)


def run(lab: Lab, fault: str) -> float:
    """Transfer seconds of one sync."""
    for node in lab.nodes:
        lab.run(node, ["sh", "-c", "rm -rf /data/bench /data/.bench.llmtrain; mkdir -p /data"])
    before = received(lab)
    command = [sys.executable, "-m", "llmtrain.cli", "sync", PLACE, "--hosts", "/root/hosts", "--json"]
    env = {"PYTHONPATH": str(ROOT / "src")}
    process = lab.popen("head", command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    if fault != FAULTS[0]:
        while received(lab) - before < BYTES / 2:
            time.sleep(0.05)
        strike(lab, fault)
    out, _ = process.communicate(timeout=300)
    heal(lab, fault)
    report = json.loads(out)
    wanted = [node for node in lab.nodes if fault == FAULTS[0] or node != VICTIM]
    assert [host["host"] for host in report["hosts"] if host["ok"]] == wanted, report
    return float(report["transfer_seconds"])


def main(rounds: int) -> None:
    """All faults in turn, round by round."""
    times: dict[str, list[float]] = {fault: [] for fault in FAULTS}
    with Lab.create(4, LabOptions(shares=default_shares(), shm_mb=1024)) as lab:
        lab.write("head", "/root/hosts", "".join(f"{name} slots=1\n" for name in lab.nodes))
        lab.run("head", ["bash", "-c", f"mkdir -p /data; head -c {BYTES} /dev/urandom > {PLACE}"])
        for host in lab.names:
            lab.rate(host, "100mbit")
        for _ in range(rounds):
            for fault, found in times.items():
                found.append(run(lab, fault))
                print(f"{fault}: {found[-1]:.2f} s", flush=True)
    usual = statistics.median(times[FAULTS[0]])
    for fault, found in times.items():
        print(f"{fault:12} median {statistics.median(found):.2f} s, {statistics.median(found) / usual:.2f} x")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
