"""DeepSpeed's operations that were compiled here go along to hosts where they run: nothing is compiled twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.cluster.fleet import START_MARK, Command, Fleet, run_on_all
from llmtrain.cluster.local import LocalTransport
from llmtrain.cluster.probes import ops_name
from llmtrain.errors import HostError
from llmtrain.sync.condaenv import Extra

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmtrain.cluster.fleet import Transport

_VERSIONS = """
import json, platform
from importlib.metadata import distributions
found = {one.metadata["Name"]: one.version for one in distributions() if one.metadata["Name"] in ("torch", "deepspeed")}
print(json.dumps([platform.python_version(), found]))
"""
# The first line is where the login is at home; the others must be the same for -march=native to mean the same.
_MACHINE = (
    f"printf '{START_MARK.decode()}%s\\n' \"$HOME\"; uname -m; getconf GNU_LIBC_VERSION; "
    "grep -m1 -E '^(flags|Features)' /proc/cpuinfo"
)
NODE_DIR = ".llmtrain"


def examine_ops(
    prefix: str, hosts: Sequence[str], fleet: Fleet, node_dirs: Mapping[str, str | None]
) -> tuple[Extra | None, str]:
    """What was compiled for an environment of this machine, and the hosts it would run on.

    Args:
        prefix: the environment, at the same path everywhere.
        hosts: who gets the environment.
        fleet: open transports to them.
        node_dirs: host -> working folder there, None for the usual one; "" -> the one here.

    Returns:
        The folder that goes along, if there is one, and a sentence about it.
    """
    python, packages = _read_versions(prefix)
    name = ops_name(python, packages, f"{prefix}/bin/python")
    here = Path(node_dirs.get("") or Path.home() / NODE_DIR, "ops", name)
    built = sorted(path.stem for path in here.glob("*/*.so"))
    if not built:
        return None, f"no DeepSpeed operations are compiled here for this environment ({here})"
    _, *machine = _look(LocalTransport("head"))
    answers = run_on_all(hosts, lambda host: _look(fleet[host])).good
    same = [host for host in hosts if host in answers and answers[host][1:] == machine]
    dests = {host: f"{node_dirs.get(host) or f'{answers[host][0]}/{NODE_DIR}'}/ops/{name}" for host in same}
    others = [host for host in hosts if host not in same]
    but = f", but for {', '.join(others[:8])}: another processor or C library" if others else ""
    text = f"compiled operations ({', '.join(built)}) go along{but}"
    return Extra(path=str(here), dest=str(here), dests=dests, hosts=tuple(same), exclude=("lock", "inductor")), text


def _read_versions(prefix: str) -> tuple[str, dict[str, str | None]]:
    done = LocalTransport("head").run(Command(argv=(f"{prefix}/bin/python", "-I", "-c", _VERSIONS), timeout_s=60))
    if done.code != 0:
        raise HostError(f"the environment does not start here: {done.tail()}", where=prefix, fix=f"{prefix}/bin/python")
    python, packages = json.loads(done.stdout)
    return python, packages


def _look(transport: Transport) -> list[str]:
    done = transport.run(Command(argv=("/bin/sh", "-c", _MACHINE)))
    text = done.stdout.partition(START_MARK)[2].decode("utf-8", "replace")
    return [line.strip() for line in text.splitlines()]
