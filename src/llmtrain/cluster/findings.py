"""What a check found: one value for the terminal, ``--json`` and the launch."""

from __future__ import annotations

import difflib
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from llmtrain.errors import PreflightError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from llmtrain.errors import LlmtrainError

Level = Literal["ok", "warn", "fail", "unknown"]

ORDER: dict[str, int] = {"fail": 0, "unknown": 1, "warn": 2, "ok": 3}
"""Worst first."""

REACH: dict[str, str] = {
    "dns": "the head resolves every host name",
    "connect": "the head reaches sshd of every host",
    "host-key": "host keys are known and unchanged",
    "login": "the login is accepted",
    "ssh": "ssh works once connected",
    "interpreter": "the interpreter of the ranks exists and runs",
}
"""Without these nothing can run on a host: they cannot be skipped."""

CHECKS: dict[str, str] = {
    **REACH,
    "ssh-agree": "OpenSSH, which pdsh starts, gets in as well as llmtrain's own client",
    "noisy-shell": "start-up files print nothing in shells that nobody sees",
    "identity": "every line of the hostfile is another machine",
    "account": "user and home are alike on all hosts",
    "packages": "the packages that ranks import are installed",
    "versions": "packages that work in step have one version",
    "platform": "processor, C library and kernel are alike",
    "driver": "the NVIDIA driver works, in one version",
    "slots": "every slot has an accelerator",
    "accelerator-type": "accelerators are of one type, and of a make that is tested",
    "accelerator-busy": "nobody else computes on the accelerators",
    "accelerator-health": "no memory errors, XIDs, throttling",
    "mig": "accelerators are not split by MIG",
    "fabric": "NVSwitch and InfiniBand are ready",
    "node-dir": "the working folder can be written and run from",
    "disk": "there is space for code, data, checkpoints and model",
    "content": "model and data there are those here",
    "shared-dir": "hosts do not share the working folder unawares",
    "memory": "the host has the memory the run needs",
    "shm": "the shared memory in /dev is large enough",
    "limits": "limits on open files and locked memory",
    "clock": "clocks agree with the head's",
    "build": "DeepSpeed operations are built, or can be",
    "names": "hosts resolve each other's names, and their own not to loopback",
    "ports": "hosts reach each other on any port",
    "master-port": "the port where ranks meet is free",
    "mtu": "large packets pass",
    "network": "a network that serves all hosts",
    "links": "no link is slower than its siblings, or loses packets (--links)",
    "bring-up": "torch.distributed comes up over all slots (--links)",
    "transport": "NCCL uses InfiniBand where there is some (--links)",
}
"""Name -> what holds where it is fine. ``--only``, ``--skip`` and ``--skip-check`` take these names."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at on one host."""

    host: str
    """Name in the hostfile."""
    check: str
    """What was looked at, one of :data:`CHECKS`."""
    level: Level
    """``fail`` only where it is certain that the run cannot work."""
    saw: str
    """What is there."""
    wanted: str
    """What should be there."""
    fix: str
    """The command to run."""


def sort_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Worst first; the order of hosts stays."""
    return sorted(findings, key=lambda finding: ORDER[finding.level])


def parse_names(names: Iterable[str], *, option: str) -> frozenset[str]:
    """Names of checks, several in one word behind commas.

    Raises:
        UsageError: there is no such check.
    """
    chosen = [name.strip() for text in names for name in text.split(",") if name.strip()]
    for name in chosen:
        if name not in CHECKS:
            near = difflib.get_close_matches(name, CHECKS, 1)
            hint = f"did you mean {near[0]}?" if near else f"one of: {', '.join(CHECKS)}"
            raise UsageError(f"there is no check {name}", where=option, fix=hint)
    return frozenset(chosen)


def unreachable(failed: Mapping[str, LlmtrainError]) -> list[Finding]:
    """Findings for hosts that gave no facts."""
    return [
        Finding(
            host=host,
            check=getattr(error, "check", "ssh"),
            level="fail",
            saw=error.error,
            wanted="a login over SSH and the interpreter of the ranks",
            fix=error.fix or f"ssh -- {host} true",
        )
        for host, error in failed.items()
    ]


def refuse_failures(findings: Sequence[Finding], *, skip: frozenset[str] = frozenset()) -> None:
    """Stop on the first certain failure, naming how many more there are.

    Args:
        findings: what was found.
        skip: checks the user takes upon himself; hosts that cannot be reached are not among them.

    Raises:
        PreflightError: there is at least one finding of level ``fail``.
    """
    passed = skip - set(REACH)
    failures = [finding for finding in findings if finding.level == "fail" and finding.check not in passed]
    if not failures:
        return
    first = failures[0]
    more = "".join(f"\n  {one.host}: {one.saw}; wanted {one.wanted}; fix: {one.fix}" for one in failures[1:])
    skippable = sorted({one.check for one in failures} - set(REACH))
    hint = f"\nor go on regardless: --skip-check {','.join(skippable)}" if skippable else ""
    error = PreflightError(
        f"{first.saw} (wanted: {first.wanted})",
        where=first.host,
        fix=first.fix + (f"\nalso ({len(failures) - 1}):{more}" if more else "") + hint,
    )
    error.findings = tuple(asdict(finding) for finding in sort_findings(findings))
    raise error
