"""Checks between hosts, for ``launch`` and ``check`` alike: plain ssh, ports, names, shared folders."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.cluster.agree import check_agreement
from llmtrain.cluster.checks.peers import judge_peers
from llmtrain.cluster.findings import Finding, sort_findings, unreachable
from llmtrain.cluster.pairs import PairResult, measure_pairs
from llmtrain.cluster.peers import Peer, meet
from llmtrain.launch.passes import cluster_key, read_pass, write_pass
from llmtrain.process import write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from llmtrain.cluster.fleet import Fleet
    from llmtrain.cluster.network import Link
    from llmtrain.cluster.probes import Facts

PEER_CHECKS = frozenset({"ports", "master-port", "names", "shared-dir", "mtu"})


@dataclass(frozen=True, kw_only=True)
class Between:
    """Hosts that answered, and where they meet."""

    facts: Mapping[str, Facts]
    """Host name -> facts, in rank order."""
    links: Mapping[str, Link]
    """Host name -> interface and address of the ranks; hosts without one are left out."""
    pythons: Mapping[str, str]
    """Host name -> interpreter."""
    master_port: int | None = None
    """The port where ranks meet, if the user chose one."""


def examine_between(fleet: Fleet, hosts: Between, wanted: frozenset[str], *, use_passes: bool) -> list[Finding]:
    """Log in by plain ssh and let the hosts look at each other, both at once.

    Args:
        fleet: open transports, all of them over SSH.
        hosts: who and where.
        wanted: names of the checks to be made.
        use_passes: take a recent login by plain ssh on the same hosts for an answer. Ports and paths are looked at
            each time: a firewall may have been raised since.
    """
    key = cluster_key(hosts.facts)
    ask = "ssh-agree" in wanted and not (use_passes and read_pass(key))
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="agree") as pool:
        agreement = pool.submit(check_agreement, list(hosts.facts) if ask else [])
        findings = _look(fleet, hosts) if PEER_CHECKS & wanted else []
        disagreements = agreement.result()
    if ask:
        write_pass(key, passed=not disagreements)
    findings += disagreements
    return sort_findings(finding for finding in findings if finding.check in wanted)


def measure_links(fleet: Fleet, hosts: Between, tell: Callable[[str, dict[str, str]], None]) -> list[PairResult]:
    """Measure every pair of hosts, and keep the result for predictions of step times.

    Raises:
        HostFailuresError: a host could not take part.
    """
    peers = {name: _peer(hosts, name) for name in hosts.links}
    results = measure_pairs(fleet, peers, lambda text: tell("stage", {"text": text}))
    _write_links(hosts, results)
    return results


def _write_links(hosts: Between, results: list[PairResult]) -> None:
    """One file per set of hosts, in the folder that also holds the list of runs."""
    base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state")
    name = hashlib.sha256("\n".join(hosts.links).encode()).hexdigest()[:16]
    path = base / "llmtrain" / "links" / f"{name}.json"
    with contextlib.suppress(OSError):  # what cannot be kept was still shown
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {"time": time.time(), "hosts": list(hosts.links), "pairs": [asdict(one) for one in results]}
        write_json(path, document)


def _look(fleet: Fleet, hosts: Between) -> list[Finding]:
    peers = {name: _peer(hosts, name) for name in hosts.links}
    if not peers:
        return []
    results = meet(fleet, peers, master_port=hosts.master_port)
    return [
        *unreachable(results.failed),
        *judge_peers(hosts.facts, hosts.links, results.good, hosts.master_port),
    ]


def _peer(hosts: Between, name: str) -> Peer:
    item, link = hosts.facts[name], hosts.links[name]
    mtu = next((one.mtu for one in item.interfaces if one.name == link.interface), 1500)
    return Peer(python=hosts.pythons[name], address=link.address, node_dir=item.node_dir, mtu=mtu)
