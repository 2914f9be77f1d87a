"""Errors that NVIDIA's driver reports through the kernel's log: read, and what to do about each. Pure.

Numbers and actions follow NVIDIA's catalogue (docs.nvidia.com/deploy/xid-errors).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from llmtrain.errors import ExitCode
    from llmtrain.launch.verdict import Failure

_LINE = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<pci>[0-9A-Fa-f:.]+)\): (?P<code>\d+)(?:, (?P<rest>.*))?")
_PROGRAM = "the program, not the card, is the first suspect: look at the rank's own error"
_RESET = "the card needs a reset (nvidia-smi --gpu-reset -i PCI) or the host a reboot before it is used again"
_REPLACE = "leave the host out (--exclude) and have the card looked at; it will do this again"
KNOWN: dict[int, tuple[str, str]] = {
    13: ("graphics engine exception", _PROGRAM),
    31: ("GPU memory page fault", _PROGRAM),
    43: ("GPU stopped processing", _PROGRAM),
    45: ("preemptive cleanup after another error", _PROGRAM),
    48: ("double-bit ECC error", _RESET),
    61: ("internal micro-controller breakpoint", _RESET),
    62: ("internal micro-controller halt", _RESET),
    63: ("memory row remapping event", _RESET),
    64: ("memory row remapping failure", _REPLACE),
    68: ("video processor exception", _PROGRAM),
    69: ("graphics engine class error", _PROGRAM),
    74: ("NVLink error", _RESET),
    79: ("GPU has fallen off the bus", _REPLACE),
    92: ("high single-bit ECC error rate", _REPLACE),
    94: ("contained ECC error", "the run may be started again on the same card; have it looked at if it comes back"),
    95: ("uncontained ECC error", _RESET),
    119: ("GSP firmware does not answer", _RESET),
    120: ("GSP firmware error", _RESET),
    121: ("C2C link error", _RESET),
    140: ("unrecovered ECC error", _RESET),
}
CONSEQUENCES = frozenset({13, 31, 43, 45, 68, 69})
"""What a faulty program causes as well."""


@dataclass(frozen=True, kw_only=True)
class Xid:
    """One report of the driver."""

    pci: str
    """The card's place on the bus."""
    code: int
    """Its number."""
    rest: str
    """What the driver adds."""


def parse_xids(lines: Iterable[str]) -> tuple[Xid, ...]:
    """Reports in the order of the log; other lines are left out."""
    found = (_LINE.search(line) for line in lines)
    return tuple(Xid(pci=one["pci"], code=int(one["code"]), rest=one["rest"] or "") for one in found if one)


def choose_xid(xids: Sequence[Xid]) -> Xid | None:
    """The first one that is no mere consequence of a faulty program, else the first."""
    return next((one for one in xids if one.code not in CONSEQUENCES), xids[0] if xids else None)


def judge_xid(
    failure: Failure, code: ExitCode, kernel: Mapping[str, Sequence[str]], host: str | None
) -> tuple[Failure, ExitCode]:
    """A failure on a host whose card has failed is the card's, unless memory or the numbers are the cause."""
    found = choose_xid(parse_xids(kernel.get(host or "", ())))
    if found is None or failure.cause not in {"crash", "killed", "stall", "host-lost", "host-frozen", "launcher"}:
        return failure, code
    if found.code in CONSEQUENCES and failure.cause == "crash":
        note = f"the driver reported Xid {found.code} ({KNOWN[found.code][0]}) on {found.pci}"
        return replace(failure, advice=f"{failure.advice}; {note}" if failure.advice else note), code
    name, advice = KNOWN.get(found.code, ("see NVIDIA's catalogue", "see docs.nvidia.com/deploy/xid-errors"))
    message = f"Xid {found.code}: {name}, on the card at {found.pci}; then: {failure.message}"
    return replace(failure, host=host, cause="xid", message=message, advice=advice.replace("PCI", found.pci)), code
