"""All ranks together: communication started before anything is loaded, ended before the process is."""

from __future__ import annotations

import contextlib
import os
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmtrain.train.place import Place

PATIENCE = timedelta(days=2)
"""How long ranks wait for work that takes its time on some of them (tokenizing, writing the model), which no collective
time-out should bound; the head ends the run when a rank is lost meanwhile."""
TEAR_DOWN_S = 30.0


class Crew:
    """The ranks of a run, connected."""

    def __init__(self, place: Place) -> None:
        """Connect to the other ranks.

        Must come before a model is loaded: ``from_pretrained`` under ``zero.Init`` asks for the world size, and gets
        1 when communication is not up.
        """
        import deepspeed
        import torch.distributed as dist
        from deepspeed.accelerator import get_accelerator

        self.place = place
        self.on_cpu: bool = get_accelerator().device_name() == "cpu"
        if not self.on_cpu:
            get_accelerator().set_device(place.local_rank)
        self._dist = dist
        if not dist.is_initialized():
            deepspeed.init_distributed(verbose=False)
        # Gloo also next to NCCL: its barrier takes our patience and notices at once when a rank has gone.
        self._waiting_group: Any = dist.new_group(backend="gloo", timeout=PATIENCE)

    def wait(self) -> None:
        """Return when every rank has come here; raises when one of them has gone."""
        self._dist.barrier(group=self._waiting_group)

    def share(self, value: Any) -> list[Any]:
        """What every rank has to say, in the order of ranks; every rank calls this with something small."""
        said: list[Any] = [None] * self.place.world_size
        self._dist.all_gather_object(said, value, group=self._waiting_group)
        return said

    def add_up(self, values: Any) -> None:
        """Replace a tensor, in place, by its sum over all ranks."""
        self._dist.all_reduce(values)

    def highest(self, mine: int) -> int:
        """The highest number of all ranks; every rank calls this. Over Gloo, so that no accelerator waits for it."""
        import torch

        numbers = torch.tensor([mine], dtype=torch.int32)
        self._dist.all_reduce(numbers, op=self._dist.ReduceOp.MAX, group=self._waiting_group)
        return int(numbers.item())

    def leave(self) -> None:
        """Disconnect; never takes longer than ``TEAR_DOWN_S``."""
        _run_bounded(self._dist.destroy_process_group, TEAR_DOWN_S)


def _run_bounded(action: Callable[[], None], seconds: float) -> None:
    # NCCL's tear-down can hang or raise when a peer went first; the model is saved, so this is not worth a failure.
    def act() -> None:
        with contextlib.suppress(Exception):
            action()

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        os.write(2, b"warning: tearing down communication took too long; leaving it\n")
