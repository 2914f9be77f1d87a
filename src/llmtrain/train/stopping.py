"""Save when time has come, and save and stop when somebody asks: all ranks agree on the step after which they do."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

if TYPE_CHECKING:
    from pathlib import Path

    from llmtrain.train.crew import Crew

REQUEST = "stop.json"
"""The guardian makes this file in the run folder of its host."""
DUE, ASKED = 1, 2
"""What a rank wants after a step; the highest of all ranks counts."""


class StopOnRequest(TrainerCallback):  # type: ignore[misc]
    """Looks after every step for the request, which one rank that sees it makes for all, and at rank 0's clock."""

    def __init__(self, run_dir: Path, crew: Crew, save_minutes: float = 0) -> None:
        self._path = run_dir / REQUEST
        self._crew = crew
        self._every_s = save_minutes * 60
        self._saved_at = time.monotonic()
        self.asked = False
        self.due = False

    def on_train_begin(self, _args: Any, _state: Any, control: Any, **_: Any) -> Any:
        """The clock starts."""
        self.note_save()
        return control

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Agree with the other ranks, one number each."""
        wanted = self._crew.highest(ASKED if self._path.exists() else DUE if self._is_due(state) else 0)
        self.asked, self.due = wanted == ASKED, wanted == DUE
        if wanted:
            control.should_save = True
        if self.asked:
            control.should_training_stop = True
        return control

    def _is_due(self, state: Any) -> bool:
        """After the last step the model itself is written."""
        late = self._every_s > 0 and time.monotonic() - self._saved_at > self._every_s
        return late and self._crew.place.is_first and state.global_step < state.max_steps

    def note_save(self) -> None:
        """The next save is due so long after this one, whether a disk took it or not."""
        self._saved_at = time.monotonic()
