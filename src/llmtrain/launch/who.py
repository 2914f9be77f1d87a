"""``llmtrain who``: who uses the hosts now."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.cluster import hostusers
from llmtrain.cluster.fleet import Command, Fleet, run_on_all
from llmtrain.errors import HostError
from llmtrain.launch.check import open_hosts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmtrain.errors import LlmtrainError
    from llmtrain.launch.check import Subject

ANY_PYTHON = 'for p in "$@" python3 python; do command -v "$p" >/dev/null 2>&1 && exec "$p" -I -; done; exit 127'
"""The ranks' interpreter, or any: nothing of the environment is needed."""


@dataclass(frozen=True, kw_only=True)
class Use:
    """A process that computes."""

    host: str
    """Where."""
    user: str | None
    """Whose; None if it is in another container."""
    pid: int
    """Its id."""
    accelerators: tuple[int, ...]
    """Indices of the accelerators it is on."""
    run: str | None
    """The llmtrain run it belongs to."""
    rank: int | None
    """Its rank there."""
    seconds: int | None
    """How long it has been running."""
    command: str
    """Its arguments, shortened."""


@dataclass(frozen=True, kw_only=True)
class Uses:
    """Who uses which host."""

    uses: tuple[Use, ...]
    """In rank order of the hosts."""
    failed: Mapping[str, LlmtrainError]
    """Hosts that gave no answer."""


def find_users(subject: Subject) -> Uses:
    """Ask all hosts."""
    opened = open_hosts(subject)
    fleet = Fleet(opened.good)
    source = Path(hostusers.__file__).read_text(encoding="utf-8")

    def ask(name: str) -> list[Use]:
        argv = ("/bin/sh", "-c", ANY_PYTHON, "sh", subject.python_on(name))
        result = fleet[name].run(Command(argv=argv, stdin=f"{source}\n\nwho()\n".encode(), timeout_s=60))
        try:
            answer = json.loads(result.stdout.decode().strip().splitlines()[-1])
        except (ValueError, IndexError):
            raise HostError(f"no answer: {result.tail()}", where=name, fix=f"ssh -- {name} python3 -V") from None
        return [_use(name, one) for one in answer["processes"]]

    try:
        asked = run_on_all(list(fleet), ask)
    finally:
        fleet.close()
    uses = tuple(use for found in asked.good.values() for use in found)
    return Uses(uses=uses, failed={**opened.failed, **asked.failed})


def _use(host: str, answer: dict[str, object]) -> Use:
    gpus = answer["accelerators"]
    return Use(
        host=host,
        user=_text(answer["user"]),
        pid=int(str(answer["pid"])),
        accelerators=tuple(gpus) if isinstance(gpus, list) else (),
        run=_text(answer["run"]),
        rank=_number(answer["rank"]),
        seconds=_number(answer.get("seconds")),
        command=_text(answer.get("command")) or "",
    )


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _number(value: object) -> int | None:
    return value if isinstance(value, int) else None
