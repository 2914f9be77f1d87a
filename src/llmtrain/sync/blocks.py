"""Blocks of files: read for the wire, found in half-written files, written in place.

Part of the agent: standard library only, Python 3.6 and later.
"""

import hashlib
import os
from typing import Any, Callable, Dict, List, Optional

from llmtrain.sync.manifest import MIB, SMALL, Entry, TreeError, block_count, block_size
from llmtrain.sync.relay import Bytes, Stream

FOLLOW_BYTES = 1 << 30
"""Files above this are dropped from the page cache behind the copy: a running job needs the memory more."""
STEP_BYTES = 64 * MIB


def as_frame(digests: List[bytes], parts: List[bytes]) -> List[Bytes]:
    """A chunk as it travels; a long block is not copied once more."""
    return [b"".join(digests), parts[0]] if len(parts) == 1 else [b"".join(digests + parts)]


class SourceReader:
    """Chunks read from the tree that is copied; every block is hashed as it is read."""

    def __init__(self, stream: Stream, full: Callable[[str], str], stats: Dict[str, Any]) -> None:
        self.stream = stream
        self.full = full
        self.stats = stats
        self.digests = {}  # type: Dict[int, bytearray]

    def frame(self, chunk: int) -> List[Bytes]:
        """Digests and bytes of a chunk; TreeError if a file is not what it was."""
        digests, parts = [], []
        for file, block, offset, length in self.stream.blocks(chunk):
            entry = self.stream.entries[file]
            data = self._read(entry, offset, length)
            digest = hashlib.sha256(data).digest()
            count = block_count(entry.size)
            if count == 1 and entry.digest and digest.hex() != entry.digest:
                raise TreeError("the source changed while it was copied", entry.path)
            table = self.digests.setdefault(file, bytearray(32 * count))
            known = bytes(table[32 * block : 32 * block + 32])
            if any(known) and known != digest:
                raise TreeError("the source changed while it was copied", entry.path)
            table[32 * block : 32 * block + 32] = digest
            digests.append(digest)
            parts.append(data)
        return as_frame(digests, parts)

    def _read(self, entry: Entry, offset: int, length: int) -> bytes:
        try:
            fd = os.open(self.full(entry.path), os.O_RDONLY)
        except OSError:
            raise TreeError("the source changed while it was copied", entry.path)
        try:
            info, then = os.fstat(fd), self.stats[entry.path]
            data = os.pread(fd, length, offset)
            if (info.st_size, info.st_mtime_ns, info.st_ino) != (then.st_size, then.st_mtime_ns, then.st_ino):
                raise TreeError("the source changed while it was copied", entry.path)
            spare_cache(fd, entry.size, offset, STEP_BYTES)
        finally:
            os.close(fd)
        if len(data) != length:
            raise TreeError("the source changed while it was copied", entry.path)
        return data


def spare_cache(fd: int, size: int, offset: int, behind: int) -> None:
    """Drop one step of a big file from the page cache, so far behind; one call a step, since a call walks its range."""
    if size > FOLLOW_BYTES and offset >= behind + STEP_BYTES and offset % STEP_BYTES == 0:
        os.posix_fadvise(fd, offset - behind - STEP_BYTES, STEP_BYTES, os.POSIX_FADV_DONTNEED)


def alike(one: int, other: int) -> bool:
    """Files whose blocks can be compared."""
    return one > SMALL and other > SMALL and block_size(one) == block_size(other)


def split(blocks: bytes) -> List[bytes]:
    """Digests of blocks, one by one."""
    return [bytes(blocks[at : at + 32]) for at in range(0, len(blocks), 32)]


def hash_present(path: str, size: int) -> List[Optional[bytes]]:
    """Digests of the blocks of a partly written file; None for what was never written."""
    step = block_size(size)
    found = []  # type: List[Optional[bytes]]
    with open(path, "rb", buffering=0) as stream:
        fd = stream.fileno()
        for offset in range(0, size, step):
            try:
                empty = os.lseek(fd, offset, os.SEEK_DATA) >= min(offset + step, size)
            except OSError:
                empty = True
            data = b"" if empty else os.pread(fd, min(step, size - offset), offset)
            found.append(hashlib.sha256(data).digest() if data else None)
    return found


def copy_sparse(source: int, target: int, size: int) -> None:
    """Copy what was written of a sparse file."""
    at = 0
    os.ftruncate(target, size)
    while at < size:
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
        except OSError:
            return
        end = os.lseek(source, at, os.SEEK_HOLE)
        while at < end:
            at += os.pwrite(target, os.pread(source, min(MIB, end - at), at), at)


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all of it there."""
    while data:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count
