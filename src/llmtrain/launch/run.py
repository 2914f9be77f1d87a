"""The way of a launch: read, contact, plan, stage, execute, watch, bring the model home, tell."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.errors import LlmtrainError, StoppedError
from llmtrain.launch.again import checkpoint_step
from llmtrain.launch.asked import Asked
from llmtrain.launch.attempt import Prepared, clean_up, describe_failed_start, run_attempt, write_head
from llmtrain.launch.command import choose_launcher
from llmtrain.launch.contact import examine_hosts, open_fleet
from llmtrain.launch.delivery import Output, bring_home, choose_output, refuse_taken
from llmtrain.launch.fit import refuse_unfit
from llmtrain.launch.job import Job, Selection, read_job
from llmtrain.launch.prepare import LaunchPlan, plan_launch
from llmtrain.launch.recover import recover_checkpoint
from llmtrain.launch.restart import choose_hosts, choose_pause, judge_again
from llmtrain.launch.rundir import RunDir, create_run_dir, new_run_id, write_record
from llmtrain.launch.stage import remove
from llmtrain.launch.supply import Agree, settle_replacements, supply_environment

if TYPE_CHECKING:
    from llmtrain.cluster.fleet import Fleet
    from llmtrain.launch.verdict import Outcome
    from llmtrain.spec.runspec import RunSpec
    from llmtrain.spec.script import Script

Tell = Callable[[str, dict[str, Any]], None]
"""Called with the name of what happened and its values; the terminal or a log shows it."""


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
        run_dir = create_run_dir(wanted.run_id, Path.cwd())
        write_head(ready, run_dir)
        tell("run_dir", {"path": str(run_dir.path), "run_id": wanted.run_id})
        outcome = _attempt(ready, fleet, run_dir, tell, asked)
    except BaseException:  # whatever it is goes on; only the connections must not stay open
        fleet.close()
        raise
    return _Series(wanted, run_dir, tell, asked).go_on(ready, fleet, outcome)


def _attempt(ready: Prepared, fleet: Fleet, run_dir: RunDir, tell: Tell, asked: Asked) -> Outcome:
    """The first attempt; one that could start no rank is raised, after it has been written down."""
    try:
        return run_attempt(ready, fleet, run_dir, tell, asked)
    except LlmtrainError as error:
        write_record(run_dir.outcome, describe_failed_start(run_dir, error).to_json())
        raise


class _Series:
    """Attempts at one run: after a failure it may be started again from its last checkpoint."""

    def __init__(self, wanted: Wanted, run_dir: RunDir, tell: Tell, asked: Asked) -> None:
        self.wanted = wanted
        self.run_dir = run_dir
        self.tell = tell
        self.asked = asked
        self.used = 0
        self.fruitless = 0
        self.plans: list[LaunchPlan] = []

    def go_on(self, ready: Prepared, fleet: Fleet, outcome: Outcome) -> Outcome:
        """Restart while that may help, then bring the model home and write down how it ended."""
        restart, begun_at = self.wanted.job.spec.restart, 0
        while True:
            again = judge_again(
                outcome, used=self.used, allowed=restart.max, begun_at=begun_at, fruitless=self.fruitless
            )
            if not again.ok or self.asked.event.is_set():
                break
            self.fruitless = self.fruitless + 1 if outcome.last_step <= begun_at else 0
            pause = choose_pause(self.used, restart.pause)
            values = {"number": self.used + 1, "of": restart.max, "why": again.reason, "pause_s": pause}
            self.tell("restart", {**values, "after": outcome.reason})
            self.plans.append(ready.plan)
            if self.asked.event.wait(pause):
                break
            self.used += 1
            fleet.close()
            try:
                ready, fleet = self._prepare_again(ready, outcome)
                begun_at = checkpoint_step(ready.job.spec.training.resume)
                outcome = run_attempt(ready, fleet, self.run_dir, self.tell, self.asked)
            except StoppedError:
                raise
            except LlmtrainError as error:
                outcome = replace(describe_failed_start(self.run_dir, error), last_step=outcome.last_step)
        try:
            return self._finish(ready, fleet, replace(outcome, restarts=self.used))
        finally:
            fleet.close()

    def _prepare_again(self, ready: Prepared, outcome: Outcome) -> tuple[Prepared, Fleet]:
        """Look at the hosts afresh, with spares in the places of lost ones, and at what checkpoints they have."""
        failure, job = outcome.first_failure, ready.job
        gone = (
            [failure.host] if failure and failure.host and failure.cause in {"host-lost", "host-frozen", "xid"} else []
        )
        cluster, swapped = choose_hosts(job.cluster, gone, job.spec.restart.spares)
        for lost, spare in swapped.items():
            self.tell("spare", {"lost": lost, "spare": spare})
        job = replace(job, cluster=cluster)
        fleet = open_fleet(job)
        try:
            found = self._find_checkpoint(fleet, job)
            training = job.spec.training.model_copy(update={"resume": found})
            job = replace(job, spec=job.spec.model_copy(update={"training": training}))
            wanted = replace(self.wanted, job=job, run_id=f"{self.wanted.run_id}-r{self.used}")
            again = _prepare(wanted, fleet, self.tell, None, dry_run=False)
            write_head(again, self.run_dir)
            self.tell("resume", {"checkpoint": found})
        except BaseException:  # as above
            fleet.close()
            raise
        return again, fleet

    def _find_checkpoint(self, fleet: Fleet, job: Job) -> str | None:
        for plan in reversed(self.plans):
            found = recover_checkpoint(fleet, list(job.cluster.names), str(plan.run["checkpoints"]), self.tell)
            if found is not None:
                return found
        return self.wanted.job.spec.training.resume

    def _finish(self, ready: Prepared, fleet: Fleet, outcome: Outcome) -> Outcome:
        if outcome.ok:
            outcome = bring_home(ready.plan, ready.output, fleet, outcome, self.tell)
        clean_up(ready, fleet, outcome)
        if outcome.ok:  # what earlier attempts have left is of no use any more
            for plan in self.plans:
                names = [host.name for host in plan.hosts if host.name in set(fleet)]
                with contextlib.suppress(LlmtrainError):
                    remove(plan, fleet, names=names)
        write_record(self.run_dir.outcome, outcome.to_json())
        return outcome


def _prepare(wanted: Wanted, fleet: Fleet, tell: Tell, agree: Agree | None, *, dry_run: bool) -> Prepared:
    job = wanted.job
    supply_environment(job, fleet, agree, tell, dry_run=dry_run)
    contact = examine_hosts(job, fleet)
    refuse_taken(wanted.output, fleet)
    plan = plan_launch(job, contact, wanted.run_id, dict(os.environ), missing=wanted.missing)
    refuse_unfit(job, contact.facts, plan.deepspeed.config, cuda=contact.hardware.accelerator == "cuda")
    tell("plan", {"plan": plan, "output": str(wanted.output), "warnings": contact.warnings})
    return Prepared(job=job, contact=contact, plan=plan, output=wanted.output)


def _find_missing() -> tuple[str, ...]:
    """What DeepSpeed's runner needs here and is not there."""
    missing = [name for name in ("deepspeed", "torch") if find_spec(name) is None]
    return (*missing, "pdsh") if shutil.which("pdsh") is None else tuple(missing)
