"""The way of a launch: read, contact, plan, stage, execute, watch, bring the model home, tell."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.errors import ExitCode, LlmtrainError, StoppedError
from llmtrain.launch import verdict
from llmtrain.launch.command import choose_launcher
from llmtrain.launch.contact import Contact, examine_hosts, open_fleet
from llmtrain.launch.delivery import Output, bring_home, choose_output, refuse_taken
from llmtrain.launch.execute import execute
from llmtrain.launch.fit import refuse_unfit
from llmtrain.launch.job import Job, Selection, read_job
from llmtrain.launch.lineage import software_of
from llmtrain.launch.prepare import LaunchPlan, plan_launch
from llmtrain.launch.project import examine_output, send_code
from llmtrain.launch.rundir import RunDir, create_run_dir, new_run_id, write_private, write_record
from llmtrain.launch.stage import copy_missing, remove, remove_scratch, stage
from llmtrain.launch.supply import Agree, settle_replacements, supply_environment
from llmtrain.launch.verdict import Outcome
from llmtrain.launch.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llmtrain.cluster.fleet import Fleet
    from llmtrain.spec.runspec import RunSpec
    from llmtrain.spec.script import Script

Tell = Callable[[str, dict[str, Any]], None]
"""Called with the name of what happened and its values; the terminal or a log shows it."""

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


def launch(
    spec: RunSpec,
    selection: Selection,
    tell: Tell,
    *,
    dry_run: bool = False,
    script: Script | None = None,
    agree: Agree | None = None,
) -> Outcome | LaunchPlan:
    """Fine-tune, or run a program of the user's, over the hosts of the run.

    Args:
        spec: the run.
        selection: options about hosts.
        tell: called for everything a person would want to see.
        dry_run: stop before anything is written and return the plan.
        script: a program of the user's instead of the fine-tune.
        agree: asked before anything but a missing model or data is brought to hosts; None if nobody can be asked.

    Raises:
        LlmtrainError: the run could not start. Once ranks have started every end is an :class:`Outcome`.
    """
    job = read_job(spec, selection, script)
    missing = _find_missing()
    choose_launcher(spec.launcher, local=job.local, missing=missing)  # before any host is contacted
    run_id = new_run_id(spec.name)
    output = choose_output(job, run_id)
    tell("contact", {"hosts": list(job.cluster.names)})
    with _signals() as asked:
        fleet = open_fleet(job)
        try:
            supply_environment(job, fleet, agree, tell, dry_run=dry_run)
            contact = examine_hosts(job, fleet)
            refuse_taken(output, fleet)
            plan = plan_launch(job, contact, run_id, dict(os.environ), missing=missing)
            refuse_unfit(job, contact.facts, plan.deepspeed.config, cuda=contact.hardware.accelerator == "cuda")
            tell("plan", {"plan": plan, "job": job, "output": str(output), "warnings": contact.warnings})
            if dry_run:
                return plan
            settle_replacements(plan, job.cluster.origin, agree)
            return _carry_out(Prepared(job=job, contact=contact, plan=plan, output=output), fleet, tell, asked)
        finally:
            fleet.close()


def _find_missing() -> tuple[str, ...]:
    """What DeepSpeed's runner needs here and is not there."""
    missing = [name for name in ("deepspeed", "torch") if find_spec(name) is None]
    return (*missing, "pdsh") if shutil.which("pdsh") is None else tuple(missing)


def _carry_out(ready: Prepared, fleet: Fleet, tell: Tell, asked: _Asked) -> Outcome:
    plan = ready.plan
    run_dir = create_run_dir(plan.run_id, Path.cwd())
    _write_head(ready, run_dir)
    tell("run_dir", {"path": str(run_dir.path)})
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
    facts = ready.contact.facts
    write_record(run_dir.versions, {"hosts": {name: software_of(item) for name, item in facts.items()}})


def _write_failed_start(run_dir: RunDir, error: LlmtrainError) -> None:
    failure = verdict.Failure(host=error.where, rank=None, cause="start", message=error.error, advice=error.fix)
    outcome = Outcome(
        ok=False, exit_code=error.exit_code, run_dir=str(run_dir.path), reason=error.error, first_failure=failure
    )
    write_record(run_dir.outcome, outcome.to_json())


def _train(ready: Prepared, fleet: Fleet, watch: Watch, run_dir: RunDir, tell: Tell, asked: _Asked) -> Outcome:
    """From the first rank to a verified end."""
    with asked.in_order():
        try:
            launcher = execute(ready.plan, run_dir, fleet)
        except LlmtrainError as error:
            watch.close(None, grace_s=0.0)
            _write_failed_start(run_dir, error)
            raise
        try:
            watch.run(launcher, asked.event)
        finally:
            finished = watch.state.is_success(ready.plan.world_size)
            tell("stopping", {"finished": finished})
            watch.close(launcher, grace_s=0.0 if finished else STOP_GRACE_S)
        return _judge(ready, watch, run_dir, asked)


def _judge(ready: Prepared, watch: Watch, run_dir: RunDir, asked: _Asked) -> Outcome:
    state = watch.state
    base = Outcome(
        ok=False,
        exit_code=ExitCode.OK,
        run_dir=str(run_dir.path),
        reason="",
        last_step=state.last_step,
        final_loss=state.final_loss,
        leftovers={host: pids for host, pids in state.stopped.items() if pids},
        unverified=watch.unverified,
    )
    if state.is_success(ready.plan.world_size):
        reason = f"{ready.plan.world_size} ranks done after {state.last_step} steps"
        return _with_leftovers(replace(base, ok=True, reason=reason))
    if asked.number is not None and not state.failed and not state.noted:
        stopped = StoppedError(asked.number)
        return _with_leftovers(_with_unverified(replace(base, exit_code=stopped.exit_code, reason=stopped.error)))
    first = verdict.choose_first(state.failed)
    if first is not None and not (state.noted and verdict.is_consequent(first[1])):
        failure, code = verdict.explain(*first)
    else:
        failure, code = state.noted[0]
    what = f"rank {failure.rank} on {failure.host}" if failure.rank is not None else failure.host or "the head"
    reason = f"{what}: {failure.message}"
    return _with_leftovers(replace(base, exit_code=code, reason=reason, first_failure=failure))


def _with_unverified(outcome: Outcome) -> Outcome:
    """Whoever stops a run believes 130 and 143 to mean that nothing of it is left."""
    if not outcome.unverified:
        return outcome
    reason = f"{outcome.reason}, but not confirmed by {', '.join(outcome.unverified)}"
    return replace(outcome, exit_code=ExitCode.LEFTOVER, reason=reason)


def _with_leftovers(outcome: Outcome) -> Outcome:
    if not outcome.leftovers:
        return outcome
    listed = ", ".join(f"{host}: {pids}" for host, pids in outcome.leftovers.items())
    reason = f"{outcome.reason}; some processes could not be ended ({listed})"
    return replace(outcome, ok=False, exit_code=ExitCode.LEFTOVER, reason=reason)


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


class _Asked:
    """Whether and how the user asked for a stop."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.number: int | None = None
        self._in_order = False

    def note(self, number: int, _frame: object) -> None:
        """Handle a signal: while ranks run it is only noted, before and after it ends what we are doing."""
        self.number = self.number or number
        self.event.set()
        if not self._in_order:
            raise StoppedError(number)

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        """From the first rank to a verified end nothing may be cut short."""
        self._in_order = True
        try:
            yield
        finally:
            self._in_order = False


@contextlib.contextmanager
def _signals() -> Iterator[_Asked]:
    """Ctrl-C, TERM and HUP end the run in order instead of ending only this process."""
    asked = _Asked()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, asked.note) for number in numbers}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
