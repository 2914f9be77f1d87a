"""Go on from where a run ended: its order read back, and the newest checkpoint that all its hosts have."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.errors import InputFileError, UsageError
from llmtrain.launch.contact import open_fleet
from llmtrain.launch.job import Selection, read_job
from llmtrain.launch.jobs import read_document, read_status
from llmtrain.launch.recover import Tell, recover_checkpoint
from llmtrain.spec.runfile import lay_over, read_env_file, read_run
from llmtrain.spec.runspec import RunSpec
from llmtrain.spec.script import Script

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmtrain.launch.rundir import RunDir

_STEP = re.compile(r"step-(\d+)/?$")


@dataclass(frozen=True, kw_only=True)
class Order:
    """A run as it was asked for."""

    spec: RunSpec
    """The run file and all options."""
    selection: Selection
    """Options about hosts."""
    script: Script | None
    """The user's program."""


def read_order(run_dir: RunDir, *, envs: Mapping[str, str], sets: Sequence[str] = ()) -> Order:
    """What was asked for; values of variables are read anew.

    Args:
        run_dir: the run.
        envs: variables given now; others come from the run file, its ``env_file``, and our own environment.
        sets: ``KEY=VALUE`` texts that change it.

    Raises:
        InputFileError: the folder does not say.
        UsageError: a variable has no value any more.
    """
    document = read_document(run_dir.order)
    if not document:
        raise InputFileError("the run does not say how it was started", where=str(run_dir.order), fix="start it anew")
    kept = document["spec"]
    values = {**_read_variables(kept.get("env_file"), document["selection"].get("run_file")), **envs}
    for name in document["env_names"]:
        value = values.get(name, os.environ.get(name))
        if value is None:
            raise UsageError(
                f"the run had a variable {name}, and values are not kept", where="--env", fix=f"add --env {name}=VALUE"
            )
        values[name] = value
    spec = RunSpec.model_validate_json(json.dumps(lay_over({**kept, "env": values}, sets)))
    selection = {**document["selection"], "skip_checks": frozenset(document["selection"]["skip_checks"])}
    script = document["script"]
    return Order(
        spec=spec,
        selection=Selection(**selection),
        script=Script(**{**script, "args": tuple(script["args"])}) if script else None,
    )


def _read_variables(env_file: str | None, run_file: str | None) -> dict[str, str]:
    """Those of both files as they are now; the run file's win, as they did."""
    found = read_env_file(env_file) if env_file else {}
    if run_file and Path(run_file).is_file():
        found.update(read_run(run_file).env)
    return found


def plan_resume(run_dir: RunDir, order: Order, hosts: str | None, tell: Tell) -> Order:
    """The order of a run that goes on from another's newest checkpoint.

    A host whose disk was erased, or that stands in the place of another, is given its files from the host that keeps
    their copy.

    Raises:
        UsageError: it still runs, or is done, or has no checkpoint.
    """
    status = read_status(run_dir)
    if status.status in {"running", "done"}:
        fix = f"llmtrain attach {status.run_id}" if status.status == "running" else "start another run"
        raise UsageError(f"the run is {status.status}", where=status.run_id, fix=fix)
    if order.script is not None:
        raise UsageError(
            "checkpoints of a script of yours are its own",
            where=status.run_id,
            fix="launch it again with its own option",
        )
    spec = order.spec if hosts is None else order.spec.model_copy(update={"hosts": hosts})
    selection = (
        order.selection
        if hosts is None
        else Selection(skip_checks=order.selection.skip_checks, run_file=order.selection.run_file)
    )
    job = read_job(spec, selection)
    folder = str(read_document(run_dir.run_file)["checkpoints"])
    fleet = open_fleet(job)
    try:
        # An attempt that saved nothing itself went on from another's.
        earlier = [str(Path(spec.training.resume).parent)] if spec.training.resume else []
        names = list(job.cluster.names)
        found = next(filter(None, (recover_checkpoint(fleet, names, one, tell) for one in (folder, *earlier))), None)
    finally:
        fleet.close()
    if found is None:
        raise UsageError(
            "no checkpoint is on all hosts", where=folder, fix="start it anew; training.save_steps makes checkpoints"
        )
    training = spec.training.model_copy(update={"resume": found})
    return Order(spec=spec.model_copy(update={"training": training}), selection=selection, script=None)


def checkpoint_step(path: str | None) -> int:
    """The step after which a checkpoint was written, by its name; 0 for none. Pure."""
    found = _STEP.search(path or "")
    return int(found[1]) if found else 0
