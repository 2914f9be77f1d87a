"""NVSwitch and InfiniBand, and network file systems. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmtrain.cluster.checks.majority import odd_ones
from llmtrain.cluster.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmtrain.cluster.probes import Facts

NETWORK_TYPES = ("nfs", "lustre", "beegfs", "gpfs", "ceph", "fuse.glusterfs", "fuse.sshfs", "cifs", "smb3", "wekafs")


def judge_fabric(items: Sequence[Facts]) -> list[Finding]:
    """What only real clusters have."""
    return [*_switch(items), *_adapters(items), *_network_disks(items)]


def _switch(items: Sequence[Facts]) -> list[Finding]:
    return [
        Finding(
            host=item.host,
            check="fabric",
            level="fail" if any(gpu.fabric == "In Progress" for gpu in item.details.gpus) else "warn",
            saw="an NVSwitch, and no nv-fabricmanager running",
            wanted="the fabric manager in the driver's version (CUDA does not start without it)",
            fix=f"ssh -- {item.host} systemctl enable --now nvidia-fabricmanager",
        )
        for item in items
        if item.details.nvswitch
        and not item.details.fabricmanager
        and not any(gpu.fabric == "Completed" for gpu in item.details.gpus)
    ]


def _adapters(items: Sequence[Facts]) -> list[Finding]:
    active = {
        item.host: sum("ACTIVE" in port.get("state", "") for port in item.details.infiniband)
        for item in items
        if item.details.kernel
    }
    return [
        Finding(
            host=host,
            check="fabric",
            level="warn",
            saw=f"{have} active InfiniBand or RoCE ports",
            wanted=f"{wanted}, as on most hosts",
            fix=f"ssh -- {host} ibstat  # a cable, the port's state, the subnet manager",
        )
        for host, have, wanted in odd_ones(active)
        if have < wanted
    ]


def _network_disks(items: Sequence[Facts]) -> list[Finding]:
    return [
        Finding(
            host=item.host,
            check="shared-dir",
            level="warn",
            saw=f"{item.node_dir} is on {item.details.node_mount[0]}",
            wanted="a local disk for the working folder: builds, locks and logs of all hosts would meet there",
            fix="set node_dir: in the run file to a folder on a local disk",
        )
        for item in items
        if item.details.node_mount[0].startswith(NETWORK_TYPES)
    ]
