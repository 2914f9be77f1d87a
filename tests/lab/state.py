"""The lab's directory: who owns it, where things lie, what is broken now."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from stat import S_ISDIR
from typing import Any

from tests.lab.model import LabError, LabOptions
from tests.lab.proc import Identity

PARENT = Path("/var/tmp")
PREFIX = "llmtrain-lab-"
HALF_MADE_S = 60.0
"""A directory without lab.json that is older than this was left by a crash."""


class Faults:
    """What is wrong now: kind -> key -> value, in one file so that another process can heal it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            return json.loads(self.path.read_text())
        except FileNotFoundError:
            return {}

    def _write(self, content: dict[str, dict[str, Any]]) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({kind: keys for kind, keys in content.items() if keys}))
        new.replace(self.path)

    def of(self, kind: str) -> dict[str, Any]:
        """All faults of a kind."""
        return self._read().get(kind, {})

    def has(self, kind: str, key: str) -> bool:
        """Whether this fault is set."""
        return key in self.of(kind)

    def any(self) -> bool:
        """Whether anything is wrong."""
        return bool(self._read())

    def set(self, kind: str, key: str, value: Any = True) -> None:
        """Add or change a fault."""
        content = self._read()
        content.setdefault(kind, {})[key] = value
        self._write(content)

    def clear(self, kind: str, key: str) -> None:
        """Remove a fault; not an error if there is none."""
        content = self._read()
        if content.get(kind, {}).pop(key, None) is not None:
            self._write(content)

    def clear_kind(self, kind: str) -> None:
        """Remove all faults of a kind."""
        content = self._read()
        if content.pop(kind, None):
            self._write(content)

    def describe(self) -> str:
        """One line for a person."""
        items = [(f"{kind} {key}", value) for kind, keys in self._read().items() for key, value in keys.items()]
        return ", ".join(name if value is True else f"{name}={value}" for name, value in items) or "none"


class LabState:
    """Paths and records of one lab."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.faults = Faults(root / "faults.json")
        self.keys = root / "keys"
        self.switch = root / "switch.json"

    @classmethod
    def new(cls, nodes: int, options: LabOptions) -> LabState:
        """A directory with a random name, owned by this process."""
        state = cls(Path(tempfile.mkdtemp(prefix=PREFIX, dir=PARENT)))
        state.keys.mkdir()
        state.write(nodes, options, Identity.of(os.getpid()))
        return state

    def write(self, nodes: int, options: LabOptions, owner: Identity | None) -> None:
        """Record what the lab is; without an owner it lives until `down` or its time to live."""
        content = {"nodes": nodes, "options": asdict(options), "owner": asdict(owner) if owner else None}
        new = self.root / "lab.new"
        new.write_text(json.dumps(content))
        new.replace(self.root / "lab.json")

    def read(self) -> tuple[int, LabOptions]:
        """(nodes, options)."""
        try:
            content = json.loads((self.root / "lab.json").read_text())
        except FileNotFoundError:
            raise LabError(f"there is no lab in {self.root}") from None
        options = content["options"]
        options["shares"] = tuple(options["shares"])
        options["head_shares"] = tuple(options.get("head_shares", ()))
        options["private_copies"] = tuple((source, target) for source, target in options["private_copies"])
        return content["nodes"], LabOptions(**options)

    def owner(self) -> Identity | None:
        """Who takes this lab down; None for a detached one. Readable whatever version of this package made the lab."""
        owner = json.loads((self.root / "lab.json").read_text())["owner"]
        return Identity(**owner) if owner else None

    def group_name(self, name: str) -> str:
        """The host's cgroup."""
        return f"{self.root.name}-{name}"

    def host(self, name: str) -> Path:
        """The host's own directory."""
        return self.root / "hosts" / name

    def disk(self, name: str) -> Path:
        """What is the host's root directory."""
        return self.host(name) / "disk"

    def identity_path(self, name: str) -> Path:
        """Where the host's PID 1 is recorded."""
        return self.host(name) / "pid1.json"

    def identity(self, name: str) -> Identity | None:
        """The host's PID 1, or None while the host is off."""
        identity = Identity.read(self.identity_path(name))
        return identity if identity and identity.alive() else None

    def is_dead(self) -> bool:
        """Whether nobody will take this lab down any more."""
        try:
            age = time.time() - self.root.stat().st_mtime
            if not (self.root / "lab.json").exists():
                return age > HALF_MADE_S
            owner = self.owner()
        except FileNotFoundError:  # somebody is taking it down right now
            return False
        if owner is not None:
            return not owner.alive()
        switch = Identity.read(self.switch)
        return switch is None or not switch.alive()

    def remove(self) -> None:
        """Delete the directory; refuse if anything is mounted in it, since that would be deleted too."""
        mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        if inside := [place for place in mounted if place.startswith(f"{self.root}/")]:
            raise LabError(f"not removing {self.root}: mounted in it: {inside}")
        shutil.rmtree(self.root, ignore_errors=True)
        if self.root.exists():
            raise LabError(f"could not remove {self.root}")


def list_states() -> list[LabState]:
    """All labs on this machine."""
    return [LabState(path) for path in sorted(PARENT.glob(f"{PREFIX}*")) if is_own_folder(path)]


def is_own_folder(path: Path) -> bool:
    """Whether it is a real folder that this user made; anybody may write where labs lie."""
    try:
        stat = path.lstat()
    except FileNotFoundError:
        return False
    return S_ISDIR(stat.st_mode) and stat.st_uid == os.getuid()


def claim(state: LabState) -> int | None:
    """A lock for the one that removes a dead lab; None if another one has it. Close it afterwards."""
    try:
        fd = os.open(state.root, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd
