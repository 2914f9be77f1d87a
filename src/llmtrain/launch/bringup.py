"""Bring torch.distributed up over all slots, as a run would, and say where it stops."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from llmtrain.cluster.fleet import Command, Fleet, run_on_all
from llmtrain.errors import HostError

if TYPE_CHECKING:
    from llmtrain.launch.between import Between
    from llmtrain.spec.hostfile import Cluster

Told = dict[str, dict[int, list[dict[str, Any]]]]
"""Host -> rank -> what it told."""
STAGE_S = 30
LIMIT_S = 120


def bring_up(fleet: Fleet, cluster: Cluster, hosts: Between, *, cuda: bool) -> Told:
    """Let every rank of the cluster join, with the network that was chosen.

    Args:
        fleet: open transports.
        cluster: hosts and slots in rank order; all of them answered.
        hosts: their addresses and interpreters.
        cuda: whether to go on to NCCL.
    """
    source = files("llmtrain.train").joinpath("bringup.py").read_text(encoding="utf-8")
    first = cluster.names[0]
    ports = hosts.facts[first].free_ports

    def join(name: str) -> dict[int, list[dict[str, Any]]]:
        host = next(one for one in cluster.hosts if one.name == name)
        interface = hosts.links[name].interface
        request = {
            "ranks": list(cluster.ranks_of(name)),
            "slots": list(host.slots),
            "hosts": [list(cluster.ranks_of(other)) for other in cluster.names],
            "world_size": cluster.world_size,
            "address": hosts.links[first].address,
            "port": ports[0],
            "cuda": cuda,
            "stage_s": STAGE_S,
            "limit_s": LIMIT_S,
            "env": {
                "GLOO_SOCKET_IFNAME": interface,
                "NCCL_SOCKET_IFNAME": f"={interface}",
                "OMP_NUM_THREADS": "1",
            },
        }
        script = f"{source}\n\nbring_up(json.loads({json.dumps(json.dumps(request))}))\n"
        argv = (hosts.pythons[name], "-I", "-")
        done = fleet[name].run(Command(argv=argv, stdin=script.encode(), timeout_s=LIMIT_S + 30))
        try:
            answer = json.loads(done.stdout.decode().strip().splitlines()[-1])
        except (ValueError, IndexError):
            raise HostError(f"no answer: {done.tail()}", where=name, fix=f"ssh -- {name} uptime") from None
        return {int(rank): lines for rank, lines in answer["ranks"].items()}

    results = run_on_all(cluster.names, join, fan_out=len(cluster.names))
    nothing: Told = {name: {rank: [] for rank in cluster.ranks_of(name)} for name in results.failed}
    return {**results.good, **nothing}


def sweep_of(told: Told) -> list[dict[str, Any]]:
    """Rank 0's timings: op, bytes, seconds, algbw and busbw in GB/s; empty if it did not get there."""
    for ranks in told.values():
        for one in ranks.get(0, []):
            if one["stage"] == "sweep":
                sweep: list[dict[str, Any]] = one["sweep"]
                return sweep
    return []
