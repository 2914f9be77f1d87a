"""Find the newest checkpoint that is whole over all hosts, copies counted, and bring back what a host lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmtrain.cluster.fleet import Command, run_on_all
from llmtrain.launch.copies import AT_ONCE, COPIES, bring
from llmtrain.sync.request import SyncRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmtrain.cluster.fleet import Fleet

Tell = Callable[[str, dict[str, Any]], None]
# $1 the folder of checkpoints: those with a note, and copies with one; both get their names when they are whole.
_LIST = (
    'cd "$1" 2>/dev/null || exit 0; for one in step-* copies/*/step-*; do '
    '[ -e "$one/checkpoint.json" ] && echo "$one"; done; true'
)
_PRIVATE = 'umask 077; mkdir -p "$1"'
_LINKED = "/tmp/.llmtrain-"  # noqa: S108  a link that only the run's own launch may make


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Files that a host needs and only another has."""

    host: str
    """Who needs them."""
    owner: str
    """Who wrote them; the host itself, or the one whose place it has taken."""
    keeper: str
    """Who has the copy."""


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """The checkpoint to go on from."""

    name: str
    """Its folder's name."""
    losses: tuple[Loss, ...]
    """What has to be brought first."""


def recover_checkpoint(
    fleet: Fleet, names: Sequence[str], folder: str, tell: Tell, *, only: str | None = None
) -> str | None:
    """The newest checkpoint below a folder that every host has, once it has been given what it lost; or None.

    Args:
        fleet: the hosts.
        names: their names in rank order.
        folder: where checkpoints are, on every host.
        tell: called for what is brought.
        only: the one that is wanted, as in ``step-000100``.

    Raises:
        LlmtrainError: a host does not answer, or a copy could not be brought.
    """
    ask = Command(argv=("/bin/sh", "-c", _LIST, "sh", folder))
    answers = run_on_all(names, lambda name: fleet[name].run(ask)).all_good()
    seen = {
        name: {path for path in answers[name].stdout.decode().split() if only in {None, path.rpartition("/")[2]}}
        for name in names
    }
    found = choose_recovery(seen, names, _read_owners(fleet, seen, folder) or names)
    if found is None:
        return None
    if found.losses and folder.startswith(_LINKED):
        return None

    def fetch(host: str) -> None:
        loss = next(one for one in found.losses if one.host == host)
        _fetch(loss, found.name, folder, fleet, tell)

    run_on_all([loss.host for loss in found.losses], fetch, fan_out=AT_ONCE).all_good()
    return f"{folder}/{found.name}"


def choose_recovery(seen: Mapping[str, set[str]], names: Sequence[str], owners: Sequence[str]) -> Recovery | None:
    """The newest checkpoint whose every part is with its host or, as a copy, with another; None if there is none. Pure.

    Args:
        seen: host -> ``step-...`` it wrote and ``copies/OWNER/step-...`` it keeps.
        names: the hosts in rank order.
        owners: the hosts that wrote the checkpoints, in rank order.
    """
    if len(owners) != len(names):
        owners = names
    steps = {path.rpartition("/")[2] for paths in seen.values() for path in paths}
    for step in sorted(steps, reverse=True):
        losses = []
        for host, owner in zip(names, owners, strict=True):
            if step in seen[host]:
                continue
            copy = f"{COPIES}/{owner}/{step}"
            keeper = next((one for one in names if one != host and copy in seen[one]), None)
            if keeper is None:
                break
            losses.append(Loss(host=host, owner=owner, keeper=keeper))
        else:
            return Recovery(name=step, losses=tuple(losses))
    return None


def _read_owners(fleet: Fleet, seen: Mapping[str, set[str]], folder: str) -> list[str]:
    """Who wrote the checkpoints, as the manifest of one says; empty if none can be read."""
    host, path = max(((host, path) for host, paths in seen.items() for path in paths), default=("", ""))
    if not path:
        return []
    answer = fleet[host].run(Command(argv=("cat", "--", f"{folder}/{path}/manifest.json"), timeout_s=60))
    try:
        return [str(entry["host"]) for entry in json.loads(answer.stdout)["hosts"]]
    except (ValueError, KeyError, TypeError):
        return []


def _fetch(loss: Loss, name: str, folder: str, fleet: Fleet, tell: Tell) -> None:
    tell("bring", {"checkpoint": name, "host": loss.host, "owner": loss.owner, "keeper": loss.keeper})
    fleet[loss.host].run(Command(argv=("/bin/sh", "-c", _PRIVATE, "sh", folder)))
    request = SyncRequest(
        path=f"{folder}/{COPIES}/{loss.owner}/{name}",
        dest=f"{folder}/{name}",
        hosts=(loss.host,),
        source_host=loss.keeper,
    )
    sent = bring(request, fleet, lambda _what, _values: None)
    tell("brought", {"checkpoint": name, "host": loss.host, "keeper": loss.keeper, "bytes": sent})
