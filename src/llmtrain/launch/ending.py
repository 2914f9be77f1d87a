"""From what a watch has seen to the outcome of the run. Pure."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import TYPE_CHECKING

from llmtrain.errors import ExitCode, StoppedError
from llmtrain.launch import verdict
from llmtrain.launch.verdict import Outcome
from llmtrain.launch.xid import judge_xid

if TYPE_CHECKING:
    from llmtrain.launch.asked import Asked
    from llmtrain.launch.rundir import RunDir
    from llmtrain.launch.watch import Watch


def judge_end(watch: Watch, run_dir: RunDir, asked: Asked) -> Outcome:
    """What happened, in one sentence and a code."""
    state, world_size = watch.state, watch.plan.world_size
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
    if state.is_success(world_size):
        if state.saved is not None:
            return _with_leftovers(_stopped_saved(base, asked, state.saved))
        reason = f"{world_size} ranks done after {state.last_step} steps"
        return _with_leftovers(replace(base, ok=True, reason=reason))
    if asked.number is not None and not state.failed and not state.noted:
        stopped = StoppedError(asked.number)
        late = f"; no checkpoint within {watch.plan.save_deadline_s:.0f} s" if watch.save_is_late else ""
        ended = replace(base, exit_code=stopped.exit_code, reason=f"{stopped.error}{late}")
        return _with_leftovers(_with_unverified(ended))
    first = verdict.choose_first(state.failed)
    if first is not None and not (state.noted and verdict.is_consequent(first[1])):
        failure, code = verdict.explain(*first)
    else:
        failure, code = state.noted[0]
    failure, code = judge_xid(failure, code, state.kernel, failure.host)
    what = f"rank {failure.rank} on {failure.host}" if failure.rank is not None else failure.host or "the head"
    folded = len(state.failed) + len(state.noted) - 1
    ended = replace(base, exit_code=code, reason=f"{what}: {failure.message}", first_failure=failure, folded=folded)
    return _with_leftovers(ended)


def _stopped_saved(base: Outcome, asked: Asked, saved: str) -> Outcome:
    """Stopped in order: whoever sent TERM wants to start it again later."""
    number = asked.number or signal.SIGINT
    code = ExitCode.SAVED if number == signal.SIGTERM else ExitCode.INTERRUPTED
    reason = f"stopped by {signal.Signals(number).name}, saved after step {base.last_step}"
    return replace(base, exit_code=code, reason=reason, saved=saved)


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
