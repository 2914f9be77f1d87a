"""Judge what hosts said about themselves, one module of ``checks`` per area. Pure: facts in, findings out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmtrain.cluster.checks.accelerators import judge_accelerators
from llmtrain.cluster.checks.build import judge_build
from llmtrain.cluster.checks.fabric import judge_fabric
from llmtrain.cluster.checks.files import judge_files
from llmtrain.cluster.checks.identity import judge_identity
from llmtrain.cluster.checks.machine import judge_machine
from llmtrain.cluster.checks.software import judge_software
from llmtrain.cluster.findings import Finding, sort_findings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmtrain.cluster.needs import Needs
    from llmtrain.cluster.probes import Facts
    from llmtrain.spec.hostfile import Cluster


def judge(cluster: Cluster, facts: Mapping[str, Facts], needs: Needs) -> list[Finding]:
    """All findings that are not ``ok``, worst first, then in rank order."""
    items = [facts[name] for name in cluster.names if name in facts]
    findings = [
        *judge_identity(items),
        *judge_software(items, needs),
        *judge_accelerators(cluster, facts, needs),
        *judge_files(items, needs),
        *judge_machine(items, needs),
        *judge_build(items, needs),
        *judge_fabric(items),
    ]
    return sort_findings(findings)
