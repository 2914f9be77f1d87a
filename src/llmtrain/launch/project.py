"""A user's program on the hosts: its code sent there, and what it leaves in its output folders."""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from llmtrain.cluster.fleet import Command, Fleet, run_on_all
from llmtrain.cluster.local import kill_group
from llmtrain.errors import SyncError
from llmtrain.launch.document import PROJECT

if TYPE_CHECKING:
    from llmtrain.launch.prepare import LaunchPlan
    from llmtrain.spec.codetree import CodeTree

COPIES_AT_ONCE = 8
DEPTH = 6
"""How deep below the output folder a checkpoint is looked for."""


@dataclass(frozen=True, kw_only=True)
class Left:
    """What a program left on one host."""

    files: bool
    """Whether there is any file in its output folder."""
    checkpoints: tuple[str, ...]
    """Folders there that hold DeepSpeed checkpoints (``global_step*``), absolute."""


def send_code(plan: LaunchPlan, fleet: Fleet) -> None:
    """Make the project folder on every host and fill it.

    Raises:
        SyncError: the code did not arrive on some host.
    """

    def send(name: str) -> None:
        own = next(host.own_dir for host in plan.hosts if host.name == name)
        _send(plan.code, fleet, name, f"{own}/{PROJECT}")

    run_on_all([host.name for host in plan.hosts], send, fan_out=COPIES_AT_ONCE).all_good()


def _send(code: CodeTree | None, fleet: Fleet, host: str, target: str) -> None:
    script = 'mkdir -p "$1" && exec tar -xf - -C "$1"'
    process = fleet[host].bulk(("/bin/sh", "-c", script, "sh", target))
    try:
        _write_archive(code, process.stdin)
        problem = process.stderr.read().decode("utf-8", "replace").strip() if process.stderr else ""
        if process.wait() != 0:
            raise SyncError(
                f"the code did not arrive: {problem or process.returncode}", where=host, fix=f"ssh -- {host} df -h"
            )
    except OSError as error:
        what = error.filename or "the connection"
        raise SyncError(f"the code could not be sent: {what}: {error.strerror}", where=host) from None
    finally:
        if process.poll() is None:
            kill_group(process)


def _write_archive(code: CodeTree | None, pipe: IO[bytes] | None) -> None:
    if pipe is None:
        raise AssertionError("bulk processes have pipes")
    with tarfile.open(fileobj=pipe, mode="w|", dereference=True) as tar:
        for name in code.files if code else ():
            tar.add(Path(code.root if code else "") / name, arcname=name, filter=_plain)
    pipe.close()


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Content, name and permission; owners mean nothing on another host."""
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    info.mode = 0o700 if info.mode & 0o100 else 0o600
    return info


def examine_output(plan: LaunchPlan, fleet: Fleet) -> dict[str, Left]:
    """What the program left on every host that answers."""

    def look(name: str) -> Left:
        folder = next(host.own_dir for host in plan.hosts if host.name == name) + "/output"
        steps = ("find", folder, "-maxdepth", str(DEPTH), "-type", "d", "-name", "global_step*", "-print0")
        found = fleet[name].run(Command(argv=steps, timeout_s=60)).stdout.decode("utf-8", "surrogateescape")
        any_file = fleet[name].run(Command(argv=("find", folder, "-type", "f", "-print0", "-quit"), timeout_s=60))
        return Left(files=bool(any_file.stdout), checkpoints=tuple(sorted(filter(None, found.split("\0")))))

    return run_on_all([host.name for host in plan.hosts], look).good
