"""First contact with the hosts of a job: connect, ask, judge, choose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmtrain.cluster.doctor import Finding, Needs, judge, refuse_failures, unreachable
from llmtrain.cluster.fleet import Command, Fleet, Transport, run_on_all
from llmtrain.cluster.links import measure_subnets
from llmtrain.cluster.local import LocalTransport
from llmtrain.cluster.network import NetworkChoice, choose_network
from llmtrain.cluster.probes import Facts, FactsRequest, examine, read_tree
from llmtrain.launch.choices import Hardware, choose_hardware
from llmtrain.spec.runspec import parse_ports

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmtrain.launch.job import Job
    from llmtrain.spec.choice import Choice

DEFAULT_PORTS = (20000, 29999)
"""Below the range the kernel gives to outgoing connections, so that a free port stays free until it is used."""


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
    results = examine(fleet, {name: _request(job, name) for name in job.cluster.names})
    findings = [
        *unreachable(results.failed),
        *judge(job.cluster, results.good, _needs(job, trees)),
    ]
    refuse_failures(findings)
    facts = {name: results.good[name] for name in job.cluster.names}
    items = list(facts.values())
    wanted = {name: _wanted_network(job, name) for name in facts}
    pythons = {name: job.python_on(name) for name in facts}
    measured = {} if any(wanted.values()) else measure_subnets(fleet, items, pythons)
    network = choose_network(items, wanted, measured)
    hardware, choices = choose_hardware(job.spec, items, flash_imports=_flash_imports(job, fleet, facts))
    return Contact(
        facts=facts, network=network, hardware=hardware, choices=choices, warnings=tuple(findings), trees=trees
    )


def _request(job: Job, name: str) -> FactsRequest:
    own = job.spec.per_host.get(name)
    return FactsRequest(
        python=job.python_on(name),
        node_dir=(own.node_dir if own else None) or job.spec.node_dir,
        ports=parse_ports(job.spec.ports) if job.spec.ports else DEFAULT_PORTS,
        trees=() if job.local else job.trees,
    )


def _needs(job: Job, trees: Mapping[str, Mapping[str, Any]]) -> Needs:
    if job.script is not None:
        # What else it imports is between the user's program and its environment.
        return Needs(trees=trees, free_bytes=_space(job), packages=("torch", "deepspeed"))
    return Needs(trees=trees, free_bytes=_space(job))


def _space(job: Job) -> int:
    """The tuned model, and what is copied where it is missing, with a little room."""
    model = job.model.weight_bytes if job.model else 0
    return 2 * model + (job.data.bytes if job.data else 0) + (job.code.bytes if job.code else 0) + (256 << 20)


def _wanted_network(job: Job, name: str) -> str | None:
    own = job.spec.per_host.get(name)
    return (own.network if own else None) or job.spec.network


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
