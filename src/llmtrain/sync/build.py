"""Builds the new tree beside the old one: hard links for what did not change, the rest from blocks that arrive.

Part of the agent: standard library only, Python 3.6 and later. A file of the old tree is never written to: whatever
differs, if only in its mode, is a new file. What an interrupted sync left is read again and used where its content is
right, so there is no journal that could lie after a power cut.
"""

import collections
import errno
import fcntl
import hashlib
import os
import shutil
import threading
from typing import Dict, Iterable, List, Optional, Set, Tuple

from llmtrain.sync.blocks import alike, as_frame, copy_sparse, hash_present, spare_cache, split, write_all
from llmtrain.sync.manifest import (
    MIB,
    SMALL,
    Cache,
    Entry,
    Scan,
    TreeError,
    block_count,
    block_size,
    combine,
    fill_holes,
    first_of,
)
from llmtrain.sync.relay import Bytes, Json, Stream, ranges

OPEN_FILES = 48
FICLONE = 0x40049409


class Builder:
    """One new tree."""

    def __init__(self, old: str, new: str, leftovers: List[str], cache: Cache, options: Json) -> None:
        self.old_root = old
        self.new_root = new
        self.leftovers = leftovers
        self.cache = cache
        self.options = options
        self.entries = []  # type: List[Entry]
        self.first = []  # type: List[int]
        self.blocks = {}  # type: Dict[int, bytearray]
        self.have = {}  # type: Dict[str, Entry]
        self.links = []  # type: List[int]
        self.copies = []  # type: List[Tuple[int, str]]
        self.needs = {}  # type: Dict[int, List[List[int]]]
        self.asks = []  # type: List[int]
        self.stats = {}  # type: Dict[str, os.stat_result]
        self.reused_bytes = 0
        self.stream = None  # type: Optional[Stream]
        self._old = None  # type: Optional[Scan]
        self._long = {}  # type: Dict[str, bytes]
        self._by_digest = {}  # type: Dict[str, str]
        self._pieces = {}  # type: Dict[int, List[Tuple[int, str, int]]]
        self._used = set()  # type: Set[int]
        self._left = {}  # type: Dict[int, int]
        self._fds = collections.OrderedDict()  # type: collections.OrderedDict[int, int]
        self._writing = threading.Lock()

    # --- what is there

    def scan(self) -> None:
        """Read the old tree, without contents."""
        if os.path.lexists(self.old_root):
            self._old = Scan(self.old_root).run()

    def plan(self, entries: List[Entry]) -> None:
        """Decide for every wanted file: link, copy from here, ask for its blocks' digests, or fetch."""
        self.entries = entries
        self.first = first_of(entries)
        self._read_old()
        self._read_leftovers()
        for number, entry in enumerate(entries):
            if entry.kind != "f" or not entry.size:
                continue
            old = self.have.get(entry.path)
            if entry.digest and old is not None and old.kind == "f" and old.digest == entry.digest:
                self._reuse(number, old)
            elif entry.digest in self._by_digest:
                self.copies.append((number, self._by_digest[entry.digest]))
            elif self.first[number] != number:
                continue
            elif self._candidates(entry):
                self.asks.append(number)
            else:
                self._need(number, range(block_count(entry.size)))

    def _reuse(self, number: int, old: Entry) -> None:
        entry = self.entries[number]
        assert self._old is not None
        inode = self._old.stats[entry.path].st_ino
        if (old.mode, old.mtime_ns) == (entry.mode, entry.mtime_ns) and inode not in self._used:
            self._used.add(inode)
            self.links.append(number)
        else:
            self.copies.append((number, self._old.full(entry.path)))
        if entry.path in self._long:
            self.blocks[number] = bytearray(self._long[entry.path])

    def _read_old(self) -> None:
        if self._old is None:
            return
        want = {entry.path: entry for entry in self.entries if entry.kind == "f"}
        only = set()
        for entry in self._old.entries:
            other = want.get(entry.path)
            if other and entry.kind == "f" and (entry.size == other.size or alike(entry.size, other.size)):
                only.add(entry.path)
        self._long = self._old.hash(self.cache, -1, only, again=bool(self.options.get("checksum")))
        self._resolve_links()
        self.have = {entry.path: entry for entry in self._old.entries}
        for entry in self._old.entries:
            if entry.kind == "f" and entry.digest:
                self._by_digest.setdefault(entry.digest, self._old.full(entry.path))

    def _resolve_links(self) -> None:
        """A further name of a file in the old tree may be a file of its own in the new one."""
        assert self._old is not None
        files = {entry.path: entry for entry in self._old.entries if entry.kind == "f"}
        want = {entry.path for entry in self.entries if entry.kind == "f"}
        for number, entry in enumerate(self._old.entries):
            if entry.kind == "h" and entry.path in want and entry.target in files:
                self._old.entries[number] = files[entry.target]._replace(path=entry.path)

    def _read_leftovers(self) -> None:
        inodes = {info.st_ino for info in self._old.stats.values()} if self._old else set()
        for root in self.leftovers:
            scan = Scan(root).run()
            mine = {path for path, info in scan.stats.items() if info.st_ino not in inodes and info.st_size <= SMALL}
            scan.hash(Cache(), -1, mine)
            for entry in scan.entries:
                if entry.kind == "f" and entry.digest and entry.path in mine:
                    self._by_digest.setdefault(entry.digest, scan.full(entry.path))

    def _candidates(self, entry: Entry) -> List[str]:
        """Files here that may hold blocks of this one."""
        if entry.size <= SMALL:
            return []
        found = []
        old = self.have.get(entry.path)
        if old is not None and old.kind == "f" and alike(old.size, entry.size):
            found.append(os.path.join(self.old_root, entry.path) if entry.path else self.old_root)
        for root in self.leftovers:
            path = os.path.join(root, entry.path) if entry.path else root
            if os.path.isfile(path) and not os.path.islink(path) and os.path.getsize(path) == entry.size:
                found.append(path)
        return found

    def answer(self, number: int, digests: bytes) -> None:
        """Use the digests of a file's blocks: what is here already is not fetched."""
        entry = self.entries[number]
        self.blocks[number] = bytearray(digests)
        known = {}  # type: Dict[bytes, Tuple[str, int]]
        step = block_size(entry.size)
        for path in self._candidates(entry):
            blocks = self._long.get(entry.path) if path.startswith(self.old_root) else None
            for at, digest in enumerate(split(blocks) if blocks else hash_present(path, entry.size)):
                if digest:
                    known.setdefault(digest, (path, at * step))
        pieces, lacking = [], []
        for block, digest in enumerate(split(digests)):
            if digest in known:
                pieces.append((block,) + known[digest])
            else:
                lacking.append(block)
        old = self.have.get(entry.path)
        if not lacking and old is not None and old.digest == combine(entry.size, digests):
            self.entries[number] = entry._replace(digest=old.digest)
            self._reuse(number, old)
            return
        self._pieces[number] = pieces
        self._need(number, lacking)

    def _need(self, number: int, blocks: Iterable[int]) -> None:
        entry = self.entries[number]
        holes = {block for first, last in entry.holes for block in range(first, last + 1)}
        self.needs[number] = ranges(block for block in blocks if block not in holes)

    def need_bytes(self) -> Tuple[int, int]:
        """Bytes and inodes the new tree takes from the disk."""
        linked = set(self.links)
        new = [entry for number, entry in enumerate(self.entries) if number not in linked and entry.kind in "fdl"]
        return sum(entry.size + 4096 for entry in new if not entry.holes), len(new) + 16

    # --- making it

    def make(self) -> None:
        """Everything that needs no bytes from elsewhere."""
        for entry in self.entries:
            if entry.kind == "d":
                os.mkdir(self._new(entry), 0o700)
        for number in self.links:
            entry = self.entries[number]
            os.link(self.old_root + "/" + entry.path if entry.path else self.old_root, self._new(entry))
            self.reused_bytes += entry.size
        for number, path in self.copies:
            self._copy(path, self.entries[number])
        for number, entry in enumerate(self.entries):
            if entry.kind == "f" and not entry.size:
                os.close(os.open(self._new(entry), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
                self._dress(self._new(entry), entry)
        for number in self.needs:
            self._prepare(number)

    def _prepare(self, number: int) -> None:
        entry = self.entries[number]
        count = block_count(entry.size)
        table = self.blocks.setdefault(number, bytearray(32 * count))
        self._left[number] = sum(last - first + 1 for first, last in self.needs[number])
        if count == 1:
            return
        moved = self._move_leftover(number)
        fd = self._fd(number)
        os.ftruncate(fd, entry.size)
        if not entry.holes:
            self._allocate(fd, entry.size)
        step = block_size(entry.size)
        fill_holes(entry, table)
        for block, path, offset in self._pieces.get(number, ()):
            if not any(first <= block <= last for first, last in entry.holes) and (path, offset) != (
                moved,
                block * step,
            ):
                with open(path, "rb") as stream:
                    stream.seek(offset)
                    data = stream.read(min(step, entry.size - block * step))
                if hashlib.sha256(data).digest() != bytes(table[32 * block : 32 * block + 32]):
                    raise TreeError("the old tree changes while it is read", path)
                self.reused_bytes += os.pwrite(fd, data, block * step)
        if not self._left[number]:
            self._finish(number)

    def _move_leftover(self, number: int) -> str:
        """Go on in the file an interrupted sync left, rather than copy it."""
        for _, path, _ in self._pieces.get(number, ()):
            inside = any(path.startswith(root) for root in self.leftovers)
            if inside and os.path.isfile(path) and os.stat(path).st_nlink == 1:
                os.rename(path, self._new(self.entries[number]))
                for other, pieces in self._pieces.items():
                    self._pieces[other] = [
                        (block, self._new(self.entries[number]) if where == path else where, offset)
                        for block, where, offset in pieces
                    ]
                return self._new(self.entries[number])
        return ""

    @staticmethod
    def _allocate(fd: int, size: int) -> None:
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise TreeError("disk full")

    def _copy(self, path: str, entry: Entry) -> None:
        target = self._new(entry)
        with open(path, "rb") as source, open(target, "xb") as copy:
            try:
                fcntl.ioctl(copy.fileno(), FICLONE, source.fileno())
            except OSError:
                if entry.holes:
                    copy_sparse(source.fileno(), copy.fileno(), entry.size)
                else:
                    shutil.copyfileobj(source, copy, MIB)
        if os.path.getsize(target) != entry.size:
            raise TreeError("the old tree changes while it is read", path)
        self._dress(target, entry)
        self.reused_bytes += entry.size

    def take(self, chunk: int, frame: bytearray) -> bool:
        """Check a chunk that arrived, write it, and let others have it. True if it was not here."""
        assert self.stream is not None
        parts = list(self.stream.blocks(chunk))
        at = 32 * len(parts)
        view = memoryview(frame)
        if len(frame) != at + sum(part[3] for part in parts):
            raise TreeError("bad frame")
        ready = []
        for number, (file, block, offset, length) in enumerate(parts):
            digest = bytes(view[32 * number : 32 * number + 32])
            data = view[at : at + length]
            at += length
            self._check(file, block, data, digest)
            ready.append((file, block, offset, data, digest))
        with self._writing:  # several connections fetch and check side by side; what they write is counted by file
            for file, block, offset, data, digest in ready:
                if self._left.get(file):
                    try:
                        self._write(file, block, offset, data, digest)
                    except OSError as error:
                        raise TreeError("disk: " + (error.strerror or "write failed"), self.entries[file].path)
        return self.stream.mark(chunk, [frame])

    def _check(self, file: int, block: int, data: memoryview, digest: bytes) -> None:
        entry = self.entries[file]
        table = self.blocks.get(file)
        known = bytes(table[32 * block : 32 * block + 32]) if table is not None else b""
        wrong = hashlib.sha256(data).digest() != digest or (any(known) and known != digest)
        if wrong or (block_count(entry.size) == 1 and entry.digest and entry.digest != digest.hex()):
            raise TreeError("bad chunk (block %d)" % block, entry.path)

    def _write(self, file: int, block: int, offset: int, data: memoryview, digest: bytes) -> None:
        entry = self.entries[file]
        table = self.blocks[file]
        if not any(first <= block <= last for first, last in self.needs[file]):
            return
        table[32 * block : 32 * block + 32] = digest
        if block_count(entry.size) == 1:
            fd = os.open(self._new(entry), os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
            try:
                write_all(fd, data, 0)
                os.fchmod(fd, entry.mode)
                os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
            finally:
                os.close(fd)
            self._left[file] = 0
            return
        fd = self._fd(file)
        write_all(fd, data, offset)
        spare_cache(fd, entry.size, offset, 256 * MIB)
        self._left[file] -= 1
        if not self._left[file]:
            self._finish(file)

    def _finish(self, number: int) -> None:
        fd = self._fds.pop(number, None)
        if fd is not None:
            os.close(fd)
        self._dress(self._new(self.entries[number]), self.entries[number])

    def _fd(self, number: int) -> int:
        fd = self._fds.pop(number, None)
        if fd is None:
            fd = os.open(self._new(self.entries[number]), os.O_CREAT | os.O_RDWR, 0o600)
        self._fds[number] = fd
        while len(self._fds) > OPEN_FILES:
            os.close(self._fds.popitem(last=False)[1])
        return fd

    def frame(self, chunk: int) -> List[Bytes]:
        """A chunk that is here, for another host."""
        assert self.stream is not None
        digests, parts = [], []
        for file, block, offset, length in self.stream.blocks(chunk):
            entry = self.entries[file]
            with open(self._new(entry), "rb", buffering=0) as stream:
                parts.append(os.pread(stream.fileno(), length, offset))
            table = self.blocks.get(file)
            known = table[32 * block : 32 * block + 32] if table else bytes.fromhex(entry.digest)
            digests.append(bytes(known))
        return as_frame(digests, parts)

    def _new(self, entry: Entry) -> str:
        return self.new_root + "/" + entry.path if entry.path else self.new_root

    @staticmethod
    def _dress(path: str, entry: Entry) -> None:
        os.chmod(path, entry.mode)
        os.utime(path, ns=(entry.mtime_ns, entry.mtime_ns))
