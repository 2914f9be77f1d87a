"""Judge what hosts said about themselves. Pure: facts in, findings out."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from llmtrain.cluster.probes import Facts, same_machine
from llmtrain.errors import PreflightError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmtrain.errors import LlmtrainError
    from llmtrain.spec.hostfile import Cluster

Level = Literal["ok", "warn", "fail", "unknown"]

NEEDED = ("torch", "deepspeed", "transformers", "trl", "accelerate", "datasets")
"""Packages the ranks import."""
MUST_MATCH = ("torch", "deepspeed", "transformers", "trl")
"""Packages that must have one version everywhere: ranks run them in step."""
MIN_FREE_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at on one host."""

    host: str
    """Name in the hostfile."""
    check: str
    """What was looked at; ``--skip-check`` takes this word."""
    level: Level
    """``fail`` only where it is certain that the run cannot work."""
    saw: str
    """What is there."""
    wanted: str
    """What should be there."""
    fix: str
    """The command to run."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a run needs of its hosts."""

    trees: Mapping[str, Mapping[str, Any]]
    """Path -> digest of the tree here that hosts must have or lack, see :func:`hostfacts.tree_digest`."""
    free_bytes: int = MIN_FREE_BYTES
    """Free space wanted in the working folder of every host."""
    packages: tuple[str, ...] = NEEDED
    """Packages the ranks import."""


def judge(cluster: Cluster, facts: Mapping[str, Facts], needs: Needs) -> list[Finding]:
    """All findings that are not ``ok``, worst first, then in rank order."""
    items = [facts[name] for name in cluster.names if name in facts]
    findings = [
        *_identity(items),
        *_software(items, needs.packages),
        *_slots(cluster, facts),
        *_folders(items, needs),
        *_trees(items, needs),
    ]
    order = {"fail": 0, "unknown": 1, "warn": 2, "ok": 3}
    return sorted(findings, key=lambda finding: order[finding.level])


def _identity(items: Sequence[Facts]) -> list[Finding]:
    return [
        Finding(
            host=second,
            check="identity",
            level="fail",
            saw=f"{second} and {first} are the same machine",
            wanted="every line of the hostfile names another machine",
            fix=f"take {second} out of the hostfile and add its slots to {first}",
        )
        for first, second in same_machine(items)
    ]


def _software(items: Sequence[Facts], needed: Sequence[str]) -> list[Finding]:
    findings = []
    for item in items:
        missing = [name for name in needed if item.packages.get(name) is None]
        if missing:
            findings.append(
                Finding(
                    host=item.host,
                    check="packages",
                    level="fail",
                    saw=f"{item.executable} lacks {', '.join(missing)}",
                    wanted=", ".join(needed),
                    fix=f"ssh -- {item.host} {item.executable} -m pip install {' '.join(missing)}",
                )
            )
    for name in (*MUST_MATCH, "python"):
        findings.extend(_odd_ones(items, name))
    return findings


def _odd_ones(items: Sequence[Facts], name: str) -> list[Finding]:
    """The hosts whose version differs from the commonest one (the head of the list wins a tie)."""
    versions = {item.host: item.python if name == "python" else item.packages.get(name) for item in items}
    present = [version for version in versions.values() if version]
    if len(set(present)) < 2:
        return []
    wanted = Counter(present).most_common(1)[0][0]
    by_host = {item.host: item for item in items}
    return [
        Finding(
            host=host,
            check="versions",
            level="fail" if name != "python" or _minor(version) != _minor(wanted) else "warn",
            saw=f"{name} {version}",
            wanted=f"{name} {wanted}, as on most hosts",
            fix=f"ssh -- {host} {by_host[host].executable} -m pip install {name}=={wanted}"
            if name != "python"
            else f"give {host} an environment with Python {wanted}",
        )
        for host, version in versions.items()
        if version and version != wanted
    ]


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _slots(cluster: Cluster, facts: Mapping[str, Facts]) -> list[Finding]:
    """With no accelerator anywhere the ranks run on processors, and slots are free to choose."""
    if not any(item.accelerators for item in facts.values()):
        return []
    findings = []
    for host in cluster.hosts:
        if host.name not in facts:
            continue
        have, highest = len(facts[host.name].accelerators), host.slots[-1]
        if highest >= have:
            findings.append(
                Finding(
                    host=host.name,
                    check="slots",
                    level="fail",
                    saw=f"{have} accelerator{'' if have == 1 else 's'}",
                    wanted=f"slot {highest} is used, so at least {highest + 1}",
                    fix=f"write '{host.name} slots={have}' in {cluster.origin}"
                    if have
                    else f"take {host.name} out of {cluster.origin}, or repair its driver (nvidia-smi)",
                )
            )
    return findings


def _folders(items: Sequence[Facts], needs: Needs) -> list[Finding]:
    findings = []
    for item in items:
        if not item.node_dir_writable:
            findings.append(
                Finding(
                    host=item.host,
                    check="node-dir",
                    level="fail",
                    saw=f"{item.node_dir} cannot be made or written",
                    wanted="a working folder the login may write to",
                    fix="set node_dir: in the run file to another folder",
                )
            )
        elif item.node_dir_free_bytes < needs.free_bytes:
            findings.append(
                Finding(
                    host=item.host,
                    check="disk",
                    level="fail",
                    saw=f"{item.node_dir_free_bytes / 2**30:.2f} GiB free at {item.node_dir}",
                    wanted=f"{needs.free_bytes / 2**30:.2f} GiB for code, data, checkpoints and the tuned model",
                    fix="free space there, or set node_dir: in the run file to another disk",
                )
            )
    return findings


def _trees(items: Sequence[Facts], needs: Needs) -> list[Finding]:
    findings = []
    for item in items:
        for path, here in needs.trees.items():
            there = item.trees.get(path, {"kind": "missing"})
            if there["kind"] == "missing" or there == here:
                continue
            removal = ("ssh", "--", item.host, shlex.join(("rm", "-r", path)))
            findings.append(
                Finding(
                    host=item.host,
                    check="content",
                    level="fail",
                    saw=f"{path} is there with other content{_difference(here, there)}",
                    wanted="the same content as here, or nothing at that path",
                    fix=f"{shlex.join(removal)}  # after a look at it; the next launch copies ours",
                )
            )
    return findings


def _difference(here: Mapping[str, Any], there: Mapping[str, Any]) -> str:
    odd = [
        name
        for name in sorted({*here["files"], *there["files"]})
        if here["files"].get(name) != there["files"].get(name)
    ]
    return f" (first difference: {odd[0]})" if odd and odd[0] else ""


def missing_trees(facts: Mapping[str, Facts], paths: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs (host, path) of what has to be copied."""
    return [
        (host, path)
        for host, item in facts.items()
        for path in paths
        if item.trees.get(path, {"kind": "missing"})["kind"] == "missing"
    ]


def unreachable(failed: Mapping[str, LlmtrainError]) -> list[Finding]:
    """Findings for hosts that gave no facts."""
    return [
        Finding(
            host=host,
            check="reach",
            level="fail",
            saw=error.error,
            wanted="a login over SSH and the interpreter of the ranks",
            fix=error.fix or f"ssh -- {host} true",
        )
        for host, error in failed.items()
    ]


def refuse_failures(findings: Sequence[Finding]) -> None:
    """Stop on the first certain failure, naming how many more there are.

    Raises:
        PreflightError: there is at least one finding of level ``fail``.
    """
    failures = [finding for finding in findings if finding.level == "fail"]
    if not failures:
        return
    first = failures[0]
    more = "".join(f"\n  {one.host}: {one.saw}; wanted {one.wanted}; fix: {one.fix}" for one in failures[1:])
    raise PreflightError(
        f"{first.saw} (wanted: {first.wanted})",
        where=first.host,
        fix=first.fix + (f"\nalso ({len(failures) - 1}):{more}" if more else ""),
    )
