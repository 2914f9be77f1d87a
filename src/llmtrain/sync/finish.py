"""The last steps of a new tree: duplicates, links, what the old tree had besides, attributes of folders, proof.

Part of the agent: standard library only, Python 3.6 and later.
"""

import ctypes
import os
import shutil
import stat
from typing import Dict, List, Set

from llmtrain.sync.build import Builder
from llmtrain.sync.manifest import MIB, Entry, TreeError, block_count, combine, excluded, root_digest


def finish(builder: Builder, keep_extras: bool, exclude: List[str]) -> str:
    """Complete the new tree, compare it with what was wanted, put it on the disk for good; returns its digest."""
    _duplicates(builder)
    extras = _extras(builder, keep_extras, exclude)
    for entry in builder.entries:
        path = _new(builder, entry)
        if entry.kind == "l":
            os.symlink(entry.target, path)
        elif entry.kind == "h":
            os.link(os.path.join(builder.new_root, entry.target), path)
    _folders(builder, extras)
    _digests(builder)
    _prove(builder)
    builder.stats.update((entry.path, os.lstat(_new(builder, entry))) for entry in extras)
    _flush(builder.new_root)
    return root_digest(builder.entries)


def _new(builder: Builder, entry: Entry) -> str:
    return builder.new_root + "/" + entry.path if entry.path else builder.new_root


def _duplicates(builder: Builder) -> None:
    for number, entry in enumerate(builder.entries):
        first = builder.first[number]
        if entry.kind != "f" or first == number or os.path.lexists(_new(builder, entry)):
            continue
        with open(_new(builder, builder.entries[first]), "rb") as source, open(_new(builder, entry), "xb") as copy:
            shutil.copyfileobj(source, copy, MIB)
        os.chmod(_new(builder, entry), entry.mode)
        os.utime(_new(builder, entry), ns=(entry.mtime_ns, entry.mtime_ns))
        if first in builder.blocks:
            builder.blocks[number] = builder.blocks[first]


def _extras(builder: Builder, keep: bool, exclude: List[str]) -> List[Entry]:
    """Link what only the old tree has; with --delete only what --exclude names."""
    want = {entry.path: entry for entry in builder.entries}
    folders = {entry.path for entry in builder.entries if entry.kind == "d"}
    kept = []
    for entry in builder.have.values():
        if entry.path in want or not (keep or _spared(entry.path, exclude)):
            continue
        parent = entry.path.rpartition("/")[0]
        if not entry.path or parent not in folders:
            if not keep:
                continue
            raise TreeError("the old tree has something below what is no folder any more; use --delete", entry.path)
        source, target = os.path.join(builder.old_root, entry.path), os.path.join(builder.new_root, entry.path)
        if entry.kind == "d":
            os.mkdir(target, 0o700)
            folders.add(entry.path)
        else:
            os.link(source, target, follow_symlinks=False)
        kept.append(entry)
    return kept


def _spared(path: str, exclude: List[str]) -> bool:
    parts = path.split("/")
    return any(excluded("/".join(parts[: count + 1]), exclude) for count in range(len(parts)))


def _folders(builder: Builder, extras: List[Entry]) -> None:
    folders = [entry for entry in list(builder.entries) + extras if entry.kind == "d"]
    for entry in sorted(folders, key=lambda one: one.path.count("/") + bool(one.path), reverse=True):
        path = _new(builder, entry)
        os.chmod(path, entry.mode)
        os.utime(path, ns=(entry.mtime_ns, entry.mtime_ns))


def _digests(builder: Builder) -> None:
    for number, entry in enumerate(builder.entries):
        if entry.kind != "f":
            continue
        table = builder.blocks.get(number)
        digest = combine(entry.size, bytes(table or b"")) if table or not entry.size else entry.digest
        if entry.digest and digest != entry.digest:
            raise TreeError("a file is not what was announced", entry.path)
        builder.entries[number] = entry._replace(digest=digest)


def _prove(builder: Builder) -> None:
    """Every entry is there with every attribute."""
    seen = set()  # type: Set[int]
    inodes = {}  # type: Dict[str, int]
    for entry in builder.entries:
        info = builder.stats[entry.path] = os.lstat(_new(builder, entry))
        bits = stat.S_IMODE(info.st_mode)
        if entry.kind == "f":
            good = stat.S_ISREG(info.st_mode) and info.st_ino not in seen
            good = good and (info.st_size, bits, info.st_mtime_ns) == (entry.size, entry.mode, entry.mtime_ns)
            seen.add(info.st_ino)
            inodes[entry.path] = info.st_ino
        elif entry.kind == "d":
            good = stat.S_ISDIR(info.st_mode) and (bits, info.st_mtime_ns) == (entry.mode, entry.mtime_ns)
        elif entry.kind == "l":
            good = stat.S_ISLNK(info.st_mode) and os.readlink(_new(builder, entry)) == entry.target
        else:
            good = info.st_ino == inodes.get(entry.target)
        if not good:
            raise TreeError("the copy differs from the original", entry.path)


def remember(builder: Builder, now_ns: int) -> None:
    """Put what is known by now into the cache, so that the next sync reads nothing again."""
    for number, entry in enumerate(builder.entries):
        if entry.kind == "f" and entry.digest:
            table = builder.blocks.get(number)
            if table is None:
                table = bytearray.fromhex(entry.digest) if block_count(entry.size) == 1 else None
            if table is not None:
                builder.cache.put(builder.stats[entry.path], bytes(table), now_ns)


def _flush(path: str) -> None:
    """Have the file system write everything out before the tree gets its name."""
    fd = os.open(path, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd) != 0:
            raise TreeError("disk: " + os.strerror(ctypes.get_errno()), path)
    finally:
        os.close(fd)
