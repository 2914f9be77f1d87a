"""What a tree contains, as values; used here and, as part of the agent, on every host.

Standard library only, Python 3.6 and later. Paths are text with ``surrogateescape``, so any bytes survive; they are
relative to the root, ``""`` is the root itself. A file's digest is SHA-256 of its bytes if it is one block long, else
SHA-256 over its size and its blocks' digests: one hash serves identity, transfer, verification and resumption.
"""

import base64
import errno
import hashlib
import json
import os
import stat
import time
import zlib
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Set, Tuple

KIB = 1 << 10
MIB = 1 << 20
SMALL = 256 * KIB
HASHED_AT_ONCE = 4 * MIB
RACY_NS = 2000000000

Entry = NamedTuple(
    "Entry",
    [
        ("path", str),  # relative to the root
        ("kind", str),  # f file, d directory, l symbolic link, h further name of a file, x anything else
        ("mode", int),  # permission bits
        ("size", int),  # bytes of a file
        ("mtime_ns", int),  # 0 for links and further names
        ("digest", str),  # hex; "" where it is not known
        ("target", str),  # what a link says; for "h" the path of the file's first name
        ("holes", Tuple[Tuple[int, int], ...]),  # (first, last) blocks that are holes
    ],
)
Diff = NamedTuple(
    "Diff",
    [
        ("added", List[Entry]),
        ("changed", List[Entry]),
        ("touched", List[Entry]),
        ("removed", List[Entry]),
        ("same", List[Entry]),
    ],
)


class TreeError(Exception):
    """Something at this path cannot be handled."""

    def __init__(self, text: str, path: str = "") -> None:
        super().__init__(text + (": " + shown(path) if path else ""))


def shown(path: str) -> str:
    """A path as text that any terminal and JSON reader takes."""
    return os.fsencode(path).decode("utf-8", "backslashreplace").replace("\n", "\\n")


def block_size(size: int) -> int:
    """Bytes of a block of a file of this size: a function of the size alone, so digests can be compared."""
    if size < 1024 * MIB:
        return SMALL
    return MIB if size < 16384 * MIB else 4 * MIB


def block_count(size: int) -> int:
    """How many blocks a file of this size has."""
    return -(-size // block_size(size))


def combine(size: int, blocks: bytes) -> str:
    """A file's digest from the digests of its blocks, 32 bytes each."""
    if len(blocks) <= 32:
        return blocks.hex() if blocks else hashlib.sha256(b"").hexdigest()
    return hashlib.sha256(b"llmtrain-blocks %d " % size + blocks).hexdigest()


def hash_file(path: str, size: int) -> bytes:
    """Digests of all blocks of a file; TreeError if it is not as long as it was."""
    step = block_size(size)
    parts = []
    left = size
    with open(path, "rb", buffering=0) as stream:
        while left:
            data = stream.read(min(step, left))
            while data and len(data) < min(step, left):
                more = stream.read(min(step, left) - len(data))
                if not more:
                    break
                data += more
            if len(data) != min(step, left):
                raise TreeError("the file changed while it was read", path)
            parts.append(hashlib.sha256(data).digest())
            left -= len(data)
    return b"".join(parts)


def find_holes(path: str, size: int) -> Tuple[Tuple[int, int], ...]:
    """Blocks that lie wholly in holes of a sparse file, as (first, last) ranges."""
    step = block_size(size)
    holes = []
    fd = os.open(path, os.O_RDONLY)
    try:
        at = 0
        while at < size:
            try:
                data = os.lseek(fd, at, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    return ()
                data = size
            first, last = -(-at // step), (block_count(size) if data >= size else data // step) - 1
            if first <= last:
                holes.append((first, last))
            if data >= size:
                break
            at = os.lseek(fd, data, os.SEEK_HOLE)
    finally:
        os.close(fd)
    return tuple(holes)


def fill_holes(entry: Entry, table: bytearray) -> bytearray:
    """Put the digests of zeros where a file has holes."""
    step = block_size(entry.size)
    for first, last in entry.holes:
        for block in range(first, last + 1):
            zeros = bytes(min(step, entry.size - block * step))
            table[32 * block : 32 * block + 32] = hashlib.sha256(zeros).digest()
    return table


class Cache:
    """Digests by (device, inode, size, mtime): what has been read once need not be read again."""

    def __init__(self, path: str = "") -> None:
        self.path = path
        self.known = {}  # type: Dict[str, str]
        self.used = {}  # type: Dict[str, str]
        self.fresh = False
        try:
            with open(path, "rb") as stream:
                self.known = json.loads(zlib.decompress(stream.read()).decode())
        except (OSError, ValueError, zlib.error):
            pass

    @staticmethod
    def key(info: os.stat_result) -> str:
        """What identifies a content without reading it."""
        return "%d:%d:%d:%d" % (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns)

    def get(self, info: os.stat_result) -> Optional[bytes]:
        """The blocks' digests of this file."""
        key = self.key(info)
        found = self.known.get(key)
        if found is not None:
            self.used[key] = found
            return base64.b64decode(found)
        return None

    def put(self, info: os.stat_result, blocks: bytes, now_ns: int) -> None:
        """Remember; not what was written so recently that a change could have left the time as it is."""
        if info.st_mtime_ns < now_ns - RACY_NS:
            self.fresh = True
            self.known[self.key(info)] = self.used[self.key(info)] = base64.b64encode(blocks).decode()

    def write(self) -> None:
        """Replace the file with what was used since it was read."""
        if not self.path or not (self.fresh or len(self.used) < len(self.known)):
            return
        os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
        temp = "%s.%d" % (self.path, os.getpid())
        with open(temp, "wb") as stream:
            stream.write(zlib.compress(json.dumps(self.used).encode(), 1))
        os.replace(temp, self.path)


class Scan:
    """One reading of a tree."""

    def __init__(self, root: str, exclude: Iterable[str] = (), follow: bool = False) -> None:
        self.root = root
        self.exclude = tuple(exclude)
        self.follow = follow
        self.entries = []  # type: List[Entry]
        self.stats = {}  # type: Dict[str, os.stat_result]
        self.origin = {}  # type: Dict[str, str]
        self.followed = []  # type: List[str]
        self.others = []  # type: List[str]
        self._inodes = {}  # type: Dict[Tuple[int, int], str]
        self._real = os.path.realpath(root)

    def full(self, path: str) -> str:
        """Where the content of an entry is read."""
        return self.origin.get(path) or (self.root + "/" + path if path else self.root)

    def run(self) -> "Scan":
        """Read names and attributes; contents only by `hash`."""
        self._add("", self.root, os.stat(self.root))  # a root that is a link stands for what it leads to
        self.entries.sort(key=lambda entry: os.fsencode(entry.path))
        self._link()
        return self

    def _walk(self, path: str, full: str) -> None:
        with os.scandir(full) as found:
            for item in found:
                sub = path + "/" + item.name if path else item.name
                if self.exclude and excluded(sub, self.exclude):
                    continue
                try:
                    info = item.stat(follow_symlinks=False)
                except FileNotFoundError:
                    raise TreeError("the tree changes while it is read", sub)
                self._add(sub, item.path, info)

    def _add(self, path: str, full: str, info: os.stat_result) -> None:
        mode, bits = info.st_mode, stat.S_IMODE(info.st_mode)
        if stat.S_ISLNK(mode):
            if self.follow and self._leaves(full):
                real = os.path.realpath(full)
                if not os.path.exists(real):
                    raise TreeError("a link leads nowhere", full)
                self.followed.append(path)
                self._add(path, real, os.stat(real))
                return
            self.entries.append(Entry(path, "l", 0, 0, 0, "", os.readlink(full), ()))
        elif stat.S_ISDIR(mode):
            if len(path) > 4096:
                raise TreeError("links lead in a circle", full)
            self.entries.append(Entry(path, "d", bits, 0, info.st_mtime_ns, "", "", ()))
            self._walk(path, full)
        elif stat.S_ISREG(mode):
            self.entries.append(Entry(path, "f", bits, info.st_size, info.st_mtime_ns, "", "", ()))
            if self.follow and full != (os.path.join(self.root, path) if path else self.root):
                self.origin[path] = full
        else:
            self.others.append(path)
            self.entries.append(Entry(path, "x", bits, 0, info.st_mtime_ns, "", "", ()))
        self.stats[path] = info

    def _leaves(self, full: str) -> bool:
        real = os.path.realpath(full)
        return real != self._real and not real.startswith(self._real.rstrip("/") + "/")

    def _link(self) -> None:
        """Further names of a file become "h" entries; sparse files get their holes."""
        done = []
        for entry in self.entries:
            info = self.stats.get(entry.path)
            if entry.kind == "f" and info is not None and entry.path not in self.origin:
                key = (info.st_dev, info.st_ino)
                if info.st_nlink > 1 and key in self._inodes:
                    entry = Entry(entry.path, "h", 0, 0, 0, "", self._inodes[key], ())
                else:
                    self._inodes[key] = entry.path
                    if info.st_blocks * 512 < entry.size - SMALL:
                        entry = entry._replace(holes=find_holes(self.full(entry.path), entry.size))
            done.append(entry)
        self.entries = done

    def hash(self, cache: Cache, limit: int, only: Optional[Set[str]] = None, again: bool = False) -> Dict[str, bytes]:
        """Fill in digests of files up to ``limit`` bytes, or of the paths in ``only``; known ones always.

        Sizes that occur twice are hashed as well, so that identical files travel once. Returns the blocks' digests
        of files longer than one block.
        """
        now = time.time_ns() if hasattr(time, "time_ns") else int(time.time() * 1e9)
        seen = set()  # type: Set[int]
        twice = set()  # type: Set[int]
        for entry in self.entries:
            if entry.kind == "f" and entry.size > limit:
                (twice if entry.size in seen else seen).add(entry.size)
        long = {}  # type: Dict[str, bytes]
        for number, entry in enumerate(self.entries):
            if entry.kind != "f":
                continue
            info = self.stats[entry.path]
            blocks = b"" if not entry.size else None if again else cache.get(info)
            if blocks is None:
                if entry.path not in only if only is not None else entry.size > limit and entry.size not in twice:
                    continue
                blocks = hash_file(self.full(entry.path), entry.size)
                cache.put(info, blocks, now)
            self.entries[number] = entry._replace(digest=combine(entry.size, blocks))
            if len(blocks) > 32:
                long[entry.path] = blocks
        return long

    def changed(self) -> Optional[str]:
        """The first path that is no longer what it was when it was read, or None."""
        fresh = Scan(self.root, self.exclude, self.follow)
        try:
            fresh.run()
        except (OSError, TreeError) as error:
            return str(error)
        for path, info in self.stats.items():
            now = fresh.stats.get(path)
            if now is None or (now.st_ino, now.st_size, now.st_mtime_ns, now.st_mode) != (
                info.st_ino,
                info.st_size,
                info.st_mtime_ns,
                info.st_mode,
            ):
                return path or self.root
        extra = set(fresh.stats) - set(self.stats)
        return min(extra) if extra else None


def excluded(path: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern names this path: a name anywhere, or a path from the root; with ``*`` and ``?``."""
    from fnmatch import fnmatchcase

    name = path.rpartition("/")[2]
    return any(fnmatchcase(path if "/" in one.strip("/") else name, one.strip("/")) for one in patterns)


def canonical(entry: Entry) -> Tuple[Any, ...]:
    """What two equal entries have in common; holes are a matter of the disk."""
    return entry[:7]


def root_digest(entries: Iterable[Entry]) -> str:
    """One digest for a whole tree; "" while a file's digest is unknown."""
    digest = hashlib.sha256()
    for entry in entries:
        if entry.kind == "f" and not entry.digest:
            return ""
        digest.update(repr(canonical(entry)).encode("utf-8", "surrogateescape") + b"\n")
    return digest.hexdigest()


def signature(stats: Dict[str, os.stat_result]) -> str:
    """One digest of what identifies all contents of a tree without reading them: who it equals is unchanged."""
    digest = hashlib.sha256()
    for path in sorted(stats):
        info = stats[path]
        line = "%s\0%o %d %d %d\n" % (path, info.st_mode, info.st_ino, info.st_size, info.st_mtime_ns)
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def diff(want: Iterable[Entry], have: Iterable[Entry]) -> Diff:
    """What must happen to ``have`` so that it becomes ``want``. Pure; an unknown digest counts as different."""
    old = {entry.path: entry for entry in have}
    added, changed, touched, same = [], [], [], []  # type: List[Entry], List[Entry], List[Entry], List[Entry]
    for entry in want:
        other = old.pop(entry.path, None)
        if other is None:
            added.append(entry)
        elif canonical(entry) == canonical(other) and (entry.kind != "f" or entry.digest):
            same.append(entry)
        elif (entry.kind == other.kind == "f" and entry.digest and entry.digest == other.digest) or (
            entry.kind == other.kind == "d"
        ):
            touched.append(entry)
        else:
            changed.append(entry)
    return Diff(added, changed, touched, list(old.values()), same)


def dump(entries: Iterable[Entry]) -> List[List[Any]]:
    """Entries as JSON values."""
    return [list(entry) for entry in entries]


def load(rows: Iterable[List[Any]]) -> List[Entry]:
    """Entries from JSON values, checked: nothing may point out of the tree."""
    entries = []
    folders = {""}
    for row in rows:
        entry = Entry(*(row[:7] + [tuple((first, last) for first, last in row[7])]))
        if entry.path and entry.path.rpartition("/")[0] not in folders:
            raise TreeError("a path below something that is no folder", entry.path)
        if entry.kind == "d":
            folders.add(entry.path)
        for path in (entry.path, entry.target if entry.kind == "h" else ""):
            if path.startswith("/") or "\0" in path or (path and {"", ".", ".."} & set(path.split("/"))):
                raise TreeError("a path that leaves the tree", path)
        entries.append(entry)
    return entries


def first_of(entries: List[Entry]) -> List[int]:
    """For every entry the number of the first file with the same content: it travels once."""
    seen = {}  # type: Dict[str, int]
    return [
        seen.setdefault(entry.digest, number) if entry.kind == "f" and entry.digest else number
        for number, entry in enumerate(entries)
    ]
