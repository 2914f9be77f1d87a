"""Bring a planned run to its hosts: the rank code, the files of the plan, and model and data where they are missing."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import tarfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llmtrain
from llmtrain.cluster.fleet import START_MARK, Command, Fleet, render_marked, run_on_all
from llmtrain.cluster.local import kill_group, login_env
from llmtrain.errors import DiskError, HostError, SyncError
from llmtrain.sync.distribute import run_sync
from llmtrain.sync.place import BUSY
from llmtrain.sync.request import HostReport, SyncReport, SyncRequest, refuse_failures

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from llmtrain.launch.prepare import HostPlan, LaunchPlan

    Tell = Callable[[str, dict[str, Any]], None]

STAGED = ("__init__.py", "errors.py", "process.py", "spec", "train")
"""Parts of this package that the ranks need."""
BLOCK = 1 << 20
BUSY_S = 6 * 3600.0
"""As long as another launch may bring a large model to the same place."""
BUSY_PAUSE_S = 2.0
TROUBLE = frozenset({"way", "moved", "trouble", "failed"})
"""What a launch shows of a copy besides how far it is."""
SSH_FAILED = 255
"""What OpenSSH ends with if the connection failed; programs on the host end with less."""

# $1 the folder, $2 the path valid on all hosts: the folder must be new, the other path a link to it where they differ.
_UNPACK = (
    'umask 077; mkdir -p "$(dirname "$1")" && mkdir "$1" && '
    '{ [ "$1" = "$2" ] || ln -s "$1" "$2"; } && exec tar -xf - -C "$1"'
)
# $1 the final path: what is there already is never touched, what is incomplete never has the final name. The file
# "whole" comes in an archive of its own after the tree's: tar takes a stream cut between two files for a good one.
# Another launch may put the same tree there meanwhile.
_RECEIVE = (
    'set -e; part="$1.llmtrain-part.$$"; trap \'rm -rf "$part"\' EXIT; mkdir -p "$(dirname "$1")"; mkdir "$part"; '
    '(cd "$part"; tar -ixf -); [ -e "$part/whole" ]; [ -e "$1" ] || mv -T "$part/x" "$1" 2>/dev/null || true; '
    '[ ! -e "$part/x" ] || diff -rq "$part/x" "$1" >&2'
)


class LinkError(SyncError):
    """The connection to a host failed; another try may work."""


def stage(plan: LaunchPlan, fleet: Fleet) -> None:
    """Write the run folder on every host.

    Raises:
        HostError: it could not be written on some host.
    """
    code = code_files()

    def push(name: str) -> None:
        host = next(one for one in plan.hosts if one.name == name)
        script = ("/bin/sh", "-c", _UNPACK, "sh", host.own_dir, str(plan.run_dir))
        result = fleet[name].run(Command(argv=script, stdin=_pack(host, code), timeout_s=60))
        if result.code != 0:
            raise HostError(
                f"the run folder {host.own_dir} could not be written: {result.tail()}",
                where=name,
                fix=f"ssh -- {name} df -h {Path(host.own_dir).parent}",
            )

    run_on_all([host.name for host in plan.hosts], push).all_good()


def code_files() -> list[tuple[str, bytes]]:
    """Path below a run folder and content of every file of the rank code."""
    root = Path(llmtrain.__file__).parent
    paths = [
        path
        for part in STAGED
        for path in ([root / part] if (root / part).is_file() else sorted((root / part).rglob("*.py")))
    ]
    return [(f"code/llmtrain/{path.relative_to(root)}", path.read_bytes()) for path in paths]


def _pack(host: HostPlan, code: Sequence[tuple[str, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for folder in ("logs", "ranks", "beat", "done", "bin", "checkpoints"):
            info = tarfile.TarInfo(folder)
            info.type, info.mode = tarfile.DIRTYPE, 0o700
            tar.addfile(info)
        for name, data in code:
            _add(tar, name, data, 0o600)
        for file in host.files:
            _add(tar, file.path, file.text.encode("utf-8", "surrogateescape"), file.mode)
    return buffer.getvalue()


def _add(tar: tarfile.TarFile, name: str, data: bytes, mode: int) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), mode
    tar.addfile(info, io.BytesIO(data))


def copy_missing(plan: LaunchPlan, fleet: Fleet, tell: Tell) -> None:
    """Bring model and data to the hosts that lack them, along a chain: N hosts take about as long as one.

    Args:
        plan: the run.
        fleet: its hosts.
        tell: called for everything a person would want to see.

    Raises:
        SyncError: a copy failed; nothing incomplete has the final name.
    """
    for path in dict.fromkeys(path for _, path in plan.copies):

        def copy(hosts: tuple[str, ...], path: str = path) -> SyncReport:
            return _copy_to(hosts, path, plan, fleet, tell)

        def wait(host: str, path: str = path) -> None:
            tell("copy_wait", {"host": host, "path": path})

        sync_in_turn(tuple(host for host, lacking in plan.copies if lacking == path), copy, wait)


def sync_in_turn(
    hosts: tuple[str, ...], sync: Callable[[tuple[str, ...]], SyncReport], wait: Callable[[str], None]
) -> SyncReport:
    """Bring something to hosts; where another launch is bringing the same, wait for it and look again.

    Args:
        hosts: who gets it.
        sync: brings it to the hosts it is called with.
        wait: called once with every host that is waited for.

    Returns:
        A report of all hosts.

    Raises:
        SyncError: some host did not get it.
    """
    deadline, told, done = time.monotonic() + BUSY_S, set[str](), dict[str, HostReport]()
    while True:
        report = sync(hosts)
        done.update({host.host: host for host in report.hosts})
        hosts = tuple(host.host for host in report.hosts if BUSY in (host.error or ""))
        if not hosts or time.monotonic() > deadline or len(hosts) < sum(not host.ok for host in report.hosts):
            report.hosts = list(done.values())
            refuse_failures(report)
            return report
        for host in set(hosts) - told:
            wait(host)
        told |= set(hosts)
        time.sleep(BUSY_PAUSE_S)


def _copy_to(hosts: tuple[str, ...], path: str, plan: LaunchPlan, fleet: Fleet, tell: Tell) -> SyncReport:
    own = {host.name: host for host in plan.hosts}
    request = SyncRequest(
        path=path,
        dest=path,
        hosts=hosts,
        what="weights",
        rate=plan.rate,
        ports=plan.ports,
        addresses={host: own[host].address for host in hosts},
        pythons={host: own[host].python for host in hosts},
    )
    wanted: dict[str, int] = {}

    def show(what: str, values: dict[str, Any]) -> None:
        if what == "planned":
            wanted.update(values["hosts"])
        elif what == "progress":
            host = values["host"]
            tell("copy", {"host": host, "path": path, "sent": values["received"], "total": wanted.get(host, 0)})
        elif what in TROUBLE:
            tell("sync", {"what": what, "values": values})

    return run_sync(request, fleet, show)


def send_tree(source: str, fleet: Fleet, host: str, target: str, tell: Callable[[int], None]) -> None:
    """Copy one file or folder of this machine to ``target`` on a host, where nothing may be yet.

    Raises:
        SyncError: it did not arrive.
    """
    name = Path(source)
    argv = (
        "tar",
        "--no-unquote",  # tar would read a backslash in a name as an escape
        "-chf",
        "-",
        "-C",
        str(name.parent),
        f"--transform=flags=r;s,^{_escape(name.name)},x,",
        "--",
        name.name,
    )
    reader = subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=login_env(), start_new_session=True
    )
    writer = fleet[host].bulk(("/bin/sh", "-c", _RECEIVE, "sh", target))
    with _ended(reader, writer):
        _pump(reader, writer, tell, end=_whole())
        problem = _outcome(reader, writer)
    if problem:
        kind = LinkError if writer.returncode == SSH_FAILED else SyncError
        raise kind(f"{source} did not arrive at {target}: {problem}", where=host, fix=f"ssh -- {host} df -h {target}")


@contextlib.contextmanager
def _ended(*processes: subprocess.Popen[bytes]) -> Iterator[None]:
    """However this ends, the processes are gone and their pipes are closed."""
    try:
        yield
    finally:
        for process in processes:
            if process.poll() is None:
                kill_group(process)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream:
                    with contextlib.suppress(OSError):
                        stream.close()


def _escape(text: str) -> str:
    return "".join(f"\\{char}" if char in ".*[]^$\\,/&" else char for char in text)


def _whole() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        _add(tar, "whole", b"", 0o600)
    return buffer.getvalue()


def _pump(
    reader: subprocess.Popen[bytes], writer: subprocess.Popen[bytes], tell: Callable[[int], None], *, end: bytes = b""
) -> None:
    """Pass on what one process writes to another; then ``end``, if the first one says that it was all."""
    sent = 0
    if reader.stdout is None or writer.stdin is None:
        raise AssertionError("both processes have pipes")
    try:
        while block := reader.stdout.read(BLOCK):
            writer.stdin.write(block)
            sent += len(block)
            tell(sent)
        if end and reader.wait() == 0:
            writer.stdin.write(end)
        writer.stdin.close()
    except BrokenPipeError:
        kill_group(reader)


def _outcome(reader: subprocess.Popen[bytes], writer: subprocess.Popen[bytes]) -> str | None:
    words = _last_line(writer)
    code = writer.wait()
    if reader.wait() == SSH_FAILED:
        return _last_line(reader) or "the connection failed"
    if code != 0 and words:
        return words
    if reader.returncode != 0:
        return _last_line(reader) or "the source changed or could not be read"
    return f"exit code {code}" if code != 0 else None


def _last_line(process: subprocess.Popen[bytes]) -> str:
    text = process.stderr.read().decode("utf-8", "replace").strip() if process.stderr else ""
    return text.splitlines()[-1] if text else ""


def fetch_tree(fleet: Fleet, host: str, source: str, target: Path, tell: Callable[[int], None]) -> None:
    """Copy a folder of a host to ``target`` here, complete or not at all.

    Raises:
        SyncError: it did not arrive.
        DiskError: it cannot be put there.
    """
    part = target.with_name(f".{target.name}.llmtrain-part.{os.getpid()}")
    try:
        part.mkdir(parents=True)
        reader = fleet[host].bulk(("/bin/sh", "-c", f'{render_marked(("tar", "-cf", "-", "-C"))} "$1" .', "sh", source))
        writer = subprocess.Popen(
            ["tar", "-xf", "-"],
            cwd=part,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        with _ended(reader, writer):
            if reader.stdin:
                reader.stdin.close()
            _skip_greeting(reader, writer)
            _pump(reader, writer, tell)
            problem = _outcome(reader, writer)
            kind = LinkError if reader.wait() == SSH_FAILED else SyncError
        if problem:
            raise kind(f"{source} did not arrive: {problem}", where=host, fix=f"df -h {target.parent}")
        part.rename(target)
    except OSError as error:
        raise DiskError(f"the model cannot be put there: {error.strerror}", where=str(target), fix="df -h") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _skip_greeting(reader: subprocess.Popen[bytes], writer: subprocess.Popen[bytes]) -> None:
    """Leave out what start-up files of the login's shell print ahead of the mark."""
    seen = b""
    while reader.stdout and START_MARK not in seen and (block := os.read(reader.stdout.fileno(), BLOCK)):
        seen += block
    if writer.stdin:
        writer.stdin.write(seen.partition(START_MARK)[2])


def remove(plan: LaunchPlan, fleet: Fleet, *, names: Sequence[str], keep: Sequence[str] = ()) -> None:
    """Remove the run folder from hosts, but for the named entries; a host that does not answer is left as it is."""
    own = {host.name: host.own_dir for host in plan.hosts}
    keepers = [part for name in keep for part in ("!", "-name", name)]

    def clean(name: str) -> None:
        folder = own[name]
        find = ("find", folder, "-mindepth", "1", "-maxdepth", "1", *keepers, "-exec", "rm", "-rf", "{}", "+")
        fleet[name].run(Command(argv=find, timeout_s=60))
        fleet[name].run(Command(argv=("rmdir", folder)))
        if "checkpoints" not in keep and not str(plan.run["checkpoints"]).startswith(f"{plan.run_dir}/"):
            fleet[name].run(Command(argv=("rm", "-rf", "--", str(plan.run["checkpoints"])), timeout_s=60))
        if str(plan.run_dir) != folder:
            fleet[name].run(Command(argv=("rm", "-f", str(plan.run_dir))))

    run_on_all(list(names), clean)


def remove_scratch(plan: LaunchPlan, fleet: Fleet) -> None:
    """Remove swap files from every host that answers."""
    if plan.scratch:
        command = Command(argv=("rm", "-rf", "--", *plan.scratch), timeout_s=120)
        run_on_all([host.name for host in plan.hosts], lambda name: fleet[name].run(command))
