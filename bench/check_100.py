"""Time and memory of `llmtrain check` over many hosts.

    python bench/check_100.py fake 100    a transport that answers as a host does, after the delays of a real one
    python bench/check_100.py lab 30      so many sshds on this machine (needs root; see tests/lab)

Delays of a fake host: 0.15 to 0.6 s for a login, 0.4 to 1.2 s for an interpreter that reads its packages.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))


def peak_mib() -> float:
    """Largest memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def fake(count: int) -> dict[str, float]:
    """Facts of one real host, told by many."""
    from llmtrain.cluster import agree, ssh
    from llmtrain.cluster.fleet import Command, Result
    from llmtrain.cluster.local import LocalTransport
    from llmtrain.launch.check import Scope, read_subject, run_check
    from llmtrain.launch.job import Selection
    from llmtrain.spec.runfile import read_run

    draw = random.Random(0)
    names = [f"gpu{number:03d}" for number in range(count)]
    recorded: list[bytes] = []

    class Host:
        def __init__(self, name: str) -> None:
            self.name, self.number = name, names.index(name)

        def run(self, command: Command) -> Result:
            if not recorded:
                recorded.append(LocalTransport("x").run(command).stdout)
            time.sleep(draw.uniform(0.4, 1.2))
            text = recorded[0].decode()
            head, mark, rest = text.partition("{")
            body, end = rest.rsplit("}", 1)
            answer = json.loads(mark + body + "}")
            answer.update(hostname=self.name, machine_id=self.name, boot_id=self.name, time=time.time())
            answer["ssh_address"] = f"10.1.{self.number // 250}.{self.number % 250 + 1}"
            answer["interfaces"] = [
                {
                    "name": "eth0",
                    "ipv4": answer["ssh_address"] + "/16",
                    "up": True,
                    "speed_mbits": 25000,
                    "mtu": 1500,
                    "loopback": False,
                    "bridge": False,
                    "physical": True,
                    "rdma": False,
                }
            ]
            return Result(code=0, stdout=(head + json.dumps(answer) + end).encode(), stderr=b"")

        def close(self) -> None:
            """Nothing is open."""

    def connect(name: str) -> Host:
        time.sleep(draw.uniform(0.15, 0.6))
        return Host(name)

    with tempfile.TemporaryDirectory() as folder:
        hostfile = Path(folder, "hosts")
        hostfile.write_text("".join(f"{name} slots=8\n" for name in names))
        spec = read_run(None, options={"hosts": ("--hosts", str(hostfile))}, sets=(), envs=())
        scope = Scope(skip=frozenset({"ports", "master-port", "names", "shared-dir", "mtu", "ssh-agree"}))
        begun = time.monotonic()
        with mock.patch.object(ssh, "connect", connect), mock.patch.object(agree, "try_ssh", return_value=None):
            report = run_check(read_subject(spec, Selection()), scope, lambda *_: None)
        seconds = time.monotonic() - begun
    print(f"findings: {sorted({(one.check, one.level) for one in report.findings})}", file=sys.stderr)
    return {"hosts": count, "seconds": round(seconds, 2), "peak_mib": round(peak_mib(), 1)}


def lab(count: int) -> dict[str, float]:
    """Everything that check does, against real sshds that share this machine's processors."""
    from tests.lab.lab import Lab
    from tests.lab.life import default_shares
    from tests.lab.model import LabOptions

    import llmtrain

    source = str(Path(llmtrain.__file__).parents[1])
    measure = (
        "import resource, sys, time; begun = time.monotonic()\n"
        "from llmtrain.cli import main\n"
        "try: main()\n"
        "finally: print(time.monotonic() - begun, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)"
    )
    with Lab.create(count, LabOptions(shares=(*default_shares(), source))) as hosts:
        hosts.write("head", "/root/hostfile", "".join(f"{name} slots=1\n" for name in hosts.nodes))
        argv = [sys.executable, "-c", measure, "check", "--hosts", "/root/hostfile", "--json"]
        done = hosts.run("head", argv, env={"PYTHONPATH": source}, check=False, timeout=300)
    document = json.loads(done.stdout)
    seconds, kib = done.stderr.split()[-2:]
    print(f"findings: {document['findings']}", file=sys.stderr)
    return {"hosts": count, "seconds": round(float(seconds), 2), "peak_mib": round(int(kib) / 1024, 1)}


if __name__ == "__main__":
    kind, number = sys.argv[1], int(sys.argv[2])
    print(json.dumps({"kind": kind, **{"fake": fake, "lab": lab}[kind](number)}))
