"""A launch while it happens: one progress line on a terminal, plain lines otherwise. Everything goes to stderr."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from llmtrain.report.errors import clean
from llmtrain.report.plan import show_plan
from llmtrain.report.sync import SyncLive, show_sync

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmtrain.launch.smoke import Stage
    from llmtrain.launch.verdict import Outcome
    from llmtrain.spec.choice import Choice

PLAIN_EVERY_S = 10.0
PHASES = {
    "load": "loading the model",
    "data": "preparing the data",
    "save": "saving the model",
    "eval": "evaluating",
    "script": "running the script",
}


class Live:
    """Shows what a launch tells."""

    def __init__(self, *, brief: bool = False) -> None:
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.brief = brief
        self.fancy = self.console.is_terminal
        self.progress: Progress | None = None
        self.task: TaskID | None = None
        self.begun = time.monotonic()
        self.first_step: tuple[int, float] | None = None
        self.last_line = 0.0
        self.copied: dict[tuple[str, str], float] = {}
        self.sync: SyncLive | None = None

    def tell(self, what: str, values: dict[str, Any]) -> None:
        """Take one event of the launch."""
        handler = getattr(self, f"_on_{what}", None)
        if handler is not None:
            handler(values)

    def say(self, text: str) -> None:
        """One line above the progress line."""
        line = clean(text)
        (self.progress.console if self.progress else self.console).print(line, markup=False)

    @property
    def can_ask(self) -> bool:
        """Whether somebody sits at a terminal and sees questions."""
        return sys.stdin.isatty() and self.fancy

    def ask(self, question: str) -> bool:
        """Ask, and take only a clear yes for one."""
        self.close()
        self.console.print(f"{clean(question)} [y/N] ", markup=False, end="")
        return sys.stdin.readline().strip().lower() in {"y", "yes"}

    def close(self) -> None:
        """Take the progress line away."""
        if self.sync:
            self.sync.close()
        if self.progress:
            self.progress.stop()
            self.progress = None

    def _on_contact(self, values: dict[str, Any]) -> None:
        hosts = values["hosts"]
        self.say(f"contacting {len(hosts)} host{'s' if len(hosts) > 1 else ''}: {', '.join(hosts[:8])}")

    def _on_plan(self, values: dict[str, Any]) -> None:
        for finding in values["warnings"]:
            self.say(f"warning: {finding.host}: {finding.saw} (wanted: {finding.wanted})")
        if not self.brief:
            show_plan(self.console, values["plan"], values["output"])

    def _on_run_dir(self, values: dict[str, Any]) -> None:
        self.say(f"run folder: {values['path']}")

    def _on_queue(self, values: dict[str, Any]) -> None:
        self.say(f"waiting for {values['host']}: {values['text']}")

    def _on_copy_wait(self, values: dict[str, Any]) -> None:
        self.say(f"another launch is copying {values['path']} to {values['host']}: waiting for it")

    def _on_copy(self, values: dict[str, Any]) -> None:
        key = (values["host"], values["path"])
        share = values["sent"] / max(1, values["total"])
        if share >= 1 and self.copied.get(key, 0) >= 1:
            return
        if time.monotonic() - self.last_line > 1.0 or share >= 1:
            self.last_line = time.monotonic()
            self.copied[key] = share
            self.say(f"copying {values['path']} to {values['host']}: {min(1.0, share):.0%} of {_size(values['total'])}")

    def _on_copied(self, values: dict[str, Any]) -> None:
        for host, problem in values["failed"].items():
            self.say(f"warning: {values['checkpoint']} of {host} has no copy on another host: {problem}")

    def _on_bring(self, values: dict[str, Any]) -> None:
        whose = "" if values["owner"] == values["host"] else f", in the place of {values['owner']}"
        self.say(
            f"{values['host']} lacks {values['checkpoint']}{whose}: bringing the copy that {values['keeper']} keeps"
        )

    def _on_brought(self, values: dict[str, Any]) -> None:
        self.say(f"{values['host']} has {values['checkpoint']} again, {_size(values['bytes'])}")

    def _on_sync(self, values: dict[str, Any]) -> None:
        """What a sync tells that the launch carries out; each one has bars of its own."""
        self.sync = self.sync or SyncLive()
        self.sync.tell(values["what"], values["values"])

    def _on_synced(self, values: dict[str, Any]) -> None:
        show_sync(self.sync or SyncLive(), values["report"])
        self.sync = None

    def _on_start(self, values: dict[str, Any]) -> None:
        self.say(f"starting {values['world_size']} ranks")
        if self.fancy:
            self.progress = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[text]}"),
                TimeElapsedColumn(),
                console=self.console,
                transient=True,
            )
            self.task = self.progress.add_task("starting", total=None, text="")
            self.progress.start()

    def _on_ranks(self, values: dict[str, Any]) -> None:
        self.say(f"all {values['world_size']} ranks have started")

    def _on_phase(self, values: dict[str, Any]) -> None:
        text = PHASES.get(values["phase"])
        if text is None:
            return
        if self.progress and self.task is not None:
            self.progress.update(self.task, description=text)
        else:
            self.say(text)

    def _on_output(self, values: dict[str, Any]) -> None:
        """What rank 0 of a user's program prints."""
        for line in values["text"].splitlines():
            self.say(f"  | {line}")

    def _on_metrics(self, values: dict[str, Any]) -> None:
        if "eval_loss" in values:
            self.say(f"step {values['step']}: eval_loss {_number(values['eval_loss'])}")
        if "loss" not in values:
            return
        step, steps = values["step"], values.get("max_steps") or 0
        now = time.monotonic()
        self.first_step = self.first_step or (step, now)
        text = (
            f"loss {_number(values['loss'])}  {_number(values.get('tokens_per_s'), 0)} tokens/s  "
            f"{self._time_left(step, steps, now)}"
        )
        if self.progress and self.task is not None:
            self.progress.update(self.task, description=f"step {step}/{steps}", completed=step, total=steps, text=text)
        elif step in (1, steps) or now - self.last_line > PLAIN_EVERY_S:
            self.last_line = now
            self.say(f"step {step}/{steps}  {text}")

    def _time_left(self, step: int, steps: int, now: float) -> str:
        if self.first_step is None or step <= self.first_step[0]:
            return "time left unknown"
        per_step = (now - self.first_step[1]) / (step - self.first_step[0])
        return f"{_duration(per_step * (steps - step))} left"

    def _on_agreed(self, values: dict[str, Any]) -> None:
        self.say(f"{values['question']} --yes")

    def _on_saving(self, values: dict[str, Any]) -> None:
        limit = _duration(values["deadline_s"])
        self.say(f"saving after the step that runs, for at most {limit}; the same again stops now")

    def _on_restart(self, values: dict[str, Any]) -> None:
        self.close()
        self.say(f"failed: {values['after']}")
        self.say(f"restart {values['number']} of {values['of']} in {values['pause_s']:.0f} s: {values['why']}")

    def _on_spare(self, values: dict[str, Any]) -> None:
        self.say(f"{values['spare']} takes the place of {values['lost']}")

    def _on_resume(self, values: dict[str, Any]) -> None:
        self.say(f"going on from {values['checkpoint']}" if values["checkpoint"] else "no checkpoint: from the start")

    def _on_kernel(self, values: dict[str, Any]) -> None:
        self.say(f"{values['host']}: kernel: {values['line']}")

    def _on_stall(self, values: dict[str, Any]) -> None:
        self.say(f"no progress for {values['silent_s']:.0f} s: asking every rank what it is doing")

    def _on_stopping(self, values: dict[str, Any]) -> None:
        if not values["finished"]:
            self.close()
            self.say("stopping every process of this run on every host")

    def _on_fetch(self, values: dict[str, Any]) -> None:
        self.close()
        self.say(f"bringing the model from {values['host']} to {values['output']}")

    def _on_again(self, values: dict[str, Any]) -> None:
        self.say(f"{values['host']}: {values['problem']}; trying again in {values['seconds']:.0f} s")


def show_outcome(live: Live, outcome: Outcome) -> None:
    """The end of a launch in a few lines."""
    live.close()
    if outcome.ok:
        loss = "" if outcome.final_loss is None else f", final loss {outcome.final_loss:.4f}"
        live.say(f"done: {outcome.reason}{loss}")
        if outcome.output:
            live.say(f"model: {outcome.output}")
        for host, paths in outcome.checkpoints.items():
            live.say(f"checkpoints on {host}: {', '.join(paths)}")
        return
    failure = outcome.first_failure
    if outcome.saved:
        live.say(f"{outcome.reason}\ncheckpoint: {outcome.saved}, on every host")
        live.say(f"to go on: llmtrain resume {Path(outcome.run_dir).name}")
    elif failure is None:
        live.say(f"{outcome.reason} at step {outcome.last_step}; run folder: {outcome.run_dir}")
    else:
        if failure.tail:
            label = f"rank {failure.rank} on {failure.host}" if failure.rank is not None else failure.host or "launcher"
            live.say(f"last lines of {label}:\n" + "\n".join(f"  | {line}" for line in failure.tail.splitlines()[-12:]))
        place = failure.host or "head"
        place += f", rank {failure.rank}" if failure.rank is not None else ""
        place += f", {failure.where}" if failure.where else ""
        live.say(f"error: {failure.message}\nwhere: {place}\nfix: {failure.advice or 'see the logs'}")
        if outcome.folded:
            live.say(f"{outcome.folded} further failures came after it, and of it")
        live.say(f"the run ended at step {outcome.last_step}; its folder: {outcome.run_dir}")
    for host in outcome.unverified:
        live.say(f"warning: {host} did not confirm that its ranks are gone; they end when the lease runs out")


def _number(value: float | None, digits: int = 4) -> str:
    return "nan" if value is None else f"{value:,.{digits}f}"


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def show_stages(live: Live, stages: Sequence[Stage]) -> None:
    """A table of stages and times."""
    for stage in stages:
        live.say(f"{stage.name:<22}{stage.seconds:7.1f} s")
    live.say(f"{'total':<22}{sum(stage.seconds for stage in stages):7.1f} s")


def show_choices(choices: Sequence[Choice]) -> None:
    """What was chosen and why, on standard error."""
    for choice in choices:
        value = "(left out)" if choice.value is None else choice.value
        print(clean(f"{choice.key} = {value}: {choice.reason}"), file=sys.stderr)
