"""What was asked for, kept so that a run can be resumed from its folder; never with values of variables."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmtrain.launch.job import Job


def render_order(job: Job) -> dict[str, Any]:
    """The order of a job. Pure."""
    spec = job.spec.model_dump(mode="json", by_alias=True, exclude={"env"})
    selection = {**asdict(job.selection), "skip_checks": sorted(job.selection.skip_checks)}
    script = asdict(job.script) if job.script else None
    return {"spec": spec, "env_names": sorted(job.spec.env), "selection": selection, "script": script}
