"""Whether and how somebody asked for a run's end: by a signal to its supervisor, or through a client of it."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING

from llmtrain.errors import StoppedError

if TYPE_CHECKING:
    from collections.abc import Iterator

NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Asked:
    """What has been asked for so far."""

    def __init__(self) -> None:
        self.event = threading.Event()
        """Set by the first request: save if there is something to save, then stop."""
        self.now = threading.Event()
        """Set by the second: stop without saving."""
        self.number: int | None = None
        """The signal of the first request."""
        self._in_order = False
        self._sent = False

    def note(self, number: int, _frame: object) -> None:
        """Handle a signal: while ranks run it is only noted, before and after it ends what we are doing."""
        if self.event.is_set():
            self.now.set()
        self.number = self.number or number
        self.event.set()
        if not self._in_order:
            raise StoppedError(number)

    def send(self, number: int, *, now: bool) -> None:
        """Ask from another thread, as if a signal had come."""
        if now or self._sent:  # two signals in one moment would be one
            self.now.set()
        self._sent = True
        signal.pthread_kill(threading.main_thread().ident or 0, number)

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        """From the first rank to a verified end nothing may be cut short."""
        self._in_order = True
        try:
            yield
        finally:
            self._in_order = False

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Ctrl-C and TERM end the run in order instead of ending only this process."""
        before = {number: signal.signal(number, self.note) for number in NUMBERS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
