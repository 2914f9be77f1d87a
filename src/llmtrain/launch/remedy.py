"""What ``check`` may put right itself: unknown host keys and operations that are not compiled yet.

Never with sudo, never in a user's start-up files, and a changed host key is never among it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmtrain.launch.check import adopt_keys, warm
from llmtrain.launch.warm import cold_hosts

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmtrain.launch.check import CheckReport, Subject


@dataclass(frozen=True, kw_only=True)
class Remedies:
    """What the user allows."""

    keys: bool = False
    """Adopt unknown host keys without asking."""
    ops: bool = False
    """Compile without asking."""
    ask: Callable[[str], bool] | None = None
    """Asks about each, and says whether it may be done."""

    def allows(self, given: bool, question: str) -> bool:
        """Whether it may be done."""
        return given or (self.ask is not None and self.ask(question))


def remedy(subject: Subject, report: CheckReport, allowed: Remedies) -> bool:
    """Carry out what is allowed; returns whether anything was done, and another look is worth it.

    Raises:
        DiskError: known_hosts cannot be written.
        HostFailuresError: a build failed somewhere.
    """
    done = False
    saw = {one.host: one.saw for one in report.findings if one.check == "host-key"}
    lines = [
        line
        for host, line in report.new_keys.items()
        if allowed.allows(allowed.keys, f"{host}: {saw.get(host, line)}. Write it to ~/.ssh/known_hosts?")
    ]
    if lines:
        adopt_keys(lines)
        done = True
    cold = cold_hosts(report.facts, report.needs)
    if cold:
        names = sorted({op for ops in cold.values() for op in ops})
        if allowed.allows(allowed.ops, f"Compile {', '.join(names)} on {', '.join(cold)} (minutes)?"):
            warm(subject, report, cold)
            done = True
    return done
