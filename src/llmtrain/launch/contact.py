"""First contact with the hosts of a job: connect, ask, judge, choose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmtrain.cluster.doctor import judge
from llmtrain.cluster.findings import CHECKS, Finding, refuse_failures, unreachable
from llmtrain.cluster.fleet import Command, Fleet, Transport, run_on_all
from llmtrain.cluster.links import measure_subnets
from llmtrain.cluster.local import LocalTransport
from llmtrain.cluster.network import NetworkChoice, choose_network
from llmtrain.cluster.probes import Facts, examine, read_tree
from llmtrain.launch.asking import facts_request, needs_of, wanted_network
from llmtrain.launch.between import Between, examine_between
from llmtrain.launch.choices import Hardware, choose_hardware
from llmtrain.launch.lineage import judge_lineage, read_software

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmtrain.launch.job import Job
    from llmtrain.spec.choice import Choice


@dataclass(frozen=True, kw_only=True)
class Contact:
    """What the hosts answered, and what follows from it."""

    facts: Mapping[str, Facts]
    """Host name -> facts, in rank order."""
    network: NetworkChoice
    """Interface and address of every host."""
    hardware: Hardware
    """Accelerator, precision, attention."""
    choices: tuple[Choice, ...]
    """Reasons of the hardware choices."""
    warnings: tuple[Finding, ...]
    """Findings that do not stop the launch."""
    trees: Mapping[str, Mapping[str, Any]]
    """Path -> digest on the head, of everything hosts must have."""


def open_fleet(job: Job) -> Fleet:
    """Connect to all hosts of the job.

    Raises:
        PreflightError: at least one cannot be reached; all of them are named.
    """
    results = run_on_all(job.cluster.names, lambda name: open_host(name, local=job.local))
    if results.failed:
        for transport in results.good.values():
            transport.close()
        refuse_failures(unreachable(results.failed))
    return Fleet(results.good)


def open_host(name: str, *, local: bool) -> Transport:
    """Connect to one host, or to this machine.

    Raises:
        HostError: it cannot be reached.
    """
    if local:
        return LocalTransport(name)
    from llmtrain.cluster.ssh import connect

    return connect(name)


def examine_hosts(job: Job, fleet: Fleet) -> Contact:
    """Ask all hosts what they are and judge whether the run can start there.

    Raises:
        PreflightError: it cannot; every reason is named.
    """
    trees = {} if job.local else {path: read_tree(path) for path in job.trees}
    asked = () if job.local else job.trees
    results = examine(fleet, {name: facts_request(job.spec, name, asked) for name in job.cluster.names})
    findings = unreachable(results.failed)
    if results.good:
        findings += judge(job.cluster, results.good, needs_of(job, results.good, trees))
    skip = job.selection.skip_checks
    refuse_failures(findings, skip=skip)
    facts = {name: results.good[name] for name in job.cluster.names}
    network = _choose_network(job, fleet, facts)
    findings += _examine_between(job, fleet, facts, network)
    refuse_failures(findings, skip=skip)
    findings += judge_lineage(read_software(job.spec.training.resume), facts)
    hardware, choices = choose_hardware(job.spec, list(facts.values()), flash_imports=_flash_imports(job, fleet, facts))
    return Contact(
        facts=facts, network=network, hardware=hardware, choices=choices, warnings=tuple(findings), trees=trees
    )


def _choose_network(job: Job, fleet: Fleet, facts: Mapping[str, Facts]) -> NetworkChoice:
    items = list(facts.values())
    wanted = {name: wanted_network(job.spec, name) for name in facts}
    pythons = {name: job.python_on(name) for name in facts}
    measured = {} if any(wanted.values()) else measure_subnets(fleet, items, pythons)
    return choose_network(items, wanted, measured)


def _examine_between(job: Job, fleet: Fleet, facts: Mapping[str, Facts], network: NetworkChoice) -> list[Finding]:
    """What takes two hosts to see; for plain ssh a recent pass is good enough, so that a restart waits less."""
    if job.local:
        return []
    hosts = Between(
        facts=facts,
        links=network.links,
        pythons={name: job.python_on(name) for name in facts},
        master_port=job.selection.master_port,
    )
    wanted = frozenset(CHECKS) - {"names"} - job.selection.skip_checks
    return examine_between(fleet, hosts, wanted, use_passes=True)


def _flash_imports(job: Job, fleet: Fleet, facts: Mapping[str, Facts]) -> bool:
    """Installed is not enough: a build for another torch only fails on import."""
    if job.spec.model.attention != "auto":
        return False
    if not all(item.packages.get("flash_attn") and item.accelerators for item in facts.values()):
        return False

    def try_import(name: str) -> bool:
        argv = (job.python_on(name), "-I", "-c", "import flash_attn")
        return fleet[name].run(Command(argv=argv, timeout_s=120)).code == 0

    return all(run_on_all(list(facts), try_import).all_good().values())
