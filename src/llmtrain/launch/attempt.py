"""One attempt at a run: staged, started, watched to a verified end."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmtrain.errors import LlmtrainError
from llmtrain.launch import verdict
from llmtrain.launch.ending import judge_end
from llmtrain.launch.execute import execute
from llmtrain.launch.lineage import software_of
from llmtrain.launch.order import render_order
from llmtrain.launch.project import examine_output, send_code
from llmtrain.launch.rundir import RunDir, write_private, write_record
from llmtrain.launch.stage import copy_missing, remove, remove_scratch, stage
from llmtrain.launch.verdict import Outcome
from llmtrain.launch.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from llmtrain.cluster.fleet import Fleet
    from llmtrain.launch.asked import Asked
    from llmtrain.launch.contact import Contact
    from llmtrain.launch.delivery import Output
    from llmtrain.launch.job import Job
    from llmtrain.launch.prepare import LaunchPlan

    Tell = Callable[[str, dict[str, Any]], None]

STOP_GRACE_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A launch that could start now."""

    job: Job
    """What the head knows."""
    contact: Contact
    """What the hosts said."""
    plan: LaunchPlan
    """What will be written and run."""
    output: Output
    """Where the tuned model goes."""


def run_attempt(ready: Prepared, fleet: Fleet, run_dir: RunDir, tell: Tell, asked: Asked) -> Outcome:
    """From the first byte on a host to a verified end of all ranks.

    Raises:
        LlmtrainError: no rank was started.
    """
    plan = ready.plan
    watch = Watch(plan, fleet, run_dir, tell)
    try:
        copy_missing(plan, fleet, tell)
        stage(plan, fleet)
        if plan.own_script:
            send_code(plan, fleet)
        tell("start", {"world_size": plan.world_size})
        watch.open()
        watch.lock(wait=ready.job.selection.wait)
    except LlmtrainError:
        with contextlib.suppress(LlmtrainError):
            remove(plan, fleet, names=ready.job.cluster.names)
        raise
    return _train(ready, fleet, watch, run_dir, tell, asked)


def write_head(ready: Prepared, run_dir: RunDir) -> None:
    """Write what the launcher reads here, and what others want to know."""
    for name, text in ready.plan.head_files.items():
        write_private(run_dir.path / name, text)
    hosts = [{"name": host.name, "slots": host.slots, "ranks": host.ranks} for host in ready.plan.hosts]
    write_record(run_dir.run_file, {**ready.plan.run, "hosts": hosts, "output": str(ready.output)})
    write_record(run_dir.order, render_order(ready.job))
    facts = ready.contact.facts
    write_record(run_dir.versions, {"hosts": {name: software_of(item) for name, item in facts.items()}})


def describe_failed_start(run_dir: RunDir, error: LlmtrainError) -> Outcome:
    """The outcome of an attempt that started no rank."""
    failure = verdict.Failure(host=error.where, rank=None, cause="start", message=error.error, advice=error.fix)
    return Outcome(
        ok=False, exit_code=error.exit_code, run_dir=str(run_dir.path), reason=error.error, first_failure=failure
    )


def _train(ready: Prepared, fleet: Fleet, watch: Watch, run_dir: RunDir, tell: Tell, asked: Asked) -> Outcome:
    """From the first rank to a verified end."""
    with asked.in_order():
        try:
            launcher = execute(ready.plan, run_dir, fleet)
        except LlmtrainError:
            watch.close(None, grace_s=0.0)
            raise
        try:
            watch.run(launcher, asked)
        finally:
            finished = watch.state.is_success(ready.plan.world_size)
            tell("stopping", {"finished": finished})
            watch.close(launcher, grace_s=0.0 if finished else STOP_GRACE_S)
        return judge_end(watch, run_dir, asked)


def clean_up(ready: Prepared, fleet: Fleet, outcome: Outcome) -> None:
    """Leave on the hosts only what somebody may still want: checkpoints, and all of a failed run's records."""
    with contextlib.suppress(LlmtrainError):
        remove_scratch(ready.plan, fleet)
    if not outcome.ok:
        return
    names = list(ready.job.cluster.names)
    spec = ready.job.spec
    keep = ["checkpoints"] if spec.training.save_steps or spec.checkpoint.dir else []
    with contextlib.suppress(LlmtrainError):
        if ready.plan.own_script:
            # Brought home was only rank 0's; a checkpoint in parts is of use only where its parts are.
            left = examine_output(ready.plan, fleet)
            first = ready.plan.hosts[0].name
            keepers = [host for host, item in left.items() if item.checkpoints or (item.files and host != first)]
            remove(ready.plan, fleet, names=keepers, keep=["output"])
            names = [name for name in names if name not in keepers]
        remove(ready.plan, fleet, names=names, keep=keep)
