"""The learning-rate schedule in DeepSpeed's own configuration, for scripts that let DeepSpeed step it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmtrain.errors import InputFileError

if TYPE_CHECKING:
    from llmtrain.spec.dsconfig import Wanted
    from llmtrain.spec.dsdraft import Draft

WARMUP_SHARE = 0.03


def fill_scheduler(draft: Draft, wanted: Wanted) -> None:
    """Fill what a ``scheduler`` block leaves open.

    Raises:
        InputFileError: it needs the number of steps, which only the script knows.
    """
    if draft.get("scheduler", "params") is None:
        return
    params = ("scheduler", "params")
    simple = {"warmup_min_lr": 0.0, "warmup_max_lr": wanted.learning_rate}
    for key, number in simple.items():
        if draft.get(*params, key) == "auto":
            draft.put((*params, key), number, "training.learning_rate" if number else "a warm-up starts at nothing")
    steps = {"total_num_steps": wanted.max_steps}
    if wanted.max_steps is not None:
        steps["warmup_num_steps"] = int(WARMUP_SHARE * wanted.max_steps)
    elif draft.get(*params, "warmup_num_steps") == "auto":
        draft.put((*params, "warmup_num_steps"), 0, "no warm-up: training.max_steps is not given")
    for key, value in steps.items():
        if draft.get(*params, key) != "auto":
            continue
        if value is None and not wanted.reads_resolved:
            draft.drop(("scheduler",), "not in the resolved text: only the script knows the number of steps")
            return
        if value is None:
            raise InputFileError(
                f"scheduler.params.{key} is auto, and only the script knows the number of steps",
                where=draft.where((*params, key)),
                fix="add --set training.max_steps=N, or write the number",
            )
        draft.put((*params, key), value, f"training.max_steps {wanted.max_steps}")
