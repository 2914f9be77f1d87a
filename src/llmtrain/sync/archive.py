"""An archive of an environment: unpacked once, on the head, at the path it will have everywhere."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from llmtrain.cluster.fleet import Command
from llmtrain.cluster.local import LocalTransport
from llmtrain.errors import DiskError, InputFileError, SyncError
from llmtrain.sync.place import EXCHANGE, remove, rename, users_of, write_json

if TYPE_CHECKING:
    from pathlib import Path

ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.zst")
UNPACK_S = 3600.0
RECORD = "archive.json"


def unpack(archive: Path, prefix: Path, *, force: bool = False) -> Path:
    """Unpack an archive at its final prefix, and let conda-unpack run there once.

    What an earlier version of the archive was unpacked to is replaced; anything else at the prefix is refused.

    Args:
        archive: the file.
        prefix: where it goes.
        force: replace it although processes use it.

    Raises:
        InputFileError: not an archive, or something else stands at the prefix.
        DiskError: it cannot be unpacked.
        SyncError: the environment there is in use, or conda-unpack failed.
    """
    if not archive.name.endswith(ARCHIVES):
        raise InputFileError("neither an environment nor an archive of one", where=str(archive), fix="*.tar[.gz|.zst]")
    info = archive.stat()
    stamp = {"archive": str(archive), "size": info.st_size, "mtime_ns": info.st_mtime_ns}
    state = prefix.parent / f".{prefix.name}.llmtrain"
    if prefix.exists():
        known = _read_record(state / RECORD)
        if known == stamp:
            return prefix
        _refuse(prefix, known=known is not None, force=force)
    root = _extract(archive, state / "unpack")
    if not prefix.exists():
        root.rename(prefix)
    elif not rename(str(root), str(prefix), EXCHANGE):
        raise DiskError("this file system cannot swap two folders", where=str(prefix), fix=f"remove {prefix}")
    remove(str(state / "unpack"))
    _run_conda_unpack(prefix)
    write_json(str(state / RECORD), stamp)
    return prefix


def _read_record(path: Path) -> dict[str, object] | None:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def _refuse(prefix: Path, *, known: bool, force: bool) -> None:
    if not known:
        raise InputFileError(
            "something else stands where the archive would be unpacked",
            where=str(prefix),
            fix=f"remove it, or --dest another path than {prefix}",
        )
    users = users_of(str(prefix))
    if users and not force:
        raise SyncError(
            f"the environment that the archive replaces is in use by {', '.join(users[:4])}",
            where=f"head:{prefix}",
            fix="stop it, or --force",
        )


def _extract(archive: Path, part: Path) -> Path:
    """Unpack beside the prefix; returns the folder that holds the environment."""
    try:
        part.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        remove(str(part))
        part.mkdir()
    except OSError as error:
        raise DiskError(f"cannot be written: {error.strerror}", where=str(part), fix="name another --dest") from None
    argv = ("tar", "-xpf", str(archive), "-C", str(part))
    result = LocalTransport("head").run(Command(argv=argv, timeout_s=UNPACK_S))
    if result.code != 0:
        raise DiskError(f"the archive cannot be unpacked: {result.tail()}", where=str(archive), fix="df -h; tar --help")
    inner = [entry for entry in part.iterdir() if entry.is_dir()]
    return inner[0] if not (part / "bin").exists() and len(inner) == 1 else part


def _run_conda_unpack(prefix: Path) -> None:
    script = prefix / "bin" / "conda-unpack"
    if not script.exists():
        return
    argv = (str(prefix / "bin" / "python"), str(script))
    done = LocalTransport("head").run(Command(argv=argv, timeout_s=UNPACK_S))
    if done.code != 0:
        raise SyncError(f"conda-unpack failed: {done.tail()}", where=str(prefix), fix=f"run {script}")
