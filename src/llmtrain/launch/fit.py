"""Whether a run fits its hosts, with what these really have: asked before anything is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmtrain.cluster.findings import Finding
from llmtrain.errors import DoesNotFitError, LlmtrainError
from llmtrain.plan.catalogue import plan_hardware
from llmtrain.plan.estimate import check_fit
from llmtrain.plan.request import USUAL, read_setup
from llmtrain.plan.shape import read_shape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmtrain.cluster.probes import Facts
    from llmtrain.launch.job import Job
    from llmtrain.plan.catalogue import Hardware

MIB = 1 << 20


def refuse_unfit(job: Job, facts: Mapping[str, Facts], config: Mapping[str, Any], *, cuda: bool) -> None:
    """Stop a fine-tune whose tensors alone are beyond its hosts.

    Nothing is said of programs of the user's, of models whose shape is not known, and of ranks on processors, whose
    memory is that of the host (the check ``memory`` knows a lower bound of it).

    Args:
        job: the run; ``--skip-check memory`` lets it through.
        facts: what the hosts said.
        config: DeepSpeed's configuration, without "auto".
        cuda: whether ranks compute on NVIDIA GPUs.

    Raises:
        DoesNotFitError: it certainly does not fit.
    """
    if not cuda or job.model is None or job.script is not None or "memory" in job.selection.skip_checks:
        return
    try:
        shape = read_shape(str(job.model.path))
    except LlmtrainError:  # a family that plan does not know: then nothing is certain
        return
    setup = read_setup(
        job.spec,
        config,
        ranks=job.cluster.world_size,
        slots=max(len(host.slots) for host in job.cluster.hosts),
    )
    items = list(facts.values())
    check_fit(
        shape,
        setup,
        _hardware(items),
        ram_bytes=min(item.memory_total_bytes for item in items),
        gpu_bytes=_smallest_gpu(items),
    )


def judge_unfit(job: Job, facts: Mapping[str, Facts], config: Mapping[str, Any], *, cuda: bool) -> list[Finding]:
    """The same as a finding of ``llmtrain check``, on the host with the least memory."""
    try:
        refuse_unfit(job, facts, config, cuda=cuda)
    except DoesNotFitError as error:
        least = min(facts.values(), key=lambda item: (_smallest_gpu([item]) or 0, item.memory_total_bytes))
        fix = error.fix or "llmtrain plan --compare"
        wanted = "memory for the run (llmtrain plan shows every term)"
        return [Finding(host=least.host, check="memory", level="fail", saw=error.error, wanted=wanted, fix=fix)]
    return []


def _hardware(items: Sequence[Facts]) -> Hardware:
    """The catalogue's entry; only speeds are taken from it, so an unknown accelerator is as good as any."""
    name = next((gpu.get("name") for item in items for gpu in item.accelerators if gpu.get("name")), None)
    try:
        return plan_hardware(name or USUAL)
    except LlmtrainError:
        return plan_hardware(USUAL)


def _smallest_gpu(items: Sequence[Facts]) -> int | None:
    """Bytes of the smallest GPU; None if some driver does not say."""
    sizes = [str(gpu.get("memory.total") or "") for item in items for gpu in item.accelerators]
    return min((int(size) * MIB for size in sizes), default=None) if all(map(str.isdigit, sizes)) else None
