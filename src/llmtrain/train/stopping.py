"""Save and stop when somebody asks: all ranks agree on the step after which they do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

if TYPE_CHECKING:
    from pathlib import Path

    from llmtrain.train.crew import Crew

REQUEST = "stop.json"
"""The guardian makes this file in the run folder of its host."""


class StopOnRequest(TrainerCallback):  # type: ignore[misc]
    """Looks for the request after every step; one rank that sees it is enough for all."""

    def __init__(self, run_dir: Path, crew: Crew) -> None:
        self._path = run_dir / REQUEST
        self._crew = crew
        self.asked = False

    def on_step_end(self, _args: Any, _state: Any, control: Any, **_: Any) -> Any:
        """Agree with the other ranks, one number each."""
        self.asked = self._crew.is_any(self._path.exists())
        if self.asked:
            control.should_save = True
            control.should_training_stop = True
        return control
