"""Questions to a host as data: an argv, what it reads, and a pure parser of the answer."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import time
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from llmtrain.cluster import hostdetails, hostfacts
from llmtrain.cluster.details import Details, parse_details
from llmtrain.cluster.fleet import Command, Fleet, HostResults, Result, run_on_all
from llmtrain.errors import HostError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface of a host."""

    name: str
    """Its name there."""
    ipv4: str | None
    """Address and prefix length, as in ``10.0.0.4/24``."""
    up: bool
    """Whether the kernel calls it up."""
    speed_mbits: int | None
    """Link speed; None where the driver does not say."""
    mtu: int
    """Largest frame in bytes."""
    loopback: bool
    """The loopback interface."""
    bridge: bool
    """A software bridge, such as docker0."""
    physical: bool
    """Backed by a device."""
    rdma: bool
    """Has an InfiniBand or RoCE device."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a host said about itself."""

    host: str
    """Its name in the hostfile."""
    hostname: str
    """Its own name."""
    machine_id: str
    """``/etc/machine-id``; two images may share one."""
    boot_id: str
    """Random number of the running kernel; one per machine and boot."""
    uid: int
    """User id of the login."""
    home: str
    """Home folder of the login."""
    ssh_address: str
    """Address our SSH connection arrived at; ``-`` for this machine."""
    own_address: str | None
    """What its own name resolves to there."""
    python: str
    """Version of the interpreter the ranks would use."""
    executable: str
    """Path of that interpreter."""
    packages: dict[str, str | None]
    """Versions of what training needs; None where not installed."""
    accelerators: tuple[dict[str, str | None], ...]
    """One entry per NVIDIA GPU, fields of ``nvidia-smi --query-gpu``."""
    other_accelerators: tuple[str, ...]
    """Device files of other makes."""
    cpus: tuple[int, ...]
    """Processors the login may use."""
    memory_total_bytes: int
    """RAM, or the cgroup's limit."""
    memory_available_bytes: int
    """RAM that is free or reclaimable."""
    node_dir: str
    """Working folder on the host."""
    node_dir_free_bytes: int
    """Free space there."""
    node_dir_writable: bool
    """Whether the login may create it."""
    interfaces: tuple[Interface, ...]
    """Network interfaces."""
    free_ports: tuple[int, ...]
    """Some ports nobody listens on."""
    trees: dict[str, dict[str, Any]]
    """Path -> what stands there, see :func:`hostfacts.tree_digest`."""
    glibc: str
    """Version of the C library."""
    machine: str
    """Processor architecture."""
    noise: str
    """What shell start-up files printed around the answer."""
    environment: str | None = None
    """Digest of what is installed there, see :func:`hostfacts.environment_digest`."""
    node_dir_free_inodes: int | None = None
    """How many more files fit there; 0 where the file system does not count them."""
    time: float | None = None
    """Its clock, in seconds since 1970, when it answered."""
    clock_skew_s: float | None = None
    """Seconds its clock is certainly ahead of ours (behind, if negative): 0 within the time the answer took."""
    details: Details = field(default_factory=Details)
    """Limits, tools, drivers."""


@dataclass(frozen=True, kw_only=True)
class FactsRequest:
    """What to ask."""

    python: str
    """Interpreter on the host."""
    node_dir: str | None = None
    """Working folder; ``.llmtrain`` in the home if None."""
    ports: tuple[int, int] | None = None
    """Range to find free ports in."""
    trees: tuple[str, ...] = ()
    """Paths to digest."""
    deep: bool = False
    """Digest every byte of every file instead of samples."""
    timeout_s: float = 120.0
    """Deadline; digests of large trees read a few MiB of every file."""


class InterpreterError(HostError):
    """The interpreter of the ranks is missing, or gives no answer."""

    check = "interpreter"
    """Where it belongs among the findings."""


def facts_command(request: FactsRequest) -> Command:
    """The command that asks a host for its facts."""
    wanted = {"node_dir": request.node_dir, "ports": request.ports, "trees": request.trees, "deep": request.deep}
    source = "\n".join(Path(str(part.__file__)).read_text(encoding="utf-8") for part in (hostfacts, hostdetails))
    script = f"{source}\n\nrequest = json.loads({json.dumps(json.dumps(wanted))})\nanswer(request, details(request))\n"
    return Command(argv=(request.python, "-I", "-"), stdin=script.encode(), timeout_s=request.timeout_s)


def parse_facts(host: str, result: Result, *, python: str) -> Facts:
    """Read a host's answer, taking only what stands between the marks.

    Raises:
        HostError: there was no interpreter, or it gave no answer.
    """
    text = result.stdout.decode("utf-8", "replace")
    match = re.search(f"{hostfacts.MARK}(.*){hostfacts.MARK}", text, re.DOTALL)
    if match is None:
        if result.code in {126, 127}:
            raise InterpreterError(
                f"no interpreter {python}",
                where=host,
                fix=f"llmtrain sync-env {shlex.quote(_prefix_of(python))}, if it is here; or install it there; "
                "llmtrain launch --set environment=PREFIX names another one",
            )
        raise InterpreterError(
            f"the interpreter {python} failed: {result.tail()}", where=host, fix=f"ssh -- {host} {python} -V"
        )
    return make_facts(host, json.loads(match[1]), noise=(text[: match.start()] + text[match.end() :]).strip())


def _prefix_of(python: str) -> str:
    """The environment of an interpreter, by its path."""
    return str(PurePosixPath(python).parent.parent)


def make_facts(host: str, answer: dict[str, Any], *, noise: str = "") -> Facts:
    """Facts from the decoded answer."""
    plain = ("hostname", "machine_id", "boot_id", "uid", "home", "ssh_address", "own_address", "python", "executable")
    return Facts(
        host=host,
        **{key: answer[key] for key in plain},
        packages=answer["packages"],
        accelerators=tuple(answer["accelerators"]),
        other_accelerators=tuple(answer["other_accelerators"]),
        cpus=tuple(answer["cpus"]),
        memory_total_bytes=answer["memory"]["total_bytes"],
        memory_available_bytes=answer["memory"]["available_bytes"],
        node_dir=answer["node_dir"]["path"],
        node_dir_free_bytes=answer["node_dir"]["free_bytes"],
        node_dir_writable=answer["node_dir"]["writable"],
        interfaces=tuple(Interface(**item) for item in answer["interfaces"]),
        free_ports=tuple(answer["free_ports"]),
        trees=answer["trees"],
        glibc=answer["glibc"],
        machine=answer["machine"],
        noise=noise,
        environment=answer.get("environment"),
        node_dir_free_inodes=answer["node_dir"].get("free_inodes"),
        time=answer.get("time"),
        details=parse_details(answer.get("details") or {}),
    )


def clock_skew(there: float, asked: float, answered: float) -> float:
    """Seconds a clock is certainly off, since it was read at some time between question and answer."""
    return min(0.0, there - asked) if there < asked else max(0.0, there - answered)


def ops_folder(facts: Facts) -> str:
    """Where compiled operations lie on a host."""
    return f"{facts.node_dir}/ops/{ops_name(facts.python, facts.packages, facts.executable)}"


def ops_name(python: str, packages: Mapping[str, str | None], executable: str) -> str:
    """Name of the folder of compiled operations, apart for everything they depend on.

    The interpreter's folder is part of it (``python`` and ``python3`` are one environment): ninja compiles all again
    when it finds headers of another environment, in the middle of a run that has loaded what was there.
    """
    versions = "-".join(str(packages.get(name)) for name in ("torch", "deepspeed"))
    environment = hashlib.sha256(os.fsencode(executable.rpartition("/")[0])).hexdigest()[:8]
    return f"py{python}-{versions}-{environment}"


def examine(fleet: Fleet, requests: dict[str, FactsRequest]) -> HostResults[Facts]:
    """Ask every host for its facts, all at once."""

    def ask(name: str) -> Facts:
        request = requests[name]
        asked = time.time()
        result = fleet[name].run(facts_command(request))
        facts = parse_facts(name, result, python=request.python)
        if facts.time is None:
            return facts
        return replace(facts, clock_skew_s=clock_skew(facts.time, asked, time.time()))

    return run_on_all(list(fleet), ask)


def read_tree(path: str, *, deep: bool = False) -> dict[str, Any]:
    """The digest of a tree on this machine, comparable with :attr:`Facts.trees`."""
    return hostfacts.tree_digest(str(Path(path).resolve()), deep)


def same_machine(facts: Sequence[Facts]) -> list[tuple[str, str]]:
    """Pairs of names that are one machine: same boot id, and same machine id and host name."""
    seen: dict[tuple[str, str, str], str] = {}
    pairs = []
    for item in facts:
        key = (item.boot_id, item.machine_id, item.hostname)
        if key in seen:
            pairs.append((seen[key], item.host))
        seen.setdefault(key, item.host)
    return pairs
