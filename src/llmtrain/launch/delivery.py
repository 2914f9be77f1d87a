"""Where the tuned model goes, and how it gets there."""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.cluster.fleet import Command
from llmtrain.errors import DiskError, LlmtrainError, UsageError
from llmtrain.launch import verdict
from llmtrain.launch.project import examine_output
from llmtrain.launch.stage import LinkError, fetch_tree, send_tree

if TYPE_CHECKING:
    from llmtrain.cluster.fleet import Fleet
    from llmtrain.launch.job import Job
    from llmtrain.launch.prepare import LaunchPlan
    from llmtrain.launch.verdict import Outcome

Tell = Callable[[str, dict[str, Any]], None]
PATIENCE_S = 120.0
"""A host whose sshd is restarted, or whose network is away for a moment, is asked again for so long."""
AGAIN_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where the tuned model goes."""

    host: str | None
    """A host, or None for the head."""
    path: str
    """Absolute path there."""

    def __str__(self) -> str:
        return f"{self.host}:{self.path}" if self.host else self.path


def choose_output(job: Job, run_id: str) -> Output:
    """The user's place if there is nothing yet, else the run's own folder.

    Raises:
        UsageError: something is there already, or the host is not one of the run's.
    """
    if job.spec.output is None:
        return Output(host=None, path=str(Path.cwd() / "runs" / run_id / "model"))
    host, colon, path = job.spec.output.partition(":")
    if colon and "/" not in host:
        if host not in job.cluster.names or not path.startswith("/"):
            raise UsageError(
                f"output {job.spec.output} is neither a folder here nor HOST:/PATH on a host of this run",
                where="output",
                fix=f"write for example {job.cluster.names[0]}:/data/model",
            )
        return Output(host=host, path=path)
    place = Path(job.spec.output)
    if place.exists():
        raise _taken(job.spec.output)
    parent = next(folder for folder in place.parents if folder.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        raise UsageError(
            "the output cannot be made there", where=str(parent), fix="name an --output where you may write"
        )
    return Output(host=None, path=job.spec.output)


def refuse_taken(output: Output, fleet: Fleet) -> None:
    """An output on a host is looked at before the training, not after it."""
    if output.host and fleet[output.host].run(Command(argv=("test", "-e", output.path))).code == 0:
        raise _taken(str(output))


def _taken(place: str) -> UsageError:
    return UsageError(
        "the output exists, and is never overwritten", where=place, fix="name another --output, or move it"
    )


def bring_home(plan: LaunchPlan, output: Output, fleet: Fleet, outcome: Outcome, tell: Tell) -> Outcome:
    """Bring the model from rank 0's host to where the user wants it."""
    first = plan.hosts[0]
    source = f"{first.own_dir}/output"
    if plan.own_script:
        left = examine_output(plan, fleet)
        found = {host: list(item.checkpoints) for host, item in left.items() if item.checkpoints}
        outcome = replace(outcome, checkpoints=found)
        if first.name in left and not left[first.name].files:
            return outcome  # a program need not write anything
    tell("fetch", {"host": first.name, "output": str(output)})
    try:
        _patiently(lambda: _deliver(plan, output, fleet, source, lambda sent: tell("fetched", {"sent": sent})), tell)
    except LlmtrainError as error:
        reason = f"trained, but the model could not be delivered: {error.error}"
        failure = verdict.Failure(
            host=first.name,
            rank=None,
            cause="delivery",
            message=error.error,
            advice=_render_rescue(first.name, source, output),
        )
        return replace(outcome, ok=False, exit_code=error.exit_code, reason=reason, first_failure=failure)
    return replace(outcome, output=str(output))


def _render_rescue(host: str, source: str, output: Output) -> str:
    fetch = shlex.join(("scp", "-rp", "--", f"{host}:{source}", output.path if output.host is None else "."))
    return f"{fetch}  # it is still there, and stays there"


def _patiently(deliver: Callable[[], None], tell: Tell) -> None:
    """Try again for a while if the host cannot be reached: hours of training must not be lost to a restarted sshd."""
    deadline = time.monotonic() + PATIENCE_S
    while (problem := _attempt(deliver)) is not None:
        if time.monotonic() > deadline:
            raise problem
        tell("again", {"host": problem.where, "problem": problem.error, "seconds": AGAIN_S})
        time.sleep(AGAIN_S)


def _attempt(deliver: Callable[[], None]) -> LinkError | None:
    try:
        deliver()
    except LinkError as error:
        return error
    return None


def _deliver(plan: LaunchPlan, output: Output, fleet: Fleet, source: str, progress: Callable[[int], None]) -> None:
    first = plan.hosts[0]
    if output.host is None and plan.local:
        try:
            Path(output.path).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(source, output.path)
        except OSError as error:
            raise DiskError(f"cannot be moved: {error.strerror}", where=output.path, fix="df -h") from None
    elif output.host is None:
        fetch_tree(fleet, first.name, source, Path(output.path), progress)
    else:
        part = Path(plan.run_id + "-model").resolve()
        fetch_tree(fleet, first.name, source, part, progress)
        try:
            send_tree(str(part), fleet, output.host, output.path, progress)
        finally:
            shutil.rmtree(part, ignore_errors=True)
