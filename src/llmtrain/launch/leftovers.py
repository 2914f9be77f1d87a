"""What runs whose supervisor is gone, or could not verify their end, have left on hosts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain import process
from llmtrain.cluster.fleet import Command, Fleet, run_on_all
from llmtrain.cluster.ssh import connect
from llmtrain.errors import HostError
from llmtrain.launch.jobs import read_document
from llmtrain.launch.who import ANY_PYTHON

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmtrain.cluster.fleet import Transport
    from llmtrain.errors import LlmtrainError
    from llmtrain.launch.jobs import RunStatus

ASK = """
import shutil, sys
run_id, folder, checkpoints, what = json.loads({request!r})
found = dict(find_marked(run_id))
if what == "end":
    found = end_marked(run_id, grace_s=2.0)
path = Path(folder)
if what == "end":
    (path / "env.json").unlink() if (path / "env.json").exists() else None
kept = path.exists()
points = sorted(one.name for one in Path(checkpoints).glob("step-*"))
kept = kept or bool(points)
if what == "folder" and kept:
    shutil.rmtree(checkpoints, ignore_errors=True)
    shutil.rmtree(str(path.resolve()), ignore_errors=True)
    path.unlink() if path.is_symlink() else None
print("\\n" + json.dumps(dict(processes=sorted(found), folder=kept, checkpoints=points)))
"""


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """What is there of one run on one host."""

    run_id: str
    """The run."""
    host: str
    """The host."""
    processes: tuple[int, ...]
    """Its processes."""
    folder: str | None
    """Its run folder there, if it is still there."""
    checkpoints: tuple[str, ...]
    """Checkpoints in it."""


@dataclass(frozen=True, kw_only=True)
class Leftovers:
    """What was found, or is left after it was removed."""

    found: tuple[Leftover, ...]
    """In the order of runs and hosts."""
    failed: Mapping[str, LlmtrainError]
    """Hosts that gave no answer."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        rows = [
            {
                "run_id": one.run_id,
                "host": one.host,
                "processes": list(one.processes),
                "folder": one.folder,
                "checkpoints": list(one.checkpoints),
            }
            for one in self.found
        ]
        failed = {name: {"error": error.error, "fix": error.fix} for name, error in self.failed.items()}
        return {"found": rows, "failed": failed}


def choose_dead(runs: Sequence[RunStatus]) -> list[RunStatus]:
    """Runs that are over but may have left something: nobody watches them, or some host did not confirm. Pure."""
    return [
        run
        for run in runs
        if run.status == "orphaned" or (run.outcome and (run.outcome.get("unverified") or run.outcome.get("leftovers")))
    ]


def find_leftovers(runs: Sequence[RunStatus]) -> Leftovers:
    """Ask the hosts of these runs."""
    return _ask(runs, "look")


def end_leftovers(runs: Sequence[RunStatus], *, folders: bool) -> Leftovers:
    """End their processes and remove their secrets; with ``folders`` also their run folders, checkpoints included."""
    ended = _ask(runs, "end")
    return _ask(runs, "folder") if folders and not ended.failed else ended


def _ask(runs: Sequence[RunStatus], what: str) -> Leftovers:
    documents = {run.run_id: read_document(Path(run.path) / "run.json") for run in runs}
    pairs = [(run.run_id, host["name"]) for run in runs for host in documents[run.run_id].get("hosts", [])]
    opened = run_on_all(list(dict.fromkeys(host for _, host in pairs)), _open)
    fleet = Fleet(dict(opened.good))
    try:
        reached = [f"{run_id}\n{host}" for run_id, host in pairs if host in opened.good]

        def ask(pair: str) -> Leftover:
            run_id, _, host = pair.partition("\n")
            return _ask_host(fleet[host], run_id, documents[run_id], what)

        asked = run_on_all(reached, ask)
    finally:
        fleet.close()
    found = tuple(one for one in asked.good.values() if one.processes or one.folder)
    failed = {pair.partition("\n")[2]: error for pair, error in asked.failed.items()}
    return Leftovers(found=found, failed={**opened.failed, **failed})


def _open(name: str) -> Transport:
    return connect(name)


def _ask_host(transport: Transport, run_id: str, document: Mapping[str, Any], what: str) -> Leftover:
    folder, checkpoints = str(document["run_dir"]), str(document["checkpoints"])
    source = Path(process.__file__).read_text(encoding="utf-8")
    text = source + ASK.format(request=json.dumps([run_id, folder, checkpoints, what]))
    result = transport.run(
        Command(argv=("/bin/sh", "-c", ANY_PYTHON, "sh", "python3"), stdin=text.encode(), timeout_s=60)
    )
    try:
        answer = json.loads(result.stdout.decode().strip().splitlines()[-1])
    except (ValueError, IndexError):
        fix = f"ssh -- {transport.name} python3 -V"
        raise HostError(f"no answer: {result.tail()}", where=transport.name, fix=fix) from None
    return Leftover(
        run_id=run_id,
        host=transport.name,
        processes=tuple(answer["processes"]),
        folder=folder if answer["folder"] else None,
        checkpoints=tuple(answer["checkpoints"]),
    )
