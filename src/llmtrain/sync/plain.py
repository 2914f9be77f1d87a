"""Hosts without Python: the tree goes by tar through ssh and is looked at with find and sha256sum.

No agent runs there, so nothing is reused or passed on, and nothing that stands is replaced: what swaps two trees in one
step is not among the tools such a host is sure to have. The new tree is made beside the destination, compared in every
attribute and digest with what was read here, and gets its name in one rename.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
import time
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING

from llmtrain.cluster.fleet import Command
from llmtrain.sync.manifest import MIB, Entry, Scan, TreeError
from llmtrain.sync.place import judge_place
from llmtrain.sync.relay import Bucket

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmtrain.cluster.fleet import Transport
    from llmtrain.sync.request import SyncRequest

TOOLS = ("tar", "find", "xargs", "sha256sum", "mktemp", "mv", "df")
LOOK_S = 900.0
TELL_S = 0.5

# $1 the destination. First line: tools that are missing; then what stands there, free KiB, homes, mount points.
_EXAMINE = (
    "lacking=; for tool in "
    + " ".join(TOOLS)
    + '; do command -v "$tool" >/dev/null || lacking="$lacking $tool"; done; '
    'tar --version 2>/dev/null | grep -q "GNU tar" || lacking="$lacking GNU-tar"; echo "$lacking"; '
    'if [ -L "$1" ]; then echo link; elif [ -e "$1" ]; then echo there; else echo free; fi; '
    'up=${1%/*}; mkdir -p "${up:-/}" && df -Pk "${up:-/}" | tail -n 1 | '
    'while read -r a b c free rest; do echo "$free"; done; '
    "cut -d: -f6 /etc/passwd | tr '\\n' ':'; echo; cut -d' ' -f5 /proc/self/mountinfo | tr '\\n' ':'; echo"
)
# $1 the working folder beside the destination: a new folder in it, old ones that nobody finished are removed.
_PREPARE = (
    'umask 077; mkdir -p "$1" && find "$1" -maxdepth 1 -name "plain-*" -mmin +1440 -exec rm -rf {} + ; '
    'mktemp -d "$1/plain-XXXXXXXX"'
)
# $1 where, $2 the name there: attributes of all entries, an empty field, digests of all files.
_LOOK = (
    'cd "$1" && find "$2" -printf "%y\\0%m\\0%s\\0%T@\\0%D:%i\\0%l\\0%p\\0" && printf "end\\0" '
    '&& find "$2" -type f -print0 | xargs -0 -r sha256sum -z --'
)
# $1 the new tree, $2 the destination.
_COMMIT = 'sync -f "$1" && [ ! -e "$2" ] && [ ! -L "$2" ] && mv -T -- "$1" "$2"'
_CLEAN = 'rm -rf -- "$1"; rmdir -- "${1%/*}" 2>/dev/null; true'
_UNPACK = ("env", "LC_ALL=C", "tar", "--warning=no-unknown-keyword", "--delay-directory-restore", "--no-same-owner")


class PlainError(Exception):
    """Why a host did not get the tree this way."""


@dataclass
class Sent:
    """What went to one host."""

    bytes: int = 0
    """Of the archive; 0 if the tree was there already."""
    digests: dict[str, str] = field(default_factory=dict)
    """Path -> SHA-256 of what was read here."""


def push_plain(request: SyncRequest, transport: Transport, told: Callable[[int], None]) -> Sent:
    """Bring a tree to a host that has no Python.

    Args:
        request: what and where to; the source is on this machine.
        transport: the host.
        told: called now and then with the bytes that went.

    Raises:
        PlainError: it did not get it; what stood there is as it was.
        HostError: the host does not answer.
    """
    dest = request.dest_on(transport.name)
    scan = Scan(request.path, request.exclude, request.what == "weights").run()
    try:
        there = _examine(transport, dest, sum(entry.size for entry in scan.entries if entry.kind == "f"))
    except TreeError as error:
        raise PlainError(str(error)) from None
    parent, name = os.path.split(dest)
    if there:
        sent = Sent(digests=_read_digests(scan))
        differs = compare(scan.entries, sent.digests, _look(transport, parent, name), name, extras=not request.delete)
        if differs:
            raise PlainError(f"no python3 there, so nothing is replaced, and {differs}: remove it or name a new path")
        return sent
    if request.dry_run:
        return Sent()
    folder = _run(transport, _PREPARE, f"{parent}/.{name[:200]}.llmtrain").strip()
    try:
        sent = _send(request, scan, transport, folder, told)
        if differs := compare(scan.entries, sent.digests, _look(transport, folder, "tree"), "tree"):
            raise PlainError(f"the copy could not be verified: {differs}")
        if changed := scan.changed():
            raise PlainError(f"the source changed while it was copied: {changed}")
        _run(transport, _COMMIT, f"{folder}/tree", dest)
    finally:
        transport.run(Command(argv=("/bin/sh", "-c", _CLEAN, "sh", folder), timeout_s=LOOK_S))
    return sent


def _run(transport: Transport, script: str, *words: str) -> str:
    done = transport.run(Command(argv=("/bin/sh", "-c", script, "sh", *words), timeout_s=LOOK_S))
    if done.code:
        raise PlainError(done.tail())
    return os.fsdecode(done.stdout)


def _examine(transport: Transport, dest: str, size: int) -> bool:
    """Whether something stands at a destination that may be used; else why it may not."""
    lacking, state, free, homes, mounts = (_run(transport, _EXAMINE, dest).split("\n") + [""] * 5)[:5]
    if lacking.strip():
        raise PlainError(f"no python3 on this host, and for a copy by tar it lacks {lacking.strip()}")
    judge_place(dest, set(homes.split(":")), mounts.split(":"))
    if state == "link":
        raise PlainError("no python3 on this host, and the destination is a link: name what it leads to")
    if state == "free" and int(free or 0) * 1024 < size:
        raise PlainError(f"disk full: {size / 2**30:.1f} GiB are needed, {int(free or 0) / 2**20:.1f} GiB are free")
    return state == "there"


def _read_digests(scan: Scan) -> dict[str, str]:
    found = {}
    for entry in scan.entries:
        if entry.kind == "f":
            with open(scan.full(entry.path), "rb") as stream:  # noqa: PTH123  names may be any bytes
                read = _Read(stream)
                while read.read(MIB):
                    pass
                found[entry.path] = read.digest.hexdigest()
    return found


# --- sending


class _Outlet:
    """Where the archive goes: counted, and no faster than asked for."""

    def __init__(self, sink: IO[bytes], rate: float | None, told: Callable[[int], None]) -> None:
        self.sink = sink
        self.bucket = Bucket(rate) if rate else None
        self.told = told
        self.count = 0
        self._at = time.monotonic()

    def write(self, data: bytes) -> int:
        """All of it."""
        if self.bucket:
            self.bucket.take(len(data))
        self.sink.write(data)
        self.count += len(data)
        if time.monotonic() - self._at > TELL_S:
            self._at = time.monotonic()
            self.told(self.count)
        return len(data)


class _Read:
    """A file whose digest is made while it is read."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream = stream
        self.digest = hashlib.sha256()

    def read(self, count: int) -> bytes:
        """The next bytes."""
        data = self.stream.read(count)
        self.digest.update(data)
        return data


def _send(request: SyncRequest, scan: Scan, transport: Transport, folder: str, told: Callable[[int], None]) -> Sent:
    process = transport.bulk((*_UNPACK, "-x", "-p", "-f", "-", "-C", folder))
    assert process.stdin is not None  # noqa: S101  asked for
    outlet = _Outlet(process.stdin, request.rate, told)
    sent = Sent()
    trouble: OSError | None = None
    try:
        with tarfile.open(fileobj=outlet, mode="w|", format=tarfile.PAX_FORMAT, bufsize=MIB) as archive:  # type: ignore[call-overload]
            for entry in scan.entries:
                _add(archive, scan, entry, sent)
    except OSError as error:
        trouble = error
    _, errors = process.communicate()
    if process.returncode or trouble is not None:
        said = errors.decode("utf-8", "replace").strip().splitlines()
        raise PlainError(said[-1] if said else str(trouble or f"tar ended with {process.returncode}"))
    sent.bytes = outlet.count
    return sent


def _add(archive: tarfile.TarFile, scan: Scan, entry: Entry, sent: Sent) -> None:
    member = tarfile.TarInfo(_name(entry.path, "tree"))
    member.mode = entry.mode
    member.mtime = entry.mtime_ns // 10**9
    if entry.mtime_ns % 10**9:
        sign, ns = ("-", -entry.mtime_ns) if entry.mtime_ns < 0 else ("", entry.mtime_ns)
        member.pax_headers = {"mtime": f"{sign}{ns // 10**9}.{ns % 10**9:09d}"}
    if entry.kind != "f":
        member.type = {"d": tarfile.DIRTYPE, "l": tarfile.SYMTYPE, "h": tarfile.LNKTYPE}[entry.kind]
        member.linkname = entry.target if entry.kind == "l" else _name(entry.target, "tree") if entry.target else ""
        archive.addfile(member)
        return
    member.size = entry.size
    with open(scan.full(entry.path), "rb") as stream:  # noqa: PTH123  names may be any bytes
        read = _Read(stream)
        archive.addfile(member, read)  # type: ignore[arg-type]
    sent.digests[entry.path] = read.digest.hexdigest()


def _name(path: str, root: str) -> str:
    return f"{root}/{path}" if path else root


# --- looking


def _look(transport: Transport, folder: str, name: str) -> str:
    return _run(transport, _LOOK, folder, name)


def compare(entries: list[Entry], digests: dict[str, str], seen: str, root: str, *, extras: bool = False) -> str:
    """The first thing that is not as it was read, in words; "" if all is. Pure.

    Args:
        entries: the tree.
        digests: path -> SHA-256 of every file of it.
        seen: what ``find`` and ``sha256sum`` printed on the host.
        root: name of the tree there.
        extras: whether it may have more than that.
    """
    attributes, _, hashes = seen.partition("end\0")
    fields = attributes.split("\0")[:-1]
    rows = {fields[at + 6]: fields[at : at + 6] for at in range(0, len(fields) - 6, 7)}
    found = {line[66:]: line[:64] for line in hashes.split("\0") if line}
    for entry in entries:
        name = _name(entry.path, root)
        row = rows.get(name)
        if row is None:
            return f"{name!r} is missing"
        if wrong := _differs(entry, row, rows, root):
            return f"{name!r} has another {wrong}"
        if entry.kind == "f" and found.get(name) != digests[entry.path]:
            return f"{name!r} has another content"
    besides = set(rows) - {_name(entry.path, root) for entry in entries}
    return f"{min(besides)!r} is there besides" if besides and not extras else ""


def _differs(entry: Entry, row: list[str], rows: dict[str, list[str]], root: str) -> str:
    kind, mode, size, mtime, inode, target = row
    if kind != {"h": "f"}.get(entry.kind, entry.kind):
        return "type"
    if entry.kind == "l":
        return "" if target == entry.target else "target"
    if entry.kind == "h":
        first = rows.get(_name(entry.target, root))
        return "" if first is None or first[4] == inode else "inode than the name it is a further one of"
    if int(mode, 8) != entry.mode:
        return "mode"
    seconds, _, fraction = mtime.partition(".")
    if entry.mtime_ns >= 0 and int(seconds) * 10**9 + int(fraction[:9].ljust(9, "0")) != entry.mtime_ns:
        return "time"
    return "size" if entry.kind == "f" and int(size) != entry.size else ""
