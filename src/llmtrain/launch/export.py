"""``llmtrain export``: one model directory from a checkpoint whose files lie on many hosts.

Each host takes the weights out of its own files (``train/extract``), without optimizer states and in the wanted
precision; these parts go to the first host by the sync engine and become a model there (``train/assemble``).
"""

from __future__ import annotations

import hashlib
import io
import json
import secrets
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.cluster.fleet import Command, Fleet, run_on_all
from llmtrain.errors import DiskError, InputFileError, LlmtrainError, SyncError, UsageError
from llmtrain.launch.again import read_order
from llmtrain.launch.contact import open_host
from llmtrain.launch.job import python_on
from llmtrain.launch.jobs import read_document, read_status
from llmtrain.launch.recover import recover_checkpoint
from llmtrain.launch.stage import code_files, fetch_tree
from llmtrain.spec.hostfile import Cluster, is_loopback_name, read_hostfile
from llmtrain.spec.runspec import parse_ports
from llmtrain.spec.weights import read_weights
from llmtrain.sync.distribute import run_sync
from llmtrain.sync.request import DEFAULT_PORTS, SyncRequest, refuse_failures

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmtrain.launch.rundir import RunDir
    from llmtrain.spec.runspec import RunSpec

Tell = Callable[[str], None]
WORK_S = 6 * 3600.0
_UNPACK = 'umask 077; mkdir -p "$1" && exec tar -xf - -C "$1"'
BLOCK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is exported, and where to."""

    step: int | None
    """Of the checkpoint; the newest that all hosts have if not given."""
    dtype: str | None
    """``bf16`` or ``fp32``; what the run's own model has if not given."""
    host: str | None
    """Host that gets it; None for this machine."""
    path: str
    """A new folder there."""


def parse_target(text: str) -> tuple[str | None, str]:
    """``DIR`` here, or ``HOST:/DIR``. Pure.

    Raises:
        UsageError: a folder on a host that is not absolute.
    """
    host, colon, path = text.partition(":")
    if not colon or "/" in host:
        return None, text
    if not path.startswith("/"):
        raise UsageError("a folder on a host must be an absolute path", where=text, fix=f"write {host}:/PATH")
    return host, path


def export(run_dir: RunDir, wanted: Wanted, tell: Tell) -> dict[str, Any]:
    """Make a model directory from a run's checkpoint.

    Args:
        run_dir: the run, as it is on the head.
        wanted: which step, in which precision, where to.
        tell: called with a line for each part of the work.

    Returns:
        ``output``, ``step``, ``dtype``, ``tensors``, ``bytes``, ``files`` (name -> [bytes, SHA-256]), ``merged``,
        ``loaded``, ``peak_rss_bytes`` of the assembling process, ``seconds``.

    Raises:
        UsageError: the run still trains, is a program of the user's, or has no such checkpoint.
        InputFileError: files are damaged, or the base model is another one.
        LlmtrainError: a host cannot be reached, a copy failed, a disk is full.
    """
    begun = time.monotonic()
    work = _open(run_dir, wanted)
    try:
        step = work.find_step(wanted.step, tell)
        tell(f"step {step}: each of {len(work.cluster.names)} hosts takes its weights out of its files")
        work.extract(tell)
        work.gather(tell)
        tell(f"assembling the model on {work.first}")
        said = work.assemble()
        tell(f"bringing {said['bytes'] / 2**30:.2f} GiB to {_show(wanted)}")
        work.deliver(said["files"])
    finally:
        work.close()
    return {
        "output": _show(wanted),
        "step": step,
        "dtype": work.dtype,
        **said,
        "seconds": round(time.monotonic() - begun, 1),
    }


def _show(wanted: Wanted) -> str:
    return f"{wanted.host}:{wanted.path}" if wanted.host else str(Path(wanted.path).absolute())


def _open(run_dir: RunDir, wanted: Wanted) -> _Work:
    status = read_status(run_dir)
    document = read_document(run_dir.run_file)
    if status.status == "running":
        raise UsageError("the run is running", where=status.run_id, fix=f"llmtrain stop {status.run_id}")
    if document.get("task") != "finetune":
        raise UsageError("checkpoints of a script of yours are its own", where=status.run_id)
    if wanted.host is None and (Path(wanted.path).exists() or not Path(wanted.path).absolute().parent.is_dir()):
        raise UsageError("the output exists, or its parent does not", where=wanted.path, fix="name a new folder")
    names = read_document(run_dir.order).get("env_names", ())
    spec = read_order(run_dir, envs=dict.fromkeys(names, "")).spec
    cluster = read_hostfile(run_dir.hostfile)
    local = len(cluster.names) == 1 and is_loopback_name(cluster.names[0])
    extra = [wanted.host] if wanted.host and wanted.host not in cluster.names else []
    found = run_on_all([*cluster.names, *extra], lambda name: open_host(name, local=local))
    fleet = Fleet(found.all_good())
    if wanted.host and fleet[wanted.host].run(Command(argv=("test", "-e", wanted.path))).code == 0:
        fleet.close()
        raise UsageError("the output exists", where=_show(wanted), fix="name a new folder")
    return _Work(document=document, spec=spec, cluster=cluster, fleet=fleet, wanted=wanted)


class _Work:
    """An export under way, with a scratch folder on every host of the run."""

    def __init__(
        self, *, document: dict[str, Any], spec: RunSpec, cluster: Cluster, fleet: Fleet, wanted: Wanted
    ) -> None:
        self.document = document
        self.spec = spec
        self.cluster = cluster
        self.fleet = fleet
        self.wanted = wanted
        self.first = cluster.names[0]
        self.dtype = wanted.dtype or ("fp32" if document["model"]["dtype"] == "fp32" else "bf16")
        self.scratch = f"{document['run_dir']}/export-{secrets.token_hex(4)}"
        self.checkpoint = ""
        self.parts = [f"{self.scratch}/parts"]

    def find_step(self, step: int | None, tell: Tell) -> int:
        """Choose the checkpoint; a host that lost its files is given them from their copy."""

        def told(what: str, values: dict[str, Any]) -> None:
            if what == "bring":
                tell(f"{values['host']} lacks {values['checkpoint']}: bringing the copy that {values['keeper']} keeps")

        folder, only = str(self.document["checkpoints"]), None if step is None else f"step-{step:06d}"
        found = recover_checkpoint(self.fleet, self.cluster.names, folder, told, only=only)
        if found is None:
            what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            raise UsageError(f"{what} is on all hosts of the run", where=folder, fix="llmtrain status shows the run")
        self.checkpoint = found
        return int(found.rpartition("-")[2])

    def extract(self, tell: Tell) -> None:
        """The weights of every host's ranks, on that host."""
        archive = self._archive()

        def work(name: str) -> int:
            unpack = ("/bin/sh", "-c", _UNPACK, "sh", self.scratch)
            done = self.fleet[name].run(Command(argv=unpack, stdin=archive, timeout_s=60))
            if done.code:
                raise DiskError(f"the code could not be written: {done.tail()}", where=name, fix="df -h")
            ranks = ",".join(map(str, self.cluster.ranks_of(name)))
            said = self._call(
                name, "extract", self.checkpoint, f"{self.scratch}/parts", "--dtype", self.dtype, "--ranks", ranks
            )
            tell(f"{name}: {said['bytes'] / 2**30:.2f} GiB of weights")
            return int(said["bytes"])

        run_on_all(self.cluster.names, work).all_good()

    def gather(self, tell: Tell) -> None:
        """All parts to the first host."""
        for number, name in enumerate(self.cluster.names[1:], start=1):
            tell(f"{name}: sending its part to {self.first}")
            self.parts.append(f"{self.scratch}/parts-{number}")
            self._send(name, self.parts[0], self.first, self.parts[-1])

    def _send(self, source: str, path: str, host: str, dest: str) -> None:
        request = SyncRequest(
            path=path,
            source_host=source,
            dest=dest,
            hosts=(host,),
            keep=0,
            network=self.spec.network,
            ports=parse_ports(self.spec.ports) if self.spec.ports else DEFAULT_PORTS,
            pythons={host: python_on(self.spec, host)},
        )
        fleet = Fleet({host: self.fleet[host]})
        refuse_failures(run_sync(request, fleet, lambda *_: None, source=self.fleet[source]))

    def assemble(self) -> dict[str, Any]:
        """The model, in the scratch folder of the first host."""
        order = {
            "run": f"{self.scratch}/run.json",
            "checkpoint": self.checkpoint,
            "parts": self.parts,
            "dtype": self.dtype,
            "output": f"{self.scratch}/model",
        }
        return self._call(self.first, "assemble", stdin=json.dumps(order).encode())

    def deliver(self, files: Mapping[str, Sequence[Any]]) -> None:
        """To its place, and proven to be what was assembled."""
        source, wanted = f"{self.scratch}/model", self.wanted
        if wanted.host is None:
            fetch_tree(self.fleet, self.first, source, Path(wanted.path), lambda _sent: None)
            _prove(Path(wanted.path), files)
        elif wanted.host == self.first:
            move = 'mkdir -p "$(dirname "$2")" && [ ! -e "$2" ] && mv -T "$1" "$2"'
            done = self.fleet[self.first].run(Command(argv=("/bin/sh", "-c", move, "sh", source, wanted.path)))
            if done.code:
                raise SyncError(
                    f"it could not be put there: {done.tail()}", where=_show(wanted), fix="name a new folder"
                )
        else:
            self._send(self.first, source, wanted.host, wanted.path)

    def close(self) -> None:
        """Leave nothing behind."""
        remove = Command(argv=("rm", "-rf", "--", self.scratch), timeout_s=600)
        run_on_all(self.cluster.names, lambda name: self.fleet[name].run(remove))
        self.fleet.close()

    def _call(self, name: str, module: str, *words: str, stdin: bytes = b"") -> dict[str, Any]:
        python = python_on(self.spec, name)
        argv = ("env", f"PYTHONPATH={self.scratch}/code", python, "-m", f"llmtrain.train.{module}", *words)
        done = self.fleet[name].run(Command(argv=argv, stdin=stdin, timeout_s=WORK_S))
        try:
            said: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        except (ValueError, IndexError):
            raise LlmtrainError(f"the export failed: {done.tail()}", where=name, fix="llmtrain check") from None
        if "error" in said:
            raise InputFileError(said["error"], where=f"{name}: {said['where']}", fix=said["fix"])
        return said

    def _archive(self) -> bytes:
        first = {"host": self.first, "ranks": list(self.cluster.ranks_of(self.first)), "threads": 1, "cores": {}}
        data = dict(self.document["data"])
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for name, text in code_files():
                _add(tar, name, text)
            if str(data["chat_template"] or "").endswith("/template.jinja"):  # it went with the run's folder
                _add(tar, "template.jinja", self._template())
                data["chat_template"] = f"{self.scratch}/template.jinja"
            _add(tar, "run.json", json.dumps({**self.document, **first, "data": data}).encode())
        return buffer.getvalue()

    def _template(self) -> bytes:
        path = str(self.spec.data.chat_template)
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise InputFileError(f"the run's chat template cannot be read: {error.strerror}", where=path) from None


def _add(tar: tarfile.TarFile, name: str, text: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(text)
    tar.addfile(info, io.BytesIO(text))


def _prove(folder: Path, files: Mapping[str, Sequence[Any]]) -> None:
    """Headers, sizes and digests are those of the host that made it."""
    read_weights(folder)
    for name, (_, wanted) in files.items():
        digest = hashlib.sha256()
        with (folder / name).open("rb") as stream:
            while block := stream.read(BLOCK):
                digest.update(block)
        if digest.hexdigest() != wanted:
            raise SyncError("the copy differs from what was assembled", where=str(folder / name), fix="export again")
