"""Let the hosts look at each other: who reaches whom, by which name, and who shares a disk with whom."""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.cluster import peerprobe
from llmtrain.cluster.fleet import Command, HostResults, run_on_all
from llmtrain.errors import HostError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from llmtrain.cluster.fleet import Channel, Fleet, Transport

ALL_PAIRS = 48
"""With more hosts each one tries host 0 and this many others instead of all: together they cross every switch."""
START_S = 20.0
PROBE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A host as the others will see it."""

    python: str
    """Interpreter there."""
    address: str
    """Address of the interface ranks will use."""
    node_dir: str
    """Working folder there."""
    mtu: int = 1500
    """Largest packet of that interface."""


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What one host saw of the others."""

    reached: Mapping[str, str | None]
    """Peer -> why an open port of it cannot be reached; None if it can."""
    pings: Mapping[str, Mapping[str, bool]]
    """Peer -> whether ``small`` and ``large`` datagrams came back."""
    names: Mapping[str, tuple[str, ...] | None]
    """Host name -> addresses; empty if unknown there, None if the resolver hung."""
    marks: tuple[str, ...]
    """Peers whose mark is in this host's working folder."""
    master_busy: str | None
    """Why the port where ranks meet cannot be opened here; None if it can, or was not asked for."""


def meet(fleet: Fleet, peers: Mapping[str, Peer], *, master_port: int | None = None) -> HostResults[Sight]:
    """Start a listener on every host, then let every host try the others.

    Args:
        fleet: open transports.
        peers: the hosts to be seen, in rank order.
        master_port: port to be opened on the first of them for a moment.
    """
    names = list(peers)
    tokens = {name: secrets.token_hex(8) for name in names}
    with Listening(fleet) as listening:

        def listen(name: str) -> dict[str, Any]:
            request = {
                "address": peers[name].address,
                "folder": peers[name].node_dir,
                "token": tokens[name],
                "master_port": master_port if name == names[0] else None,
            }
            script = f"{_source()}\n\nserve(json.loads({json.dumps(json.dumps(request))}))\n"
            return listening.start(name, peers[name], script)

        started = run_on_all(names, listen)
        ports = started.good

        def look(name: str) -> Sight:
            if name not in ports:
                raise started.failed[name]
            request = _request(name, peers, ports, tokens)
            answer = _ask(fleet[name], peers[name].python, request)
            return _sight(answer, ports[name]["master"])

        return run_on_all(names, look)


def chosen_peers(name: str, names: list[str]) -> list[str]:
    """Whom a host tries: all others, or in a large cluster host 0 and its next neighbours around the ring."""
    others = [other for other in names if other != name]
    if len(others) <= ALL_PAIRS:
        return others
    at = names.index(name)
    ring = [names[(at + step) % len(names)] for step in range(1, ALL_PAIRS)]
    return list(dict.fromkeys([*([names[0]] if at else []), *ring]))


def _request(
    name: str, peers: Mapping[str, Peer], ports: Mapping[str, Any], tokens: Mapping[str, str]
) -> dict[str, Any]:
    names = list(peers)
    others = [other for other in chosen_peers(name, names) if other in ports]
    following = [names[(names.index(name) + 1) % len(names)]]
    pinged = [other for other in dict.fromkeys([*following, names[0]]) if other != name and other in ports]
    return {
        "peers": {other: [peers[other].address, ports[other]["tcp"], tokens[other]] for other in others},
        "pings": {other: [peers[other].address, ports[other]["udp"], peers[name].mtu] for other in pinged},
        "names": names,
        "folder": peers[name].node_dir,
        "marks": {other: token for other, token in tokens.items() if other != name},
    }


def _ask(transport: Transport, python: str, request: dict[str, Any]) -> dict[str, Any]:
    script = f"{_source()}\n\nprobe(json.loads({json.dumps(json.dumps(request))}))\n"
    result = transport.run(Command(argv=(python, "-I", "-"), stdin=script.encode(), timeout_s=PROBE_S))
    try:
        answer: dict[str, Any] = json.loads(result.stdout.decode().strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise HostError(
            f"the probe of the other hosts failed: {result.tail()}",
            where=transport.name,
            fix=f"ssh -- {transport.name} {python} -V",
        ) from None
    return answer


def _sight(answer: Mapping[str, Any], master: str | None) -> Sight:
    return Sight(
        reached=answer["reached"],
        pings=answer["pings"],
        names={name: None if found is None else tuple(found) for name, found in answer["names"].items()},
        marks=tuple(answer["marks"]),
        master_busy=master,
    )


def _source() -> str:
    return Path(peerprobe.__file__).read_text(encoding="utf-8")


class Listening:
    """Listeners on the hosts; they end with the block."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._channels: list[Channel] = []

    def __enter__(self) -> Listening:  # noqa: PYI034  typing has Self only since Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        for channel in self._channels:
            channel.close()

    def start(self, name: str, peer: Peer, script: str) -> dict[str, Any]:
        """Start a script that tells its ports in one line of JSON and then waits; returns them.

        Raises:
            HostError: it could not listen.
        """
        channel = self._fleet[name].start((peer.python, "-I", "-c", script))
        self._channels.append(channel)
        with _deadline(channel, START_S):
            line = first_line(channel)
        try:
            ports: dict[str, Any] = json.loads(line)
        except ValueError:
            raise HostError(
                f"no listener could be started on {peer.address}",
                where=name,
                fix=f"see whether the address is still there: ssh -- {name} ip address",
            ) from None
        return ports


@contextlib.contextmanager
def _deadline(channel: Channel, seconds: float) -> Iterator[None]:
    """Close the channel, which ends every read, when time is up."""
    timer = threading.Timer(seconds, channel.close)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def first_line(channel: Channel) -> str:
    """The first line that looks like JSON, since shells may print before it; empty if the process ends first."""
    text = b""
    while not any(line.startswith(b"{") for line in text.splitlines()[: text.count(b"\n")]):
        data = channel.read()
        if not data:
            return ""
        text += data
    return next(line for line in text.splitlines() if line.startswith(b"{")).decode()
