"""What happened: from the ranks' own records to one sentence, an exit code and the first failure. Pure."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from llmtrain.errors import ExitCode, PreflightError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_CONSEQUENT = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|Socket closed|recv\(\)|NCCL.*(remote|unhandled system|abort)"
    r"|ProcessGroup|Watchdog|TCPStore|store->get|gloo.*(peer|timeout|timed out)|Application timeout|DistBackendError"
    r"|DistNetworkError|rendezvous",
    re.IGNORECASE | re.DOTALL,
)
"""Errors that a rank gets because another one is gone."""
_DISK = re.compile(r"No space left on device|unexpected pos \d+ vs|iostream error|Disk quota exceeded|ENOSPC")
"""torch hides a full disk behind two of these."""
FIX_MARK = "; to fix it: "
"""Stands between error and fix in the message of a rank that knows both; see ``train/failure.py``."""
NO_SPACE_BYTES = 1 << 20
"""A disk with less than this free is full for every practical purpose."""


SETUP_FAILED = "llmtrain: setup failed on"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The failure that came first."""

    host: str | None
    """Where; None for the head."""
    rank: int | None
    """Which rank; None where it is not about one."""
    cause: str
    """For scripts: crash, killed, out-of-memory, disk-full, nonfinite, host-lost, host-frozen, xid, stall,
    launcher, world-size, start."""
    message: str
    """One line for people."""
    where: str | None = None
    """File and line in the code that failed."""
    tail: str | None = None
    """The last lines it printed."""
    advice: str | None = None
    """What to do about this cause."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended; what outcome.json and ``--json`` hold."""

    ok: bool
    """Every rank has a done record and the model has arrived."""
    exit_code: int
    """Exit code of the command."""
    run_dir: str
    """The run's folder on the head."""
    reason: str
    """One sentence."""
    first_failure: Failure | None = None
    """What failed first."""
    last_step: int = 0
    """Optimizer steps done."""
    final_loss: float | None = None
    """Mean loss of the last step."""
    output: str | None = None
    """Where the tuned model is."""
    checkpoints: dict[str, list[str]] = field(default_factory=dict)
    """Host -> DeepSpeed checkpoints that a user's program left there; they stay."""
    saved: str | None = None
    """Checkpoint on the hosts that was written because somebody asked for a stop."""
    folded: int = 0
    """Further failures, consequences of the first."""
    restarts: int = 0
    """How often it was started again after a failure."""
    leftovers: dict[str, list[int]] = field(default_factory=dict)
    """Host -> pids that could not be verified gone."""
    unverified: tuple[str, ...] = ()
    """Hosts that did not answer when the run was stopped; their guardian ends the run when its lease runs out."""

    def to_json(self) -> dict[str, Any]:
        """Plain values, in the order of the fields."""
        return {**asdict(self), "exit_code": int(self.exit_code), "unverified": list(self.unverified)}


def parse_outcome(values: Mapping[str, Any]) -> Outcome:
    """The opposite of :meth:`Outcome.to_json`; keys it does not know are left out."""
    known = {key: value for key, value in values.items() if key in {item.name for item in fields(Outcome)}}
    failure = known.get("first_failure")
    return Outcome(
        **{
            **known,
            "exit_code": ExitCode(known["exit_code"]),
            "unverified": tuple(known["unverified"]),
            "first_failure": Failure(**failure) if failure else None,
        }
    )


def is_consequent(record: Mapping[str, Any]) -> bool:
    """Whether a rank's failure is what one sees when another rank has failed."""
    error = record.get("error") or {}
    if error.get("type") == "Stopped" or is_abandoned(record):
        return True
    return bool(_CONSEQUENT.search(f"{error.get('type')} {error.get('message')}"))


def is_abandoned(record: Mapping[str, Any]) -> bool:
    """Whether a leash ended its rank because the launcher's connection to it had ended."""
    return (record.get("error") or {}).get("type") == "Abandoned"


def choose_first(records: Sequence[tuple[str, Mapping[str, Any]]]) -> tuple[str, Mapping[str, Any]] | None:
    """The failure that started it: the first that is not a consequence, else a lost launcher, else the first.

    Args:
        records: (host, done record) of failed ranks, in the order they arrived.
    """
    own = [item for item in records if not is_consequent(item[1])]
    ordered = own or [item for item in records if is_abandoned(item[1])] or list(records)
    return ordered[0] if ordered else None


def explain(host: str, record: Mapping[str, Any]) -> tuple[Failure, ExitCode]:
    """A rank's done record in plain words, and the exit code for it."""
    error = record.get("error") or {}
    kind, message = str(error.get("type")), str(error.get("message") or "")
    text = f"{message}\n{error.get('tail') or ''}"
    cause, code, advice = "crash", ExitCode.RANK_FAILED, None
    if kind in {"OutOfMemory", "HostOutOfMemory"}:
        cause, code = "out-of-memory", ExitCode.OUT_OF_MEMORY
        advice = "lower batch.micro or data.max_length, or offload more (--config zero3-offload)"
        if kind == "HostOutOfMemory":
            advice = "use more hosts, fewer slots on each, or less offload to RAM (--config zero3)"
    elif kind == "DiskFull" or _DISK.search(text):
        cause, code, advice = "disk-full", ExitCode.DISK, f"free space on {host}, or set node_dir to another disk"
    elif kind.startswith("NonFinite"):
        cause, advice = "nonfinite", "lower training.learning_rate, or look at the data around that step"
    elif kind == "Abandoned":
        cause, code = "launcher", ExitCode.LAUNCHER
        advice = "see logs/launcher.log in the run folder"
    elif kind == "Killed":
        cause = "killed"
        if record.get("signal") == 9:
            advice = f"if nobody killed it, the kernel did, for memory: ssh -- {host} dmesg | grep -i oom"
    words, _, own_advice = (message.strip().splitlines() or [kind])[0].partition(FIX_MARK)
    failure = Failure(
        host=host,
        rank=record.get("rank"),
        cause=cause,
        message=words,
        where=error.get("where"),
        tail=error.get("tail"),
        advice=own_advice or advice,
    )
    return failure, code


def gone(rank: int, free_bytes: int) -> dict[str, Any]:
    """The record of a rank that ended together with its leash and left none: killed, or without room for one."""
    error = {"type": "Killed", "message": "rank and leash are gone"}
    if free_bytes < NO_SPACE_BYTES:
        error = {"type": "DiskFull", "message": "No space left on device: not even for a record of why the rank ended"}
    return {"rank": rank, "ok": False, "error": error, "signal": 9}


def host_lost(host: str, door: str) -> tuple[Failure, ExitCode]:
    """A host that no longer answers.

    Args:
        host: its name.
        door: what its sshd did when asked afterwards; see ``cluster/alive.py``.
    """
    cause, message = "host-lost", "the host no longer answers"
    advice = f"see whether it is up: ping {host}; its ranks end by themselves when the lease runs out"
    if door == "silent":
        cause = "host-frozen"
        message = "the host takes connections but no program on it answers: frozen, or out of memory to the point of it"
        advice = f"look at its console, or reboot it; {advice}"
    elif door == "answers":
        message = "the host answers, but the run's guardian on it is gone: killed, or the host was rebooted"
        advice = f"ssh -- {host} uptime"
    return Failure(host=host, rank=None, cause=cause, message=message, advice=advice), ExitCode.HOST_LOST


def launcher_died(code: int, tail: str) -> tuple[Failure, ExitCode]:
    """DeepSpeed's runner or pdsh ended while ranks were still running, or before they started."""
    if match := re.search(rf"{SETUP_FAILED} (\S+) with exit code (\d+)", tail):
        return _setup_failed(match[1], int(match[2]), tail)
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    failure = Failure(
        host=None,
        rank=None,
        cause="launcher",
        message=f"DeepSpeed's launcher {how} before every rank was done",
        tail=tail,
        advice="see logs/launcher.log in the run folder",
    )
    return failure, ExitCode.LAUNCHER


def _setup_failed(host: str, code: int, tail: str) -> tuple[Failure, ExitCode]:
    """The run file's ``setup`` lines did not get through on a host."""
    message = f"a line of setup: ended with exit code {code}, so no rank could start there"
    advice = f"try the setup lines of the run file by hand: ssh -- {host}"
    return Failure(host=host, rank=None, cause="setup", message=message, tail=tail, advice=advice), ExitCode.LAUNCHER


def held(host: str, holders: Mapping[str, Mapping[str, Any]]) -> PreflightError:
    """Another run has an accelerator of a host."""
    name, holder = next(iter(holders.items()))
    if "problem" in holder:
        error = f"{name} cannot be locked: {holder['problem']}"
    else:
        who = f"run {holder.get('run', '?')} of {holder.get('user', '?')}, process {holder.get('pid', '?')}"
        more = f" (and {len(holders) - 1} more)" if len(holders) > 1 else ""
        error = f"{name}{more} is in use by {who}"
    return PreflightError(error, where=host, fix=f"llmtrain launch --wait queues for it; llmtrain who shows {host}")


def wrong_world(host: str, rank: int, planned: int, actual: int) -> tuple[Failure, ExitCode]:
    """Ranks that would train apart from each other."""
    message = f"{planned} ranks are planned, but this one was started as one of {actual}"
    advice = "report this with the run folder: llmtrain and DeepSpeed disagree about the hostfile"
    return Failure(host=host, rank=rank, cause="world-size", message=message, advice=advice), ExitCode.LAUNCHER


def not_started(ranks: Sequence[int], seconds: float, tail: str) -> tuple[Failure, ExitCode]:
    """Ranks that never wrote a record."""
    listed = ", ".join(map(str, ranks[:8]))
    message = f"rank {listed} did not start within {seconds:.0f} s"
    advice = "see logs/launcher.log in the run folder"
    return Failure(
        host=None, rank=ranks[0], cause="start", message=message, tail=tail, advice=advice
    ), ExitCode.LAUNCHER
