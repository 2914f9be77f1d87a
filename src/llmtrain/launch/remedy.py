"""What ``check`` may put right itself: unknown host keys, operations that are not compiled, trees that differ.

Never with sudo, never in a user's start-up files, and a changed host key is never among it. What a sync replaces stays
beside the new tree for ``--rollback``. Missing working folders are made by every launch, so they are no finding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmtrain.cluster.checks.files import wrong_trees
from llmtrain.launch.check import adopt_keys, warm
from llmtrain.launch.warm import cold_hosts
from llmtrain.spec.runspec import parse_ports
from llmtrain.sync.distribute import run_sync
from llmtrain.sync.order import SyncOptions, open_hosts, order_sync
from llmtrain.sync.request import DEFAULT_PORTS, SyncRequest, refuse_failures

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llmtrain.launch.check import CheckReport, Subject
    from llmtrain.sync.crew import Tell

SOFTWARE = frozenset({"packages", "versions", "interpreter"})
"""Checks whose findings another environment puts right."""


@dataclass(frozen=True, kw_only=True)
class Remedies:
    """What the user allows."""

    keys: bool = False
    """Adopt unknown host keys without asking."""
    ops: bool = False
    """Compile without asking."""
    ask: Callable[[str], bool] | None = None
    """Asks about each, and says whether it may be done."""

    def allows(self, given: bool, question: str) -> bool:
        """Whether it may be done."""
        return given or (self.ask is not None and self.ask(question))


def remedy(subject: Subject, report: CheckReport, allowed: Remedies, tell: Tell = lambda *_: None) -> bool:
    """Carry out what is allowed; returns whether anything was done, and another look is worth it.

    Args:
        subject: what was looked at.
        report: what was found.
        allowed: what may be done, and who is asked.
        tell: called for what a person wants to see of a sync.

    Raises:
        DiskError: known_hosts cannot be written.
        HostFailuresError: a build failed somewhere.
        SyncError: a host did not get a tree; it has the one it had.
    """
    done = False
    saw = {one.host: one.saw for one in report.findings if one.check == "host-key"}
    lines = [
        line
        for host, line in report.new_keys.items()
        if allowed.allows(allowed.keys, f"{host}: {saw.get(host, line)}. Write it to ~/.ssh/known_hosts?")
    ]
    if lines:
        adopt_keys(lines)
        done = True
    cold = cold_hosts(report.facts, report.needs)
    if cold:
        names = sorted({op for ops in cold.values() for op in ops})
        if allowed.allows(allowed.ops, f"Compile {', '.join(names)} on {', '.join(cold)} (minutes)?"):
            warm(subject, report, cold)
            done = True
    return _bring(subject, report, allowed, tell) or done


def _bring(subject: Subject, report: CheckReport, allowed: Remedies, tell: Tell) -> bool:
    """The environment where software differs, and trees that are not as here."""
    done = False
    odd = sorted({one.host for one in report.findings if one.check in SOFTWARE and one.level == "fail"})
    prefix = subject.spec.environment
    if odd and prefix and allowed.allows(False, f"Bring the environment {prefix} to {', '.join(odd)}?"):
        refuse_failures(order_sync("environment", (prefix,), SyncOptions(), subject.spec, tell))
        tell("end", {})
        done = True
    for path, hosts in wrong_trees(list(report.facts.values()), report.needs).items():
        what = f"Bring {path} to {', '.join(hosts)} (what is there stays for llmtrain sync --rollback)?"
        if allowed.allows(False, what):
            _sync_tree(subject, path, hosts, tell)
            done = True
    return done


def _sync_tree(subject: Subject, path: str, hosts: Sequence[str], tell: Tell) -> None:
    request = SyncRequest(
        path=path,
        dest=path,
        hosts=tuple(hosts),
        what="weights",
        delete=True,
        force=True,  # asked for just now, and nothing is lost: the old tree is kept
        network=subject.spec.network,
        ports=parse_ports(subject.spec.ports) if subject.spec.ports else DEFAULT_PORTS,
        pythons={host: subject.python_on(host) for host in hosts},
    )
    fleet, failed = open_hosts(hosts)
    try:
        for error in failed.values():
            raise error
        refuse_failures(run_sync(request, fleet, tell))
        tell("end", {})
    finally:
        fleet.close()
