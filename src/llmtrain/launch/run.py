"""The way of a launch: read, contact, plan, stage, execute, watch, bring the model home, tell."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.errors import LlmtrainError
from llmtrain.launch import verdict
from llmtrain.launch.asked import Asked
from llmtrain.launch.command import choose_launcher
from llmtrain.launch.contact import Contact, examine_hosts, open_fleet
from llmtrain.launch.delivery import Output, bring_home, choose_output, refuse_taken
from llmtrain.launch.ending import judge_end
from llmtrain.launch.execute import execute
from llmtrain.launch.job import Job, Selection, read_job
from llmtrain.launch.lineage import software_of
from llmtrain.launch.order import render_order
from llmtrain.launch.prepare import LaunchPlan, plan_launch
from llmtrain.launch.project import examine_output, send_code
from llmtrain.launch.rundir import RunDir, create_run_dir, new_run_id, write_private, write_record
from llmtrain.launch.stage import copy_missing, remove, remove_scratch, stage
from llmtrain.launch.supply import Agree, settle_replacements, supply_environment
from llmtrain.launch.verdict import Outcome
from llmtrain.launch.watch import Watch

if TYPE_CHECKING:
    from llmtrain.cluster.fleet import Fleet
    from llmtrain.spec.runspec import RunSpec
    from llmtrain.spec.script import Script

Tell = Callable[[str, dict[str, Any]], None]
"""Called with the name of what happened and its values; the terminal or a log shows it."""

STOP_GRACE_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A launch as far as it is known before a host is contacted."""

    job: Job
    """What the head knows."""
    run_id: str
    """Its name."""
    output: Output
    """Where the tuned model goes."""
    missing: tuple[str, ...]
    """What DeepSpeed's runner needs here and is not there."""


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


def read_wanted(spec: RunSpec, selection: Selection, script: Script | None = None) -> Wanted:
    """Read everything that lies on the head.

    Raises:
        LlmtrainError: a file cannot be used, or something is missing.
    """
    job = read_job(spec, selection, script)
    missing = _find_missing()
    choose_launcher(spec.launcher, local=job.local, missing=missing)  # before any host is contacted
    run_id = new_run_id(spec.name)
    return Wanted(job=job, run_id=run_id, output=choose_output(job, run_id), missing=missing)


def launch(
    spec: RunSpec, selection: Selection, tell: Tell, *, dry_run: bool = False, script: Script | None = None
) -> Outcome | LaunchPlan:
    """A dry run, or a launch in this process that asks nobody.

    Raises:
        LlmtrainError: the run could not start. Once ranks have started every end is an :class:`Outcome`.
    """
    wanted, asked = read_wanted(spec, selection, script), Asked()
    with asked.signals():
        return plan_only(wanted, tell) if dry_run else carry_out(wanted, tell, asked, None)


def plan_only(wanted: Wanted, tell: Tell) -> LaunchPlan:
    """Ask the hosts and plan; nothing is written anywhere."""
    tell("contact", {"hosts": list(wanted.job.cluster.names)})
    fleet = open_fleet(wanted.job)
    try:
        return _prepare(wanted, fleet, tell, None, dry_run=True).plan
    finally:
        fleet.close()


def carry_out(wanted: Wanted, tell: Tell, asked: Asked, agree: Agree | None) -> Outcome:
    """Fine-tune, or run a program of the user's, over the hosts of the run.

    Args:
        wanted: the run.
        tell: called for everything a person would want to see.
        asked: requests to stop.
        agree: asked before anything but a missing model or data is brought to hosts; None if nobody can be asked.

    Raises:
        LlmtrainError: the run could not start. Once ranks have started every end is an :class:`Outcome`.
    """
    tell("contact", {"hosts": list(wanted.job.cluster.names)})
    fleet = open_fleet(wanted.job)
    try:
        ready = _prepare(wanted, fleet, tell, agree, dry_run=False)
        settle_replacements(ready.plan, wanted.job.cluster.origin, agree)
        return _carry_out(ready, fleet, tell, asked)
    finally:
        fleet.close()


def _prepare(wanted: Wanted, fleet: Fleet, tell: Tell, agree: Agree | None, *, dry_run: bool) -> Prepared:
    job = wanted.job
    supply_environment(job, fleet, agree, tell, dry_run=dry_run)
    contact = examine_hosts(job, fleet)
    refuse_taken(wanted.output, fleet)
    plan = plan_launch(job, contact, wanted.run_id, dict(os.environ), missing=wanted.missing)
    tell("plan", {"plan": plan, "output": str(wanted.output), "warnings": contact.warnings})
    return Prepared(job=job, contact=contact, plan=plan, output=wanted.output)


def _find_missing() -> tuple[str, ...]:
    """What DeepSpeed's runner needs here and is not there."""
    missing = [name for name in ("deepspeed", "torch") if find_spec(name) is None]
    return (*missing, "pdsh") if shutil.which("pdsh") is None else tuple(missing)


def _carry_out(ready: Prepared, fleet: Fleet, tell: Tell, asked: Asked) -> Outcome:
    plan = ready.plan
    run_dir = create_run_dir(plan.run_id, Path.cwd())
    _write_head(ready, run_dir)
    tell("run_dir", {"path": str(run_dir.path), "run_id": plan.run_id})
    watch = Watch(plan, fleet, run_dir, tell)
    try:
        copy_missing(plan, fleet, tell)
        stage(plan, fleet)
        if plan.own_script:
            send_code(plan, fleet)
        tell("start", {"world_size": plan.world_size})
        watch.open()
    except LlmtrainError as error:
        _write_failed_start(run_dir, error)
        with contextlib.suppress(LlmtrainError):
            remove(plan, fleet, names=ready.job.cluster.names)
        raise
    outcome = _train(ready, fleet, watch, run_dir, tell, asked)
    if outcome.ok:
        outcome = bring_home(ready.plan, ready.output, fleet, outcome, tell)
    _clean(ready, fleet, outcome)
    write_record(run_dir.outcome, outcome.to_json())
    return outcome


def _write_head(ready: Prepared, run_dir: RunDir) -> None:
    for name, text in ready.plan.head_files.items():
        write_private(run_dir.path / name, text)
    hosts = [{"name": host.name, "slots": host.slots, "ranks": host.ranks} for host in ready.plan.hosts]
    write_record(run_dir.run_file, {**ready.plan.run, "hosts": hosts, "output": str(ready.output)})
    write_record(run_dir.order, render_order(ready.job))
    facts = ready.contact.facts
    write_record(run_dir.versions, {"hosts": {name: software_of(item) for name, item in facts.items()}})


def _write_failed_start(run_dir: RunDir, error: LlmtrainError) -> None:
    failure = verdict.Failure(host=error.where, rank=None, cause="start", message=error.error, advice=error.fix)
    outcome = Outcome(
        ok=False, exit_code=error.exit_code, run_dir=str(run_dir.path), reason=error.error, first_failure=failure
    )
    write_record(run_dir.outcome, outcome.to_json())


def _train(ready: Prepared, fleet: Fleet, watch: Watch, run_dir: RunDir, tell: Tell, asked: Asked) -> Outcome:
    """From the first rank to a verified end."""
    with asked.in_order():
        try:
            launcher = execute(ready.plan, run_dir, fleet)
        except LlmtrainError as error:
            watch.close(None, grace_s=0.0)
            _write_failed_start(run_dir, error)
            raise
        try:
            watch.run(launcher, asked)
        finally:
            finished = watch.state.is_success(ready.plan.world_size)
            tell("stopping", {"finished": finished})
            watch.close(launcher, grace_s=0.0 if finished else STOP_GRACE_S)
        return judge_end(watch, run_dir, asked)


def _clean(ready: Prepared, fleet: Fleet, outcome: Outcome) -> None:
    """Leave on the hosts only what somebody may still want: checkpoints, and all of a failed run's records."""
    with contextlib.suppress(LlmtrainError):
        remove_scratch(ready.plan, fleet)
    if not outcome.ok:
        return
    names = list(ready.job.cluster.names)
    keep = ["checkpoints"] if ready.job.spec.training.save_steps else []
    with contextlib.suppress(LlmtrainError):
        if ready.plan.own_script:
            # Brought home was only rank 0's; a checkpoint in parts is of use only where its parts are.
            left = examine_output(ready.plan, fleet)
            first = ready.plan.hosts[0].name
            keepers = [host for host, item in left.items() if item.checkpoints or (item.files and host != first)]
            remove(ready.plan, fleet, names=keepers, keep=["output"])
            names = [name for name in names if name not in keepers]
        remove(ready.plan, fleet, names=names, keep=keep)
