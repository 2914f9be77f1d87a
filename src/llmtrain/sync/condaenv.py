"""What a conda, venv or uv environment needs to work at its destination, and the proof that it does."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.cluster.fleet import START_MARK, Command, Fleet, run_on_all
from llmtrain.errors import InputFileError, SyncError, UsageError
from llmtrain.sync import envlook
from llmtrain.sync.archive import unpack
from llmtrain.sync.envlook import look

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmtrain.cluster.fleet import Result, Transport
    from llmtrain.sync.request import SyncReport

PROVED = ("torch", "deepspeed", "transformers")
PROVE_S = 300.0
SYSTEM = ("/usr", "/bin", "/lib")

# Runs under the environment's own interpreter on every host; the answers must be the same everywhere. The imports take
# many seconds: they are not tried again where they worked in a tree of the same digest, which a record beside it says.
_PROOF = """
import importlib, importlib.util, json, os, sys
place = os.path.realpath(sys.prefix)
found = {"python": sys.version.split()[0], "prefix": place, "imports": {}, "scripts": []}
record = os.path.join(os.path.dirname(place), ".%s.llmtrain" % os.path.basename(place)[:200], "proved.json")
try:
    with open(record) as stream:
        proved = json.load(stream)
except (OSError, ValueError):
    proved = {}
if sys.argv[2] and proved.get("root") == sys.argv[2]:
    found["imports"] = proved["imports"]
else:
    for name in json.loads(sys.argv[1]):
        if importlib.util.find_spec(name) is not None:
            found["imports"][name] = str(getattr(importlib.import_module(name), "__version__", "?"))
    try:
        with open(record + ".new", "w") as stream:
            json.dump({"root": sys.argv[2], "imports": found["imports"]}, stream)
        os.replace(record + ".new", record)
    except OSError:
        pass
from importlib.metadata import distributions
found["packages"] = sorted({"%s %s" % (one.metadata["Name"], one.version) for one in distributions()})
meta = os.path.join(sys.prefix, "conda-meta")
found["conda"] = sorted(one for one in os.listdir(meta) if one.endswith(".json")) if os.path.isdir(meta) else []
folder = os.path.join(sys.prefix, "bin")
for name in sorted(os.listdir(folder)):
    path = os.path.join(folder, name)
    if os.path.isfile(path):
        with open(path, "rb") as stream:
            line = stream.readline(4096)
        if line.startswith(b"#!"):
            words = line[2:].split()
            program = os.fsdecode(words[0]) if words else ""
            if not os.path.exists(program):
                found["scripts"].append("%s starts %s" % (name, program))
print("PROOF" + json.dumps(found))
"""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """An environment, here or on a host."""

    prefix: str
    """Its folder."""
    kind: str
    """conda, venv, uv or plain."""
    bases: tuple[tuple[str, str], ...] = ()
    """Folders of the interpreter a venv was made from: (where it is, by which name the environment calls it)."""
    shared: bool = False
    """Whether it also uses the packages of that interpreter."""
    editable: tuple[tuple[str, str], ...] = ()
    """Packages installed in place: (name, folder outside the environment)."""


@dataclass(frozen=True, kw_only=True)
class Extra:
    """A folder that goes along with an environment."""

    path: str
    """Where it is."""
    dest: str
    """Where it has to be on the hosts."""
    exclude: tuple[str, ...] = ()
    """What of it does not travel."""
    interpreter: bool = False
    """Whether it is a Python: hosts that have the very same build there are left alone."""
    hosts: tuple[str, ...] | None = None
    """Who gets it, if not all."""
    dests: Mapping[str, str] = field(default_factory=dict)
    """Where it has to be on hosts where that is another path."""


def read_environment(prefix: Path) -> Environment:
    """Look at an environment on this machine.

    Raises:
        InputFileError: not an environment.
    """
    return _parse_look(str(prefix), look(str(prefix)))


def examine_environment(source: Transport, prefix: str) -> Environment:
    """Look at an environment on a host.

    Raises:
        InputFileError: not an environment.
        HostError: the host does not answer.
    """
    text = Path(str(envlook.__file__)).read_text(encoding="utf-8")
    script = f"{text}\n\nprint({START_MARK.decode()!r} + json.dumps(look({prefix!r})))\n"
    done = source.run(Command(argv=("python3", "-I", "-"), stdin=script.encode(), timeout_s=PROVE_S))
    answer = done.stdout.partition(START_MARK)[2]
    if done.code != 0 or not answer:
        raise SyncError(
            f"the environment cannot be looked at: {done.tail()}", where=source.name, fix="python3 -V there"
        )
    return _parse_look(f"{source.name}:{prefix}", json.loads(answer))


def _parse_look(where: str, found: dict[str, Any] | None) -> Environment:
    if found is None:
        raise InputFileError(
            "not an environment: it has no bin/python", where=where, fix="name a prefix, or a conda-pack archive"
        )
    return Environment(
        prefix=where,
        kind=found["kind"],
        bases=tuple((path, name) for path, name in found["bases"]),
        shared=found["shared"],
        editable=tuple((name, folder) for name, folder in found["editable"]),
    )


def prepare_environment(
    path: Path, dest: str, *, relocate: bool, force: bool = False
) -> tuple[Path, tuple[Extra, ...], list[str]]:
    """Make an environment ready to be copied to ``dest``.

    An archive is unpacked here, once, at its final prefix. For another path a rewritten copy is made beside our cache.

    Returns:
        The folder to copy, further folders it needs at their own paths (the interpreter a venv was made from), and
        what a person should know.

    Raises:
        UsageError: another path without ``--relocate``.
        InputFileError: not an environment, or one that cannot work elsewhere.
        DiskError: the archive cannot be unpacked.
    """
    notes = []
    if path.is_file():
        path = unpack(path, Path(dest), force=force)
        notes.append(f"unpacked at {path}")
    if path.is_symlink():
        raise InputFileError(
            f"a link to {path.resolve()}, whose files name that path",
            where=str(path),
            fix=f"name {path.resolve()}: then a job that runs keeps the environment it began in",
        )
    environment = read_environment(path)
    extras, more = plan_environment(environment, force=force)
    notes = [*more[:1], *notes, *more[1:]]
    if dest != str(path):
        if not relocate:
            raise _elsewhere(f"{path} -> {dest}")
        from llmtrain.sync.relocate import relocated

        path, more = relocated(path, dest)
        notes += more
    return path, extras, notes


def plan_environment(environment: Environment, *, force: bool = False) -> tuple[tuple[Extra, ...], list[str]]:
    """What goes along with an environment, and what a person should know. Pure.

    Raises:
        InputFileError: it has packages that live elsewhere.
    """
    notes = [f"{environment.kind} environment {environment.prefix}"]
    if environment.editable and not force:
        name, folder = environment.editable[0]
        raise InputFileError(
            f"{len(environment.editable)} packages are installed in place (editable): {name} from {folder}",
            where=environment.prefix,
            fix=f"pip install it normally; or llmtrain sync {folder} to the hosts as well and use --force",
        )
    extras = []
    for path, name in environment.bases:
        if name.startswith(SYSTEM):
            notes.append(f"made from the system's Python in {name}: every host needs the same one")
            continue
        # An isolated environment never looks at the packages of the interpreter it was made from.
        exclude = () if environment.shared else ("lib/python3*/site-packages/*",)
        extras.append(Extra(path=path, dest=name, exclude=exclude, interpreter=True))
        notes.append(f"its interpreter in {name} goes along where hosts have another one or none")
    return tuple(extras), notes


def examine_interpreters(extra: Extra, fleet: Fleet, hosts: Sequence[str], source: Transport) -> tuple[str, ...]:
    """Hosts that have no interpreter, or not the build (version, compiler, time) that the source has."""
    words = ("-I", "-c", "import sys; print(sys.version)")
    here = source.run(Command(argv=(f"{extra.path}/bin/python3", *words)))
    there = run_on_all(hosts, lambda name: fleet[name].run(Command(argv=(f"{extra.dest}/bin/python3", *words)))).good
    return tuple(host for host in hosts if here.code != 0 or there.get(host) is None or not _same(here, there[host]))


def _same(one: Result, two: Result) -> bool:
    return two.code == 0 and two.stdout.strip().endswith(one.stdout.strip())


def refuse_elsewhere(path: str, dest: str) -> None:
    """An environment on a host is copied as it is, so only to the same path.

    Raises:
        UsageError: the two differ.
    """
    if path != dest:
        raise _elsewhere(f"{path} -> {dest}")


def _elsewhere(where: str) -> UsageError:
    return UsageError(
        "an environment works only at the path it was made for",
        where=where,
        fix="leave --dest out, or add --relocate (of an environment on this machine) to rewrite the paths inside",
    )


def prove(report: SyncReport, fleet: Fleet, prefix: str) -> None:
    """Start the environment on every host that got it; mark those where it does not work, or is another one."""
    argv = (f"{prefix}/bin/python", "-I", "-B", "-c", _PROOF, json.dumps(PROVED), report.root)
    names = [host.host for host in report.hosts if host.ok]
    results = run_on_all(names, lambda name: _parse_proof(fleet[name].run(Command(argv=argv, timeout_s=PROVE_S))))
    proofs = results.good
    usual = _most_common(list(proofs.values()))
    for host in report.hosts:
        if host.host in results.failed:
            host.ok, host.error = False, f"copied, but it does not work there: {results.failed[host.host].error}"
        elif host.host in proofs:
            proof = proofs[host.host]
            if proof["scripts"]:
                host.ok, host.error = False, f"copied, but {proof['scripts'][0]}, which is not there"
            elif proof != usual:
                host.ok, host.error = False, f"copied, but it is not what the others have: {_difference(proof, usual)}"
            else:
                host.note = f"{host.note or 'equal'}; {render_proof(proof)}"


def render_proof(proof: dict[str, Any]) -> str:
    """What an environment said about itself, in a few words."""
    imports = ", ".join(f"{name} {version}" for name, version in proof["imports"].items())
    return f"Python {proof['python']}{', ' + imports if imports else ''} start"


def _parse_proof(result: Any) -> dict[str, Any]:
    text = result.stdout.decode("utf-8", "replace")
    _, mark, document = text.rpartition("PROOF{")
    if result.code != 0 or not mark:
        raise SyncError(result.tail(), fix="start its bin/python there")
    return dict(json.loads("{" + document))


def _most_common(proofs: list[dict[str, Any]]) -> dict[str, Any]:
    return max(proofs, key=proofs.count) if proofs else {}


def _difference(proof: dict[str, Any], usual: dict[str, Any]) -> str:
    key = next(key for key in proof if proof[key] != usual.get(key))
    return f"{key} {str(proof[key])[:80]}"
