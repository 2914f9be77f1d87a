"""What a run says about itself while it trains: heartbeats of every rank, metrics and plain lines of rank 0."""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from llmtrain.errors import RankFailedError
from llmtrain.train.records import SCHEMA, Beat, append_json

if TYPE_CHECKING:
    from pathlib import Path

    from llmtrain.train.place import Place


MAX_SKIPPED = 10
"""Steps in a row with gradients that are not finite; DeepSpeed leaves the weights alone in each of them."""


class NonFiniteLossError(RankFailedError):
    """The loss became NaN or infinite."""


class NonFiniteGradientsError(RankFailedError):
    """Nothing is learned any more, because the gradients stay NaN or infinite."""


class Telemetry(TrainerCallback):  # type: ignore[misc]
    """Follows the trainer's events.

    The trainer logs after every optimizer step, on every rank, the loss as the mean over all trained tokens of the
    step (accumulation and ranks included), and ``num_tokens``, the tokens of all ranks so far without padding.
    """

    def __init__(self, *, metrics: Path, place: Place, beat: Beat) -> None:
        self._metrics = metrics
        self._place = place
        self._beat = beat
        self._began = self._mark = time.monotonic()
        self._tokens = 0
        self._skipped = 0
        self.first_loss: float | None = None
        self.last_loss: float | None = None
        self.eval_loss: float | None = None

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Start the clocks."""
        self._began = self._mark = time.monotonic()
        self._beat.enter("train", state.global_step)

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Show that a step is done."""
        self._beat.advance(state.global_step)

    def on_log(self, _args: Any, state: Any, _control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Write down one step; refuse to go on with a loss that is not a number."""
        if not logs or "loss" not in logs:
            return
        loss = float(logs["loss"])
        self._write(self._describe_step(state, logs, loss))
        self._refuse_nonfinite(state.global_step, loss, logs.get("grad_norm"))
        self.first_loss = loss if self.first_loss is None else self.first_loss
        self.last_loss = loss

    def _describe_step(self, state: Any, logs: dict[str, Any], loss: float) -> dict[str, Any]:
        tokens, seconds = self._count(logs)
        rate = round(tokens / seconds, 1) if seconds > 0 else None
        learning_rate = float(logs.get("learning_rate") or 0.0)
        self._say(f"step {state.global_step}/{state.max_steps} loss {loss:.4f} lr {learning_rate:.3g} tokens/s {rate}")
        line = {
            "schema": SCHEMA,
            "step": state.global_step,
            "max_steps": state.max_steps,
            "epoch": round(float(state.epoch or 0.0), 6),
            "loss": _number(loss),
            "learning_rate": learning_rate,
            "tokens_per_s": rate,
            "grad_norm": _number(logs.get("grad_norm")),
            "time": time.time(),
        }
        return line if math.isfinite(loss) else {**line, "nonfinite": True}

    def _refuse_nonfinite(self, step: int, loss: float, grad_norm: float | None) -> None:
        if not math.isfinite(loss):
            raise NonFiniteLossError(
                f"the loss is {loss} in step {step}, so the weights are spoilt from here on",
                fix="lower training.learning_rate, use bf16 instead of fp16, or look for broken examples",
            )
        skips = grad_norm is not None and not math.isfinite(grad_norm)
        self._skipped = self._skipped + 1 if skips else 0
        if self._skipped >= MAX_SKIPPED:
            raise NonFiniteGradientsError(
                f"the gradients have not been finite for {MAX_SKIPPED} steps up to step {step}, so nothing is learned",
                fix="lower training.learning_rate, use bf16 instead of fp16, or look for broken examples",
            )

    def on_evaluate(
        self, _args: Any, state: Any, _control: Any, metrics: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Write down one evaluation."""
        self.eval_loss = float((metrics or {})["eval_loss"])
        self._write(
            {
                "schema": SCHEMA,
                "step": state.global_step,
                "epoch": round(float(state.epoch or 0.0), 6),
                "eval_loss": _number(self.eval_loss),
                "time": time.time(),
            }
        )
        self._say(f"step {state.global_step}/{state.max_steps} eval loss {self.eval_loss:.4f}")
        self.resume_training(state.global_step)

    def resume_training(self, step: int) -> None:
        """Leave the time of an evaluation or a save out of the training speed."""
        self._mark = time.monotonic()
        self._beat.enter("train", step)

    def write_final(self, step: int) -> None:
        """Write the last line of the metrics."""
        self._write(
            {
                "schema": SCHEMA,
                "step": step,
                "final_loss": _number(self.last_loss),
                "tokens": self._tokens,
                "seconds": round(time.monotonic() - self._began, 3),
                "time": time.time(),
            }
        )

    def _count(self, logs: dict[str, Any]) -> tuple[int, float]:
        """Tokens and seconds since the last count."""
        now, total = time.monotonic(), int(logs.get("num_tokens") or 0)
        tokens, seconds = total - self._tokens, now - self._mark
        self._tokens, self._mark = total, now
        return tokens, seconds

    def _write(self, line: dict[str, Any]) -> None:
        if self._place.is_first:
            append_json(self._metrics, line)

    def _say(self, text: str) -> None:
        if self._place.is_first:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()


def _number(value: Any) -> float | None:
    """A float for JSON, which has no NaN."""
    return float(value) if value is not None and math.isfinite(value) else None
