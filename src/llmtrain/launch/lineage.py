"""Whether a run goes on in the environment it was begun in."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from llmtrain.cluster.findings import Finding
from llmtrain.launch.rundir import RunDir, state_dir

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmtrain.cluster.probes import Facts

_CHECKPOINT = re.compile(r"/runs/([^/]+)/checkpoints(/|$)")
KEYS = ("torch", "deepspeed", "transformers", "python")
"""What is named first where it changed."""


def software_of(item: Facts) -> dict[str, Any]:
    """What ``versions.json`` says about a host."""
    return {"python": item.python, "glibc": item.glibc, **item.packages, "environment": item.environment}


def read_software(resume: str | None) -> dict[str, dict[str, Any]]:
    """Host -> software under which the run that wrote a checkpoint was begun; empty where nothing is known of it."""
    found = _CHECKPOINT.search(resume or "")
    if found is None:
        return {}
    try:
        document = json.loads(RunDir(state_dir() / "runs" / found[1]).versions.read_text(encoding="utf-8"))
        return dict(document["hosts"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def judge_lineage(before: Mapping[str, Mapping[str, Any]], facts: Mapping[str, Facts]) -> list[Finding]:
    """A warning for every host whose environment is not the one the run was begun in. Pure.

    Args:
        before: what ``versions.json`` of the run says.
        facts: the hosts now; a host that is new is compared with any one of then, since all were alike.
    """
    if not before:
        return []
    usual = next(iter(before.values()))
    findings = []
    for name, item in facts.items():
        old, new = before.get(name, usual), software_of(item)
        if not old.get("environment") or old["environment"] == new["environment"]:
            continue
        changed = [f"{key} {old.get(key)} -> {new.get(key)}" for key in KEYS if old.get(key) != new.get(key)]
        saw = ", ".join(changed) or "some package was installed, removed or changed"
        findings.append(
            Finding(
                host=name,
                check="versions",
                level="warn",
                saw=f"the environment changed since the run that is resumed: {saw}",
                wanted=f"the environment of that run ({str(old['environment'])[:12]})",
                fix="llmtrain sync-env --rollback, if it was replaced by a sync",
            )
        )
    return findings
