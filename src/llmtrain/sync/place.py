"""A destination on a host: may it be replaced, who works on it, the swap, old generations.

Part of the agent: standard library only, Python 3.6 and later. Beside the destination ``NAME`` stands the folder
``.NAME.llmtrain``: lock, tokens, cache of digests, the tree that is being built, old generations, the record of what
was made. The destination itself changes in one rename.
"""

import ctypes
import fcntl
import json
import os
import shutil
import time
import zlib
from typing import List, Set

from llmtrain.sync.manifest import Entry, TreeError, dump, load
from llmtrain.sync.relay import Json

SYSTEM = "/ /bin /boot /dev /etc /home /lib /lib64 /mnt /media /opt /proc /root /run /sbin /srv /sys /tmp"
SYSTEM += " /dev/shm /usr /usr/bin /usr/lib /usr/local /usr/local/bin /usr/local/lib /var /var/lib /var/tmp"
FORBIDDEN = set(SYSTEM.split())
AT_FDCWD, NOREPLACE, EXCHANGE = -100, 1, 2


BUSY = "another sync to this destination is running"


class Place:
    """One destination."""

    def __init__(self, dest: str, changes: bool = True) -> None:
        if not os.path.isabs(dest):
            raise TreeError("the destination is not an absolute path", dest)
        self.asked = os.path.normpath(dest)
        self.dest = os.path.join(os.path.realpath(os.path.dirname(self.asked)), os.path.basename(self.asked))
        if os.path.islink(self.dest):
            self.dest = os.path.realpath(self.dest)
        if changes:
            self.refuse()
        parent, name = os.path.split(self.dest)
        self.state = os.path.join(parent, ".%s.llmtrain" % name[:200])
        self.new = os.path.join(self.state, "new")
        self._lock = -1

    def refuse(self) -> None:
        """Stop before anything that must not be replaced as a whole."""
        homes = {os.path.expanduser("~")}
        try:
            with open("/etc/passwd", errors="replace") as stream:
                homes |= {line.split(":")[5].rstrip("/") for line in stream if line.count(":") >= 6}
        except OSError:
            pass
        judge_place(self.dest, homes, mount_points())

    def open(self) -> None:
        """Make the working folder."""
        try:
            os.makedirs(os.path.dirname(self.dest), exist_ok=True)
            os.makedirs(self.state, mode=0o700, exist_ok=True)
        except OSError as error:
            raise TreeError("cannot be written (%s)" % error.strerror, os.path.dirname(self.dest))

    def put_token(self, token: str) -> None:
        """Leave a mark that other hosts see if this is a file system they share."""
        folder = os.path.join(self.state, "tokens")
        os.makedirs(folder, exist_ok=True)
        for name in os.listdir(folder):
            if time.time() - os.stat(os.path.join(folder, name)).st_mtime > 86400:
                os.unlink(os.path.join(folder, name))
        with open(os.path.join(folder, token), "w"):
            pass

    def tokens(self) -> List[str]:
        """Marks seen here."""
        try:
            return sorted(os.listdir(os.path.join(self.state, "tokens")))
        except OSError:
            return []

    def drop_token(self, token: str) -> None:
        """Take the mark away."""
        try:
            os.unlink(os.path.join(self.state, "tokens", token))
        except OSError:
            pass

    def lock(self) -> None:
        """Be the only sync to this destination; the kernel ends the lock with this process."""
        self._lock = os.open(os.path.join(self.state, "lock"), os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise TreeError(BUSY, self.dest)

    # --- what was made before

    def record(self) -> Json:
        """What the last sync left here; {} if the destination is not what it made."""
        try:
            with open(os.path.join(self.state, "state.json")) as stream:
                found = json.load(stream)  # type: Json
            info = os.lstat(self.dest)
        except (OSError, ValueError):
            return {}
        return found if found.get("inode") == [info.st_dev, info.st_ino] else {}

    def generations(self) -> List[Json]:
        """Old trees, newest first."""
        folder = os.path.join(self.state, "old")
        found = []
        for name in sorted(os.listdir(folder) if os.path.isdir(folder) else (), reverse=True):
            if os.path.lexists(os.path.join(folder, name, "tree")):
                found.append(dict(self._read(os.path.join(folder, name, "state.json")), name=name))
        return found

    @staticmethod
    def _read(path: str) -> Json:
        try:
            with open(path) as stream:
                return dict(json.load(stream))
        except (OSError, ValueError):
            return {}

    def manifest(self) -> List[Entry]:
        """Entries of the tree of the last sync."""
        with open(os.path.join(self.state, "manifest"), "rb") as stream:
            return load(json.loads(zlib.decompress(stream.read()).decode()))

    # --- changing it

    def leftovers(self) -> List[str]:
        """Trees that interrupted syncs left; ``new`` is free afterwards."""
        folder = os.path.join(self.state, "left")
        if os.path.lexists(self.new):
            os.makedirs(folder, exist_ok=True)
            number = 0
            while os.path.lexists(os.path.join(folder, str(number))):
                number += 1
            os.rename(self.new, os.path.join(folder, str(number)))
        return [os.path.join(folder, name) for name in sorted(os.listdir(folder))] if os.path.isdir(folder) else []

    def can_exchange(self) -> bool:
        """Whether this file system swaps two names in one step."""
        one, two = os.path.join(self.state, "x1"), os.path.join(self.state, "x2")
        for path in (one, two):
            with open(path, "w"):
                pass
        good = rename(one, two, EXCHANGE)
        os.unlink(one)
        os.unlink(two)
        return good

    def commit(self, entries: List[Entry], record: Json, keep: int) -> None:
        """Give the new tree its name; the old one becomes a generation."""
        before = self.record()
        fresh = not os.path.lexists(self.dest)
        with open(os.path.join(self.state, "manifest.new"), "wb") as stream:
            stream.write(zlib.compress(json.dumps(dump(entries)).encode(), 1))
        info = os.lstat(self.new)
        made = fresh or bool(before.get("made"))
        record = dict(record, schema=1, dest=self.dest, time=time.time(), inode=[info.st_dev, info.st_ino], made=made)
        if fresh:
            if not rename(self.new, self.dest, NOREPLACE):
                os.rename(self.new, self.dest)
        else:
            self._swap(before)
        os.replace(os.path.join(self.state, "manifest.new"), os.path.join(self.state, "manifest"))
        write_json(os.path.join(self.state, "state.json"), record)
        for path in (os.path.dirname(self.dest), self.state):
            fsync_folder(path)
        self.prune(keep)

    def _swap(self, before: Json) -> None:
        folder = os.path.join(self.state, "old", "%020d" % int(time.time() * 1e6))
        os.makedirs(folder)
        write_json(os.path.join(folder, "state.json"), before)
        if os.path.exists(os.path.join(self.state, "manifest")) and before:
            shutil.copyfile(os.path.join(self.state, "manifest"), os.path.join(folder, "manifest"))
        if not rename(self.new, self.dest, EXCHANGE):
            raise TreeError("this file system cannot swap two folders in one step", self.dest)
        os.rename(self.new, os.path.join(folder, "tree"))

    def prune(self, keep: int) -> None:
        """Remove what nobody needs any more."""
        old = os.path.join(self.state, "old")
        for generation in self.generations()[keep:]:
            remove(os.path.join(old, generation["name"]))
        for name in os.listdir(old) if os.path.isdir(old) else ():
            if not os.path.lexists(os.path.join(old, name, "tree")):
                remove(os.path.join(old, name))
        remove(os.path.join(self.state, "left"))

    def rollback(self) -> Json:
        """Bring the newest old tree back; what it replaces takes its place, so a second rollback undoes the first."""
        found = self.generations()
        if not found:
            raise TreeError("there is no older tree to go back to", self.dest)
        folder = os.path.join(self.state, "old", found[0]["name"])
        now = self.record()
        if not rename(os.path.join(folder, "tree"), self.dest, EXCHANGE):
            raise TreeError("this file system cannot swap two folders in one step", self.dest)
        for name in ("state.json", "manifest"):
            mine, theirs = os.path.join(self.state, name), os.path.join(folder, name)
            if os.path.exists(theirs):
                os.rename(theirs, theirs + ".swap")
            if os.path.exists(mine):
                os.rename(mine, theirs)
            if os.path.exists(theirs + ".swap"):
                os.rename(theirs + ".swap", mine)
        fsync_folder(os.path.dirname(self.dest))
        return {"root": found[0].get("root"), "was": now.get("root")}


def judge_place(dest: str, homes: Set[str], mounts: List[str]) -> None:
    """TreeError if this may not be replaced as a whole."""
    if dest in FORBIDDEN:
        raise TreeError("refused: a folder of the system is no destination", dest)
    if any(home == dest or home.startswith(dest + "/") for home in homes if home):
        raise TreeError("refused: a home folder is no destination; name a folder inside it", dest)
    for point in mounts:
        if point == dest or point.startswith(dest + "/"):
            raise TreeError("refused: %s is a mount point; name a folder inside it" % point, dest)


def rename(one: str, two: str, flag: int) -> bool:
    """renameat2; False where kernel, C library or file system do not have it."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    return bool(call(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(two), flag) == 0)


def mount_points() -> List[str]:
    """Where something is mounted on this host."""
    found = []
    with open("/proc/self/mountinfo", "rb") as stream:
        for line in stream:
            text = line.split()[4].decode("utf-8", "surrogateescape")
            for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
                text = text.replace(code, char)
            found.append(text)
    return found


def write_json(path: str, value: Json) -> None:
    """Write a small file that is absent, old or complete."""
    temp = "%s.%d" % (path, os.getpid())
    with open(temp, "w") as stream:
        json.dump(value, stream)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temp, path)


def fsync_folder(path: str) -> None:
    """Make a rename last."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove(path: str) -> None:
    """Remove a tree, folders without permissions included."""
    if os.path.islink(path) or not os.path.isdir(path):
        if os.path.lexists(path):
            os.unlink(path)
        return
    for folder, _, _ in os.walk(path):
        os.chmod(folder, 0o700)  # folders only: a file may be shared with the tree in use
    shutil.rmtree(path)


def users_of(prefix: str) -> List[str]:
    """Processes whose program, by the name it was started under, whose folder or mapped files lie below a prefix."""
    found = []
    inside = os.fsencode(prefix.rstrip("/")) + b"/"
    for pid in os.listdir("/proc"):
        if not pid.isdigit() or int(pid) == os.getpid():
            continue
        try:
            with open("/proc/%s/maps" % pid, "rb") as stream:
                busy = inside in stream.read()
            if not busy:
                busy = os.fsencode(os.readlink("/proc/%s/cwd" % pid) + "/").startswith(inside)
            if not busy:  # the program of a venv is a link, and what is mapped lies elsewhere
                with open("/proc/%s/cmdline" % pid, "rb") as stream:
                    busy = stream.read(4096).startswith(inside)
            with open("/proc/%s/comm" % pid) as stream:
                name = stream.read().strip()
        except (OSError, ValueError):
            continue
        if busy:
            found.append("%s (%s)" % (pid, name))
    return found
