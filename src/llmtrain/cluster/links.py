"""Measured links: which of several networks is really the fast one.

Drivers often report no speed (virtual machines) or one that a switch does not keep; a third of a second of bytes
between two hosts tells.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.cluster import linkprobe
from llmtrain.cluster.fleet import Command
from llmtrain.cluster.network import shared_subnets
from llmtrain.errors import HostError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmtrain.cluster.fleet import Channel, Fleet
    from llmtrain.cluster.probes import Facts


def measure_subnets(fleet: Fleet, facts: Sequence[Facts], pythons: Mapping[str, str]) -> dict[str, float]:
    """Measure every subnet that all hosts share, between the first two hosts.

    Args:
        fleet: open transports.
        facts: the hosts in rank order, at least two.
        pythons: host name -> interpreter.

    Returns:
        Subnet -> Mbit/s; nothing where there is no choice to make, 0 for a subnet that lets no bytes through.
    """
    subnets = shared_subnets(facts)
    if len(facts) < 2 or len(subnets) < 2:
        return {}
    first, second = facts[0].host, facts[1].host
    addresses = {subnet: links[first].address for subnet, links in subnets.items()}
    source = Path(linkprobe.__file__).read_text(encoding="utf-8")
    script = f"{source}\n\nserve({list(addresses.values())!r})\n"
    channel = fleet[first].start((pythons[first], "-I", "-c", script))
    try:
        ports = json.loads(_first_line(channel, first))
        client = f"{source}\n\nmeasure({ports!r})\n"
        result = fleet[second].run(Command(argv=(pythons[second], "-I", "-"), stdin=client.encode(), timeout_s=60))
        rates = json.loads(result.stdout.decode().strip().splitlines()[-1])["rates"]
    except (ValueError, IndexError, KeyError):
        raise HostError("the networks could not be measured", where=first, fix="set network: in the run file") from None
    finally:
        channel.close()
    return {subnet: rates[address] or 0.0 for subnet, address in addresses.items()}


def _first_line(channel: Channel, host: str) -> str:
    text = b""
    while b"\n" not in text:
        data = channel.read()
        if not data:
            raise HostError("the link probe did not start", where=host, fix="set network: in the run file")
        text += data
    return text.partition(b"\n")[0].decode()
