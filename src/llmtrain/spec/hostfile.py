"""Hostfiles: parse, select, render.

The grammar is the part of DeepSpeed's that DeepSpeed and pdsh read the same way. Whatever one of them would
misread is an error here, with its line and what to write instead. Source of their readings: DeepSpeed 0.19.8
``deepspeed/launcher/runner.py`` (``_parse_hostfile``), pdsh(1).
"""

from __future__ import annotations

import difflib
import ipaddress
import re
import unicodedata
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

from llmtrain.errors import InputFileError, UsageError
from llmtrain.spec.yamlfile import read_text

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

MAX_SLOTS = 1024
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_EXAMPLE = "write it as in: gpu004 slots=8"


@dataclass(frozen=True, kw_only=True)
class Host:
    """One machine of the cluster."""

    name: str
    """DNS name or IPv4 address, as in the hostfile; what ``ssh`` is called with."""
    slots: tuple[int, ...]
    """Indices of the accelerators used on this host, ascending."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The hosts of a run, in rank order."""

    hosts: tuple[Host, ...]
    """In file order; host 0 holds rank 0."""
    origin: str
    """The hostfile's path."""

    @property
    def world_size(self) -> int:
        """Number of ranks: one per slot."""
        return sum(len(host.slots) for host in self.hosts)

    @property
    def names(self) -> tuple[str, ...]:
        """Host names in rank order."""
        return tuple(host.name for host in self.hosts)

    def ranks_of(self, name: str) -> tuple[int, ...]:
        """Global ranks on the host called ``name``; DeepSpeed numbers them host by host."""
        first = 0
        for host in self.hosts:
            if host.name == name:
                return tuple(range(first, first + len(host.slots)))
            first += len(host.slots)
        raise KeyError(name)


def read_hostfile(path: str | Path) -> Cluster:
    """Read a hostfile.

    Raises:
        InputFileError: the file is missing or has a line that DeepSpeed or pdsh would misread.
    """
    try:
        text = read_text(path, what="hostfile")
    except InputFileError as error:
        # DeepSpeed only warns and trains on this machine alone; that must never happen by a typo.
        raise InputFileError(error.error, where=error.where, fix=f"create it, one host a line; {_EXAMPLE}") from None
    return parse_hostfile(text, name=str(path))


def parse_hostfile(text: str, *, name: str) -> Cluster:
    """Parse a hostfile's text.

    Args:
        text: lines ``NAME slots=N``, comments from ``#``, blank lines.
        name: what to call the file in errors.

    Raises:
        InputFileError: with ``where`` as ``file:line``.
    """
    hosts: list[Host] = []
    lines: dict[str, int] = {}
    for number, raw in enumerate(text.split("\n"), start=1):
        where = f"{name}:{number}"
        line = raw.rstrip("\r")
        _refuse_odd_characters(line, where)
        content = line.split("#", 1)[0].strip(" \t")
        if not content:
            continue
        host = _parse_line(content, where)
        key = host.name.lower().rstrip(".")
        if key in lines:
            _fail(f"duplicate host {host.name} (first on line {lines[key]})", where, "keep one of the two lines")
        lines[key] = number
        hosts.append(host)
    if not hosts:
        raise InputFileError("no hosts in the hostfile", where=name, fix=f"add one host a line; {_EXAMPLE}")
    _refuse_loopback_among_several(hosts, lines, name)
    return Cluster(hosts=tuple(hosts), origin=name)


def _fail(error: str, where: str, fix: str) -> NoReturn:
    raise InputFileError(error, where=where, fix=fix)


def _refuse_odd_characters(line: str, where: str) -> None:
    for column, char in enumerate(line, start=1):
        if char == "\ufeff":
            _fail("a byte order mark (it would become part of the host name)", where, "save as UTF-8 without BOM")
        if char in "\t " or (char.isascii() and char.isprintable()):
            continue
        label = unicodedata.name(char, f"U+{ord(char):04X}").lower()
        if char.isspace():
            _fail(f"an unusual space at column {column} ({label})", where, "type a plain space instead")
        if "#" in line[: column - 1]:
            continue  # a comment may be in any language
        _fail(f"an unusual character at column {column} ({label})", where, "retype the line in plain ASCII")


def _parse_line(content: str, where: str) -> Host:
    name, *fields = content.split()
    _check_name(name, where)
    return Host(name=name, slots=tuple(range(_parse_slots(name, fields, where))))


def _parse_slots(name: str, fields: list[str], where: str) -> int:
    wanted = f"write: {name} slots=N (N = accelerators to use on this host)"
    if not fields:
        _fail(f"no slots for host {name}", where, wanted)
    keys = [field.split("=", 1)[0] for field in fields]
    if keys[0] != "slots":
        near = difflib.get_close_matches(keys[0].lower(), ["slots", "max_slots"], n=1)
        hint = " (did you mean slots?)" if near else ""
        _fail(f"expected slots=N after the host name, found {fields[0]!r}{hint}", where, wanted)
    if keys.count("slots") > 1:
        _fail(f"slots stands twice for host {name}", where, wanted)
    extra = [field for field in fields[1:] if not re.fullmatch(r"max[_-]slots=\d+", field)]
    value = fields[0].partition("=")[2]
    if "=" not in fields[0] or not re.fullmatch(r"[0-9]+", value):
        _fail(f"slots must be a whole number, found {' '.join(fields)!r}", where, wanted)
    if extra:
        _fail(f"unknown text after slots: {' '.join(extra)!r}", where, "put remarks behind a #")
    if len(value) > 9 or not 1 <= int(value) <= MAX_SLOTS:
        _fail(f"slots={value} is not between 1 and {MAX_SLOTS}", where, wanted)
    return int(value)


def _check_name(name: str, where: str) -> None:
    if "@" in name:
        _fail(
            f"a user in the host name {name!r}", where, "write the bare name, and 'User NAME' for it in ~/.ssh/config"
        )
    if "[" in name and "]" in name and ":" not in name:
        _fail(f"a range in {name!r}: DeepSpeed reads one host, pdsh several", where, "write one line for each host")
    if "," in name:
        _fail(f"a comma in {name!r}: DeepSpeed reads one host, pdsh several", where, "write one line for each host")
    if _is_ipv6(name):
        _fail(
            f"an IPv6 address {name!r}: DeepSpeed splits host from port and slots at the colon",
            where,
            "give the host a name in DNS or /etc/hosts and write that, or its IPv4 address",
        )
    if re.fullmatch(r"[A-Za-z0-9_.-]+:\d+", name):
        host, port = name.split(":")
        _fail(
            f"a port in the host name {name!r}: pdsh reads {host!r} as the name of a module",
            where,
            f"write {host}, and 'Port {port}' for it in ~/.ssh/config",
        )
    if not is_host_name(name):
        shown = name if len(name) <= 60 else name[:57] + "..."
        _fail(f"not a host name: {shown!r}", where, "write a DNS name (at most 253 characters) or an IPv4 address")


def _is_ipv6(name: str) -> bool:
    try:
        return ipaddress.ip_address(name.strip("[]").split("%", 1)[0]).version == 6
    except ValueError:
        return False


def is_host_name(name: str) -> bool:
    """Whether ``name`` is a DNS name (RFC 1123, underscores allowed) or an IPv4 address."""
    if re.fullmatch(r"[0-9.]+", name):
        try:
            ipaddress.IPv4Address(name)
        except ValueError:
            return False
        return True
    labels = name.removesuffix(".").split(".")
    return len(name) <= 253 and all(_LABEL.fullmatch(label) for label in labels)


def is_loopback_name(name: str) -> bool:
    """Whether ``name`` can only mean this machine."""
    return name.lower().rstrip(".") in {"localhost", "localhost.localdomain", "ip6-localhost"} or (
        re.fullmatch(r"127(\.\d{1,3}){3}", name) is not None
    )


def _refuse_loopback_among_several(hosts: list[Host], lines: dict[str, int], name: str) -> None:
    if len(hosts) == 1:
        return
    for host in hosts:
        if is_loopback_name(host.name):
            kind = "localhost" if host.name[0].isalpha() else "the loopback address"
            _fail(
                f"{kind} among several hosts: the others cannot reach a host called {host.name}",
                f"{name}:{lines[host.name.lower().rstrip('.')]}",
                "write this machine's name as the other hosts know it",
            )


def select(
    cluster: Cluster, *, include: str | None = None, exclude: str | None = None, num_hosts: int | None = None
) -> Cluster:
    """Choose hosts and slots, keeping file order.

    Args:
        cluster: what the hostfile says.
        include: ``NAME[:SLOTS][@NAME[:SLOTS]...]`` to use nothing else; SLOTS is a list of indices and ranges
            such as ``0,2`` or ``0-3``.
        exclude: the same grammar, for what to leave out.
        num_hosts: use the first so many of what is left.

    Raises:
        UsageError: both given, a name or slot that is not in the hostfile, or nothing left.
    """
    if include is not None and exclude is not None:
        raise UsageError(
            "--include and exclude cannot go together (include and exclude)",
            where="--include, --exclude",
            fix="use one",
        )
    if include is not None:
        wanted = _parse_spec(include, cluster, "--include")
        hosts = [replace(host, slots=wanted[host.name]) for host in cluster.hosts if host.name in wanted]
    elif exclude is not None:
        unwanted = _parse_spec(exclude, cluster, "--exclude")
        hosts = [_without(host, unwanted.get(host.name, ())) for host in cluster.hosts]
    else:
        hosts = list(cluster.hosts)
    hosts = [host for host in hosts if host.slots]
    if not hosts:
        raise UsageError("no slots left", where=f"--exclude {exclude}", fix="leave at least one slot")
    return replace(cluster, hosts=tuple(_first(hosts, num_hosts)))


def _first(hosts: list[Host], count: int | None) -> list[Host]:
    if count is None:
        return hosts
    if not 1 <= count <= len(hosts):
        raise UsageError(
            f"--num-hosts {count} is not between 1 and {len(hosts)}", where="--num-hosts", fix="name fewer hosts"
        )
    return hosts[:count]


def _without(host: Host, slots: Iterable[int]) -> Host:
    gone = set(slots)
    return replace(host, slots=tuple(slot for slot in host.slots if slot not in gone))


def _parse_spec(spec: str, cluster: Cluster, option: str) -> dict[str, tuple[int, ...]]:
    where = f"{option} {spec!r}"
    by_name = {host.name.lower(): host for host in cluster.hosts}
    chosen: dict[str, tuple[int, ...]] = {}
    for part in spec.split("@"):
        name, colon, slots = part.partition(":")
        name = name.strip()
        if not name:
            raise UsageError("an empty host name", where=where, fix=f"write for example {option} {cluster.names[0]}:0")
        host = by_name.get(name.lower())
        if host is None:
            near = difflib.get_close_matches(name, cluster.names, n=3) or list(cluster.names[:5])
            raise UsageError(f"no host {name} in {cluster.origin}", where=where, fix=f"use one of: {', '.join(near)}")
        if host.name in chosen:
            raise UsageError(f"host {name} stands twice", where=where, fix="name each host once")
        chosen[host.name] = _parse_slot_list(slots, host, where) if colon else host.slots
    return chosen


def _parse_slot_list(text: str, host: Host, where: str) -> tuple[int, ...]:
    slots: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,6})\s*(?:-\s*([0-9]{1,6})\s*)?", part)
        if match is None:
            raise UsageError(
                f"slot {part.strip()!r} of host {host.name} is not a number or range",
                where=where,
                fix="write e.g. 0,2-3",
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise UsageError(f"slot range {part.strip()!r} runs backwards", where=where, fix=f"write {last}-{first}")
        absent = next((slot for slot in range(first, last + 1) if slot not in host.slots), None)
        if absent is not None:
            raise UsageError(
                f"host {host.name} has no slot {absent}",
                where=where,
                fix=f"use slots {host.slots[0]} to {host.slots[-1]}",
            )
        slots.update(range(first, last + 1))
    return tuple(sorted(slots))


def render_hostfile(cluster: Cluster) -> str:
    """The hostfile DeepSpeed is given: every host with slots up to the highest one used."""
    return "".join(f"{host.name} slots={host.slots[-1] + 1}\n" for host in cluster.hosts)


def render_include(cluster: Cluster) -> str:
    """The ``--include`` that spells out every slot, since DeepSpeed 0.15.2 to 0.19.6 drops hosts without slots."""
    return "@".join(f"{host.name}:{','.join(map(str, host.slots))}" for host in cluster.hosts)
