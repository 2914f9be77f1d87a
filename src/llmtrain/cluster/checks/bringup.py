"""Where a bring-up of torch.distributed stopped. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmtrain.cluster.findings import Finding
from llmtrain.cluster.nvidia import parse_transport

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmtrain.cluster.probes import Facts

STAGES = ("import", "rendezvous", "gloo", "nccl-host", "nccl", "sweep")
"""In the order in which all ranks pass them."""
ADVICE = {
    "import": "{python} -c 'import torch'",
    "rendezvous": "see that the first host's port can be reached: llmtrain check --only ports,names",
    "gloo": "see the interface of the ranks: network: in the run file",
    "nccl-host": "nvidia-smi topo -m; NCCL_DEBUG=INFO; in a container --shm-size and --ulimit memlock=-1",
    "nccl": "NCCL_DEBUG=INFO; InfiniBand: ibstat, show_gids",
    "sweep": "llmtrain check --links names slow links",
}


def judge_bringup(told: Mapping[str, Mapping[int, Sequence[Mapping[str, Any]]]], *, cuda: bool) -> list[Finding]:
    """The hosts that are furthest behind, with the stage they did not pass; the others only wait for them.

    Args:
        told: host -> rank -> what it told.
        cuda: whether the NCCL stages were to be passed.
    """
    wanted = [stage for stage in STAGES if cuda or not stage.startswith("nccl")]
    passed = {
        (host, rank): sum(one["stage"] in wanted for one in lines)
        for host, ranks in told.items()
        for rank, lines in ranks.items()
    }
    if not passed or min(passed.values()) == len(wanted):
        return []
    least = min(passed.values())
    stage = wanted[least]
    findings = []
    for host, ranks in told.items():
        behind = [rank for rank in ranks if passed[host, rank] == least]
        if behind:
            findings.append(_finding(host, stage, behind, ranks))
    return findings


def _finding(host: str, stage: str, behind: Sequence[int], ranks: Mapping[int, Sequence[Mapping[str, Any]]]) -> Finding:
    errors = [str(one["error"]) for rank in behind for one in ranks[rank] if one["stage"] == "error"]
    why = errors[0] if errors else "no answer in time"
    return Finding(
        host=host,
        check="bring-up",
        level="warn" if stage == "sweep" else "fail",  # a slow network is slow, not broken
        saw=f"rank {', '.join(map(str, behind))} did not pass the stage {stage}: {why}",
        wanted=f"all ranks pass {', '.join(STAGES)}",
        fix=ADVICE[stage].replace("{python}", f"ssh -- {host} python"),
    )


def judge_transport(
    facts: Mapping[str, Facts], told: Mapping[str, Mapping[int, Sequence[Mapping[str, Any]]]]
) -> list[Finding]:
    """Hosts with active InfiniBand or RoCE ports over which NCCL went by sockets all the same."""
    findings = []
    for host, ranks in told.items():
        logs = ["".join(one["log"]) for lines in ranks.values() for one in lines if one.get("log")]
        by_socket = any(parse_transport(log) == "Socket" for log in logs)
        ports = [port["device"] for port in facts[host].details.infiniband if "ACTIVE" in port.get("state", "")]
        if by_socket and ports and len(told) > 1:
            findings.append(
                Finding(
                    host=host,
                    check="transport",
                    level="fail",
                    saw=f"NCCL uses sockets, although {', '.join(ports)} {'is' if len(ports) == 1 else 'are'} active",
                    wanted="InfiniBand or RoCE: many times faster",
                    fix=f"take NCCL_IB_DISABLE and NCCL_NET out of env; ssh -- {host} 'ls /dev/infiniband; ulimit -l'",
                )
            )
    return findings
