"""Facts of made-up hosts, for tests of what is judged and chosen from them."""

from __future__ import annotations

from typing import Any

from llmtrain.cluster.probes import Facts, Interface

PACKAGES = {
    "torch": "2.13.0",
    "deepspeed": "0.19.8",
    "transformers": "5.24.0",
    "trl": "1.16.0",
    "accelerate": "1.15.0",
    "datasets": "5.2.0",
}


def make_interface(name: str, ipv4: str | None, **changes: Any) -> Interface:
    """An interface that is up and fast, but for the changes."""
    values: dict[str, Any] = {
        "up": True,
        "speed_mbits": 10000,
        "mtu": 1500,
        "loopback": name == "lo",
        "bridge": False,
        "physical": name != "lo",
        "rdma": False,
    }
    return Interface(name=name, ipv4=ipv4, **{**values, **changes})


def make_facts(host: str, number: int = 1, **changes: Any) -> Facts:
    """A healthy host with eight processors and no accelerator, but for the changes."""
    values: dict[str, Any] = {
        "hostname": host,
        "machine_id": f"machine-{number}",
        "boot_id": f"boot-{number}",
        "uid": 1000,
        "home": "/home/user",
        "ssh_address": f"10.0.0.{number}",
        "own_address": f"10.0.0.{number}",
        "python": "3.11.7",
        "executable": "/opt/env/bin/python",
        "packages": dict(PACKAGES),
        "accelerators": (),
        "other_accelerators": (),
        "cpus": tuple(range(8)),
        "memory_total_bytes": 64 << 30,
        "memory_available_bytes": 60 << 30,
        "node_dir": "/home/user/.llmtrain",
        "node_dir_free_bytes": 500 << 30,
        "node_dir_writable": True,
        "interfaces": (make_interface("lo", "127.0.0.1/8"), make_interface("eth0", f"10.0.0.{number}/24")),
        "free_ports": (20001, 20002),
        "trees": {},
        "glibc": "2.36",
        "machine": "x86_64",
        "noise": "",
    }
    return Facts(host=host, **{**values, **changes})


def gpu(cap: str = "8.0", name: str = "NVIDIA A100-SXM4-80GB") -> dict[str, str | None]:
    """One row of nvidia-smi."""
    return {"index": "0", "name": name, "uuid": "GPU-1", "memory.total": "81920", "compute_cap": cap}
