"""N hosts for the time of one: the chain against one plain ssh copy, the scp loop, parallel rsync, and clush.

    python bench/sync_links.py [8:200:256 16:100:128 32:50:64] [--rounds 3] [--baselines] [--streams K] [--memory]

Each case is HOSTS:MBIT:MIB; 0 Mbit is an unlimited link. Hosts are those of the lab (root needed), every cable
limited in both directions. `--memory` puts the file into /dev/shm at both ends, so that no disk is measured. Prints
one JSON line per measurement and per case; medians of the rounds, baselines once.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.lab.lab import Lab  # noqa: E402
from tests.lab.life import default_shares  # noqa: E402
from tests.lab.model import LabOptions  # noqa: E402

FOLDER = "/dev/shm/bench" if "--memory" in sys.argv else "/root/bench"
PLACE = f"{FOLDER}/data"
GCM = "ssh -c aes128-gcm@openssh.com"


def timed(lab: Lab, command: str) -> float:
    """Seconds of a shell line on the head."""
    begun = time.monotonic()
    lab.run("head", ["bash", "-c", command], timeout=900)
    return time.monotonic() - begun


def clean(lab: Lab) -> None:
    """Nothing at the destination."""
    for node in lab.nodes:
        lab.run(node, ["sh", "-c", f"rm -rf {FOLDER}; mkdir {FOLDER}"])


def chain(lab: Lab) -> dict:
    """One sync; its own figures and the whole command."""
    clean(lab)
    command = [sys.executable, "-m", "llmtrain.cli", "sync", PLACE, "--hosts", "/root/hosts", "--json"]
    if "--streams" in sys.argv:
        command += ["--streams", sys.argv[sys.argv.index("--streams") + 1]]
    begun = time.monotonic()
    done = lab.run("head", command, env={"PYTHONPATH": str(ROOT / "src")}, timeout=600)
    whole = time.monotonic() - begun
    report = json.loads(done.stdout)
    kept = {"transfer": "transfer_seconds", "egress": "head_bytes_sent", "slow": "slow"}
    return {"whole": whole, **{name: report[key] for name, key in kept.items()}}


def single(lab: Lab) -> float:
    """One plain ssh copy to one host."""
    clean(lab)
    return timed(lab, f"{GCM} node1 'cat > {PLACE}' < {PLACE}")


def baselines(lab: Lab) -> dict[str, float]:
    """What a user would take instead."""
    found = {}
    clean(lab)
    found["scp loop"] = timed(lab, f"for n in {' '.join(lab.nodes)}; do scp -q {PLACE} $n:{PLACE}; done")
    clean(lab)
    found["parallel rsync"] = timed(
        lab, f"for n in {' '.join(lab.nodes)}; do rsync -aW -e '{GCM}' {PLACE} $n:{PLACE} & done; wait"
    )
    if lab.run("head", ["which", "clush"], check=False).returncode == 0:
        clean(lab)
        found["clush --copy"] = timed(lab, f"clush -w {','.join(lab.nodes)} --copy {PLACE} --dest {PLACE}")
    return found


def case(hosts: int, mbit: int, mib: int, rounds: int, *, with_baselines: bool) -> dict:
    """All figures of one size."""
    with Lab.create(hosts, LabOptions(shares=default_shares(), shm_mb=max(1024, 2 * mib + 256))) as lab:
        lab.write("head", "/root/hosts", "".join(f"{name} slots=1\n" for name in lab.nodes))
        lab.run("head", ["bash", "-c", f"mkdir {FOLDER}; head -c {mib}M /dev/urandom > {PLACE}"])
        for host in lab.names:
            lab.rate(host, f"{mbit}mbit" if mbit else None)
        chains, singles = [], []
        for _ in range(rounds):
            singles.append(single(lab))
            chains.append(chain(lab))
            print(json.dumps({"hosts": hosts, "single": singles[-1], **chains[-1]}), flush=True)
        result = {
            "hosts": hosts,
            "mbit": mbit,
            "mib": mib,
            "single_s": round(statistics.median(singles), 2),
            "chain_s": round(statistics.median(one["transfer"] for one in chains), 2),
            "whole_s": round(statistics.median(one["whole"] for one in chains), 2),
            "egress": round(max(one["egress"] for one in chains) / (mib << 20), 3),
        }
        result["ratio"] = round(result["chain_s"] / result["single_s"], 3)
        if with_baselines:
            result["baselines_s"] = {name: round(value, 1) for name, value in baselines(lab).items()}
        print(json.dumps(result), flush=True)
        return result


def main() -> None:
    """All cases."""
    words = [word for word in sys.argv[1:] if ":" in word] or ["8:200:256", "16:100:128", "32:50:64"]
    rounds = int(sys.argv[sys.argv.index("--rounds") + 1]) if "--rounds" in sys.argv else 3
    for number, word in enumerate(words):
        hosts, mbit, mib = map(int, word.split(":"))
        case(hosts, mbit, mib, rounds, with_baselines="--baselines" in sys.argv and number == 0)


if __name__ == "__main__":
    main()
