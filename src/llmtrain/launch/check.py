"""``llmtrain check``: all that can be known before a launch, on every host, whatever some of them say."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.cluster.checks.bringup import judge_bringup, judge_transport
from llmtrain.cluster.checks.links import judge_links
from llmtrain.cluster.checks.topology import Links, judge_topology
from llmtrain.cluster.doctor import judge
from llmtrain.cluster.findings import CHECKS, Finding, sort_findings, unreachable
from llmtrain.cluster.fleet import Command, Fleet, HostResults, Transport, run_on_all
from llmtrain.cluster.links import measure_subnets
from llmtrain.cluster.local import LocalTransport
from llmtrain.cluster.needs import Needs
from llmtrain.cluster.network import NetworkChoice, choose_network
from llmtrain.cluster.nvidia import parse_topology
from llmtrain.cluster.probes import Facts, examine, read_tree
from llmtrain.errors import DiskError, ExitCode, HostError, LlmtrainError, UsageError
from llmtrain.launch.asking import assume_config, facts_request, needs_of, wanted_network
from llmtrain.launch.between import PEER_CHECKS, Between, examine_between, measure_links
from llmtrain.launch.bringup import Told, bring_up, sweep_of
from llmtrain.launch.fit import judge_unfit
from llmtrain.launch.job import Job, Selection, is_local, python_on, read_job
from llmtrain.launch.warm import warm_hosts
from llmtrain.spec.dataset import read_dataset
from llmtrain.spec.hostfile import Cluster, read_hostfile, select
from llmtrain.spec.modelinfo import read_model

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmtrain.cluster.pairs import PairResult
    from llmtrain.spec.runspec import RunSpec

Tell = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class Scope:
    """How much is looked at."""

    only: frozenset[str] = frozenset()
    """``--only``; empty for all."""
    skip: frozenset[str] = frozenset()
    """``--skip``."""
    deep: bool = False
    """``--deep``: read every byte of model and data."""
    links: bool = False
    """``--links``: measure every pair of hosts."""

    @property
    def checks(self) -> frozenset[str]:
        """Names of the checks whose findings are wanted."""
        return (self.only or frozenset(CHECKS)) - self.skip


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Hosts, and as much of a run as is known."""

    spec: RunSpec
    """What the user wants."""
    cluster: Cluster
    """Selected hosts."""
    selection: Selection
    """Options about hosts."""
    job: Job | None
    """The run, if it is complete."""
    trees: tuple[str, ...]
    """Paths that every host must have, or lack."""
    local: bool
    """The only host is this machine."""

    def python_on(self, host: str) -> str:
        """The interpreter on a host."""
        return python_on(self.spec, host)


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """What was found."""

    hosts: tuple[str, ...]
    """All hosts, in rank order."""
    findings: tuple[Finding, ...]
    """Worst first; nothing that is fine."""
    facts: Mapping[str, Facts] = field(default_factory=dict)
    """Host name -> facts, of the hosts that answered."""
    network: NetworkChoice | None = None
    """The network ranks would use."""
    pairs: tuple[PairResult, ...] = ()
    """What was measured between hosts."""
    sweep: tuple[Mapping[str, Any], ...] = ()
    """Collectives over all ranks: op, bytes, seconds, algbw and busbw in GB/s."""
    topology: Mapping[str, Links] = field(default_factory=dict)
    """Host -> links between its accelerators, where it has several."""
    new_keys: Mapping[str, str] = field(default_factory=dict)
    """Host -> line for known_hosts, where the key is unknown and nothing else is known about the host."""
    needs: Needs = field(default_factory=Needs)
    """What the run needs of the hosts."""

    @property
    def exit_code(self) -> ExitCode:
        """4 on any failure."""
        failed = any(finding.level == "fail" for finding in self.findings)
        return ExitCode.PREFLIGHT if failed else ExitCode.OK


def read_subject(spec: RunSpec, selection: Selection) -> Subject:
    """Read what the user names: a whole run, or hosts and whatever there is beside them.

    Raises:
        UsageError: no hosts are named.
        InputFileError: a file cannot be used.
    """
    if spec.hosts is None:
        raise UsageError("--hosts HOSTFILE is missing", where="command line", fix="add --hosts HOSTFILE")
    if spec.config and spec.model.path and spec.data.path:
        job = read_job(spec, selection)
        trees = () if job.local else job.trees
        return Subject(spec=spec, cluster=job.cluster, selection=selection, job=job, trees=trees, local=job.local)
    cluster = select(
        read_hostfile(spec.hosts), include=selection.include, exclude=selection.exclude, num_hosts=selection.num_hosts
    )
    local = is_local(cluster)
    trees = () if local else _read_loose_trees(spec)
    return Subject(spec=spec, cluster=cluster, selection=selection, job=None, trees=trees, local=local)


def _read_loose_trees(spec: RunSpec) -> tuple[str, ...]:
    """Model or data without the rest of a run."""
    found = []
    if spec.model.path:
        found.append(str(read_model(spec.model.path).path))
    if spec.data.path:
        read_dataset(spec.data.path, format=spec.data.format)
        found.append(spec.data.path)
    return tuple(found)


def run_check(subject: Subject, scope: Scope, tell: Tell) -> CheckReport:
    """Look at all hosts at once. A host that fails is a finding, and the others are looked at all the same."""
    tell("contact", {"hosts": list(subject.cluster.names)})
    opened = open_hosts(subject)
    fleet = Fleet(opened.good)
    try:
        return _examine(subject, scope, fleet, opened, tell)
    finally:
        fleet.close()


def open_hosts(subject: Subject) -> HostResults[Transport]:
    """Connect to all hosts, and keep those that let us in."""
    names = subject.cluster.names
    if subject.local:
        return HostResults({names[0]: LocalTransport(names[0])})
    from llmtrain.cluster.ssh import connect

    def open_one(name: str) -> Transport:
        return connect(name)

    return run_on_all(names, open_one)


def _examine(subject: Subject, scope: Scope, fleet: Fleet, opened: HostResults[Transport], tell: Tell) -> CheckReport:
    here = {path: read_tree(path, deep=scope.deep) for path in subject.trees}
    requests = {name: facts_request(subject.spec, name, subject.trees, deep=scope.deep) for name in fleet}
    answered = examine(fleet, requests)
    facts = answered.good
    findings = [*unreachable(opened.failed), *unreachable(answered.failed)]
    network = None
    pairs: list[PairResult] = []
    sweep: list[dict[str, Any]] = []
    topology: dict[str, Links] = {}
    needs = Needs(trees=here)
    if facts:
        needs = needs_of(subject.job, facts, here) if subject.job else Needs(trees=here)
        findings += judge(subject.cluster, facts, needs)
        findings += _judge_fit(subject.job, facts)
        network, failed = _choose_network(subject, fleet, facts)
        findings += failed
        hosts = _meeting(subject, facts, network)
        findings += _between(subject, scope, fleet, hosts)
        if scope.links:
            topology = _read_topology(fleet, facts)
            findings += judge_topology(topology)
        if scope.links and len(hosts.links) > 1:
            pairs = measure_links(Fleet({name: fleet[name] for name in facts}), hosts, tell)
            findings += judge_links(pairs)
            told = _bring_up(subject, fleet, hosts, needs, tell)
            findings += judge_bringup(told, cuda=_has_gpus(hosts, needs))
            findings += judge_transport(facts, told)
            sweep = sweep_of(told)
    kept = sort_findings(finding for finding in findings if finding.check in scope.checks)
    return CheckReport(
        hosts=subject.cluster.names,
        findings=tuple(kept),
        facts=facts,
        network=network,
        pairs=tuple(pairs),
        sweep=tuple(sweep),
        topology=topology,
        new_keys={name: line for name, error in opened.failed.items() if (line := getattr(error, "new_key", None))},
        needs=needs,
    )


def _read_topology(fleet: Fleet, facts: Mapping[str, Facts]) -> dict[str, Links]:
    """What the driver says of links inside hosts; a driver that says nothing is no finding."""
    names = [name for name, item in facts.items() if len(item.accelerators) > 1]
    ask = Command(argv=("nvidia-smi", "topo", "-m"), timeout_s=30.0)
    answers = run_on_all(names, lambda name: fleet[name].run(ask)).good
    return {name: parse_topology(answer.stdout.decode("utf-8", "replace")) for name, answer in answers.items()}


def _judge_fit(job: Job | None, facts: Mapping[str, Facts]) -> list[Finding]:
    if job is None:
        return []
    config, cuda = assume_config(job, facts)
    return judge_unfit(job, facts, config, cuda=cuda)


def _choose_network(
    subject: Subject, fleet: Fleet, facts: Mapping[str, Facts]
) -> tuple[NetworkChoice | None, list[Finding]]:
    items = list(facts.values())
    wanted = {name: wanted_network(subject.spec, name) for name in facts}
    measured: dict[str, float] = {}
    if not any(wanted.values()):
        with contextlib.suppress(HostError):  # a link that cannot be measured shows among the ports
            measured = measure_subnets(fleet, items, {name: subject.python_on(name) for name in facts})
    try:
        return choose_network(items, wanted, measured), []
    except LlmtrainError as error:
        finding = Finding(
            host=error.where or items[0].host,
            check="network",
            level="fail",
            saw=error.error,
            wanted="an interface that reaches the other hosts",
            fix=error.fix or "set network: in the run file",
        )
        return None, [finding]


def _meeting(subject: Subject, facts: Mapping[str, Facts], network: NetworkChoice | None) -> Between:
    return Between(
        facts=facts,
        links=network.links if network else {},
        pythons={name: subject.python_on(name) for name in facts},
        master_port=subject.selection.master_port,
    )


def _between(subject: Subject, scope: Scope, fleet: Fleet, hosts: Between) -> list[Finding]:
    if subject.local or not scope.checks & (PEER_CHECKS | {"ssh-agree"}):
        return []
    return examine_between(Fleet({name: fleet[name] for name in hosts.facts}), hosts, scope.checks, use_passes=False)


def _has_gpus(hosts: Between, needs: Needs) -> bool:
    return needs.cuda or all(item.accelerators for item in hosts.facts.values())


def _bring_up(subject: Subject, fleet: Fleet, hosts: Between, needs: Needs, tell: Tell) -> Told:
    """Only with all hosts: ranks would wait for the others."""
    if set(hosts.links) != set(subject.cluster.names):
        return {}
    tell("stage", {"text": "bringing up torch.distributed"})
    return bring_up(fleet, subject.cluster, hosts, cuda=_has_gpus(hosts, needs))


def warm(subject: Subject, report: CheckReport, cold: Mapping[str, Sequence[str]]) -> None:
    """Compile on the hosts what the run will need.

    Raises:
        HostFailuresError: a build failed somewhere.
    """
    opened = open_hosts(subject)
    fleet = Fleet(opened.good)
    try:
        here = {name: ops for name, ops in cold.items() if name in fleet.transports}
        warm_hosts(fleet, report.facts, here, cuda=report.needs.cuda)
    finally:
        fleet.close()


def adopt_keys(lines: Sequence[str]) -> None:
    """Make host keys known to OpenSSH and to us.

    Raises:
        DiskError: the file cannot be written.
    """
    path = Path.home() / ".ssh" / "known_hosts"
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with path.open("a", encoding="utf-8") as stream:
            stream.writelines(f"{line}\n" for line in lines)
    except OSError as error:
        raise DiskError(f"cannot be written: {error.strerror}", where=str(path), fix=f"ls -l {path}") from None
