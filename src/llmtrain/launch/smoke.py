"""The smoke test: a tiny model and three steps through the whole real path."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.cluster.fleet import Command, run_on_all
from llmtrain.errors import LauncherError, LlmtrainError, PreflightError
from llmtrain.launch.contact import open_fleet
from llmtrain.launch.job import Selection, read_job
from llmtrain.launch.run import launch
from llmtrain.launch.rundir import RunDir
from llmtrain.launch.verdict import Outcome
from llmtrain.spec.runfile import read_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmtrain.launch.run import Tell
    from llmtrain.spec.runspec import RunSpec

SLOTS = 2
STEPS = 3
STAGES = {
    "contact": "make model",
    "plan": "contact and check",
    "start": "stage",
    "ranks": "start ranks",
    "stopping": "train and save",
    "fetch": "stop",
    "end": "bring the model home",
}
"""Event -> the stage that has ended when it comes."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One part of the way and how long it took."""

    name: str
    """What was done."""
    seconds: float
    """How long."""


@dataclass(frozen=True, kw_only=True)
class SmokeReport:
    """How the smoke test went."""

    outcome: Outcome
    """The run's."""
    stages: tuple[Stage, ...]
    """In order."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        stages = [{"stage": stage.name, "seconds": round(stage.seconds, 2)} for stage in self.stages]
        return {**self.outcome.to_json(), "stages": stages}


def smoke(hosts: str | None, sets: Sequence[str], envs: Sequence[str], tell: Tell) -> SmokeReport:
    """Train a model of our own making for three steps, on this machine if no hostfile is named.

    Raises:
        LlmtrainError: it could not start.
    """
    clock = _Clock(tell)
    folder = Path(tempfile.mkdtemp(prefix="llmtrain-smoke-"))
    try:
        spec = _spec(folder, hosts, sets, envs)
        _make_model(folder / "model")
        _make_data(folder / "data.jsonl")
        try:
            outcome = launch(spec, Selection(), clock.tell)
        except PreflightError:
            raise  # nothing has been copied yet
        except LlmtrainError:
            _forget(spec, folder)
            raise
        if not isinstance(outcome, Outcome):
            raise AssertionError("a launch that is no dry run ends in an outcome")  # noqa: TRY004  a bug, not a type
        clock.tell("end", {})
        if outcome.ok:
            _check_model(Path(outcome.output or ""))
            _remove_run(RunDir(Path(outcome.run_dir)))
            outcome = replace(outcome, output=None)
        _forget(spec, folder)
        return SmokeReport(outcome=outcome, stages=tuple(clock.stages))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Clock:
    """Times the stages by the events of the launch, which it passes on."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._last = time.monotonic()
        self.stages: list[Stage] = []

    def tell(self, what: str, values: dict[str, Any]) -> None:
        if what in STAGES:
            now = time.monotonic()
            self.stages.append(Stage(name=STAGES[what], seconds=now - self._last))
            self._last = now
        self._tell(what, values)


def _spec(folder: Path, hosts: str | None, sets: Sequence[str], envs: Sequence[str]) -> RunSpec:
    if hosts is None:
        hosts = str(folder / "hostfile")
        Path(hosts).write_text(f"localhost slots={SLOTS}\n", encoding="utf-8")
    own = {
        "name": "smoke",
        "config": "zero3-offload",
        "output": str(folder / "tuned"),
        "model.path": str(folder / "model"),
        "data.path": str(folder / "data.jsonl"),
        "data.max_length": 64,
        "batch.micro": 1,
        "batch.accumulation": 1,
        "training.max_steps": STEPS,
        "training.loader_workers": 0,
    }
    options: dict[str, tuple[str, Any]] = {key: ("smoke", value) for key, value in own.items()}
    options["hosts"] = ("--hosts", hosts)
    empty = folder / "llmtrain.yaml"
    empty.write_text("{}\n", encoding="utf-8")
    return read_run(str(empty), options=options, sets=sets, envs=envs)


def _make_model(path: Path) -> None:
    made = subprocess.run(
        [sys.executable, "-m", "llmtrain.train.tinymodel", str(path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=path.parent,  # with -m Python imports from the current folder first
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(path.parent / "inductor")},  # else it stays in /tmp
    )
    if made.returncode != 0:
        tail = made.stderr.strip().splitlines()[-1:] or ["no output"]
        raise LauncherError(
            f"the tiny model could not be made: {tail[0]}",
            where="head",
            fix=f"{sys.executable} -c 'import torch, transformers'",
        )


def _make_data(path: Path) -> None:
    turns = [("user", "What is {a} plus {b}?"), ("assistant", "{a} plus {b} is {c}.")]
    with path.open("w", encoding="utf-8") as stream:
        for a in range(8):
            for b in range(8):
                messages = [{"role": role, "content": text.format(a=a, b=b, c=a + b)} for role, text in turns]
                stream.write(json.dumps({"messages": messages}) + "\n")


def _check_model(path: Path) -> None:
    missing = [name for name in ("config.json", "model.safetensors", "tokenizer.json") if not (path / name).is_file()]
    if missing:
        raise LauncherError(f"the tuned model lacks {', '.join(missing)}", where=str(path), fix="report this")


def _remove_run(run_dir: RunDir) -> None:
    """Nobody asks later for a smoke test that went well."""
    run_dir.link.unlink(missing_ok=True)
    shutil.rmtree(run_dir.path, ignore_errors=True)
    with contextlib.suppress(OSError):  # other runs lie there
        run_dir.path.parent.rmdir()


def _forget(spec: RunSpec, folder: Path) -> None:
    """Remove the copies of model and data that the launch made on the hosts."""
    job = read_job(spec.model_copy(update={"output": None}), Selection())
    if job.local:
        return
    try:
        fleet = open_fleet(job)
    except LlmtrainError:
        return
    try:
        run_on_all(list(fleet), lambda name: fleet[name].run(Command(argv=("rm", "-rf", str(folder)))))
    finally:
        fleet.close()
