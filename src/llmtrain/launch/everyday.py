"""Small things done on all hosts at once: a command, a look at what they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmtrain.cluster.fleet import Command, HostResults, Result, run_on_all
from llmtrain.cluster.probes import Facts, FactsRequest, facts_command, parse_facts
from llmtrain.errors import ExitCode, LlmtrainError
from llmtrain.launch.contact import open_host
from llmtrain.launch.job import is_local

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmtrain.spec.hostfile import Cluster

PYTHON = "python3"
"""Any interpreter answers what a host is."""


@dataclass(frozen=True, kw_only=True)
class Said:
    """Hosts that answered alike."""

    hosts: tuple[str, ...]
    """In the order of the hostfile."""
    code: int
    """Exit code."""
    text: str
    """What the command printed there, errors last."""


def run_everywhere(cluster: Cluster, words: Sequence[str], *, timeout_s: float) -> HostResults[Result]:
    """Run one command on every host; its words reach it as they are, and ``sh -c TEXT`` if it is a single one."""
    argv = ("/bin/sh", "-c", words[0]) if len(words) == 1 else tuple(words)
    local = is_local(cluster)

    def run(name: str) -> Result:
        transport = open_host(name, local=local)
        try:
            return transport.run(Command(argv=argv, timeout_s=timeout_s))
        finally:
            transport.close()

    return run_on_all(cluster.names, run)


def merge_answers(results: HostResults[Result]) -> tuple[Said, ...]:
    """Equal answers once, with their hosts; those of failed hosts last. Pure."""
    groups: dict[tuple[int, str], list[str]] = {}
    for name, value in results.values.items():
        if isinstance(value, LlmtrainError):
            continue
        text = (value.stdout + value.stderr).decode("utf-8", "replace").rstrip("\n")
        groups.setdefault((value.code, text), []).append(name)
    for name, error in results.failed.items():
        groups.setdefault((int(ExitCode.HOST), str(error)), []).append(name)
    return tuple(Said(hosts=tuple(hosts), code=code, text=text) for (code, text), hosts in groups.items())


def worst_code(said: Sequence[Said]) -> int:
    """The largest exit code; a host that did not answer counts as 6. Pure."""
    return max((one.code for one in said), default=0)


def examine_names(names: Sequence[str]) -> HostResults[Facts]:
    """What each named host is."""

    def ask(name: str) -> Facts:
        transport = open_host(name, local=False)
        try:
            return parse_facts(name, transport.run(facts_command(FactsRequest(python=PYTHON))), python=PYTHON)
        finally:
            transport.close()

    return run_on_all(names, ask)


def render_hosts(names: Sequence[str], facts: HostResults[Facts] | None, slots: int) -> str:
    """The text of a hostfile; hosts that did not answer stand in it as comments. Pure."""
    width = max(map(len, names))
    lines = []
    for name in names:
        value = facts.values[name] if facts else None
        if isinstance(value, LlmtrainError):
            lines.append(f"# {name}: {value.error}")
            continue
        count, note = slots, ""
        if value is not None:
            count = len(value.accelerators) or slots
            what = (
                (value.accelerators[0].get("name") or "GPU") if value.accelerators else f"{len(value.cpus)} processors"
            )
            first = next((one.ipv4 for one in value.interfaces if one.physical and one.ipv4), None)
            address = (first or value.ssh_address).partition("/")[0]
            note = f"  # {address}, {what}, {value.memory_total_bytes >> 30} GiB"
        lines.append(f"{name:<{width}} slots={count}{note}")
    return "\n".join(lines) + "\n"
