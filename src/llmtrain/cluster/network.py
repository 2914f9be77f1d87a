"""Choose the network the ranks talk over. Pure."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmtrain.errors import PreflightError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmtrain.cluster.probes import Facts, Interface

_CONTAINER = re.compile(r"(docker|br-|virbr|cni|flannel|cali|veth|lxc|lxdbr|podman|kube)")


@dataclass(frozen=True, kw_only=True)
class Link:
    """The interface one host uses."""

    interface: str
    """Its name on that host."""
    address: str
    """IPv4 address there."""


@dataclass(frozen=True, kw_only=True)
class NetworkChoice:
    """One interface per host, and why."""

    links: dict[str, Link]
    """Host name -> interface and address."""
    reason: str
    """One sentence."""


def choose_network(
    facts: Sequence[Facts], wanted: Mapping[str, str | None], measured: Mapping[str, float] | None = None
) -> NetworkChoice:
    """Choose an interface on every host.

    Args:
        facts: the hosts in rank order.
        wanted: host name -> the user's subnet or interface name, or None.
        measured: subnet -> Mbit/s seen between two hosts, where there is more than one.

    Raises:
        PreflightError: a wanted network is missing on a host, or no interface serves all hosts.
    """
    if any(wanted.values()):
        return _wanted(facts, wanted)
    if len(facts) == 1 and facts[0].ssh_address == "-":
        link = Link(interface="lo", address="127.0.0.1")
        return NetworkChoice(links={facts[0].host: link}, reason="one host, this machine: loopback")
    subnets = shared_subnets(facts)
    if not subnets:
        return _by_connection(facts)
    measured = measured or {}
    ranked = sorted(subnets, key=lambda net: _rank(net, facts, measured))
    return NetworkChoice(links=subnets[ranked[0]], reason=_reason(ranked, facts, measured))


def shared_subnets(facts: Sequence[Facts]) -> dict[str, dict[str, Link]]:
    """Subnet -> the interface in it on every host, for the subnets that all hosts share."""
    candidates = {item.host: _candidates(item, facts) for item in facts}
    common = set.intersection(*({_network(one) for one in items} for items in candidates.values()))
    return {
        str(subnet): {host: _link(_in_subnet(items, subnet)) for host, items in candidates.items()}
        for subnet in sorted(common)
    }


def _wanted(facts: Sequence[Facts], wanted: Mapping[str, str | None]) -> NetworkChoice:
    links = {}
    for item in facts:
        text = wanted.get(item.host)
        usable = [one for one in item.interfaces if one.ipv4]
        if text and "/" in text:
            found = [one for one in usable if _address(one) in ipaddress.IPv4Network(text, strict=False)]
        elif text:
            found = [one for one in usable if one.name == text]
        else:
            found = _candidates(item, facts)
        if not found:
            have = ", ".join(f"{one.name} {one.ipv4}" for one in usable)
            raise PreflightError(
                f"no interface for network {text or 'of the other hosts'}", where=item.host, fix=f"choose among: {have}"
            )
        links[item.host] = _link(found[0])
    for host, link in links.items():
        if len(facts) > 1 and ipaddress.IPv4Address(link.address).is_loopback:
            raise PreflightError(
                f"{link.interface} is the loopback interface", where=host, fix="name one that reaches the other hosts"
            )
    return NetworkChoice(links=links, reason="as the run file's network says")


def _candidates(item: Facts, facts: Sequence[Facts]) -> list[Interface]:
    """Interfaces that could carry traffic: up, not loopback or a container's bridge, address unique in the cluster."""
    others = {one.ipv4.split("/")[0] for other in facts if other is not item for one in other.interfaces if one.ipv4}
    return [
        one
        for one in item.interfaces
        if one.up
        and one.ipv4
        and not one.loopback
        and not one.bridge
        and not _CONTAINER.match(one.name)
        and one.ipv4.split("/")[0] not in others
        and not _address(one).is_link_local
    ]


def _address(one: Interface) -> ipaddress.IPv4Address:
    return ipaddress.IPv4Interface(one.ipv4 or "0.0.0.0/32").ip


def _network(one: Interface) -> ipaddress.IPv4Network:
    return ipaddress.IPv4Interface(one.ipv4 or "0.0.0.0/32").network


def _in_subnet(items: list[Interface], subnet: ipaddress.IPv4Network) -> Interface:
    inside = [one for one in items if _network(one) == subnet]
    return min(inside, key=lambda one: (not one.rdma, -(one.speed_mbits or 0), one.name))


def _link(one: Interface) -> Link:
    return Link(interface=one.name, address=str(_address(one)))


def _rank(
    subnet: str, facts: Sequence[Facts], measured: Mapping[str, float]
) -> tuple[bool, bool, float, bool, bool, str]:
    """RDMA first, then the measured or else the reported speed, then physical, then the network SSH came in on."""
    chosen = _chosen(subnet, facts)
    speed = min(one.speed_mbits or 0 for one in chosen)
    return (
        measured.get(subnet) == 0.0,
        not all(one.rdma for one in chosen),
        -measured.get(subnet, speed),
        not all(one.physical for one in chosen),
        not _is_ssh_network(subnet, facts),
        subnet,
    )


def _chosen(subnet: str, facts: Sequence[Facts]) -> list[Interface]:
    return [_in_subnet(_candidates(item, facts), ipaddress.IPv4Network(subnet)) for item in facts]


def _is_ssh_network(subnet: str, facts: Sequence[Facts]) -> bool:
    network = ipaddress.IPv4Network(subnet)
    return all(item.ssh_address != "-" and _is_inside(item.ssh_address, network) for item in facts)


def _is_inside(address: str, subnet: ipaddress.IPv4Network) -> bool:
    try:
        return ipaddress.IPv4Address(address) in subnet
    except ValueError:
        return False


def _reason(ranked: list[str], facts: Sequence[Facts], measured: Mapping[str, float]) -> str:
    rdma = ", RDMA" if all(one.rdma for one in _chosen(ranked[0], facts)) else ""
    what = f"{ranked[0]}{rdma}{_speed(ranked[0], facts, measured)}"
    if len(ranked) == 1:
        return f"{what}: the only subnet that all hosts share"
    others = ", ".join(f"{subnet}{_speed(subnet, facts, measured)}" for subnet in ranked[1:])
    return f"{what}: the fastest of {len(ranked)} subnets that all hosts share (others: {others}); network: overrides"


def _speed(subnet: str, facts: Sequence[Facts], measured: Mapping[str, float]) -> str:
    if subnet in measured:
        return f", {measured[subnet]:.0f} Mbit/s measured"
    speed = min(one.speed_mbits or 0 for one in _chosen(subnet, facts))
    return f", {speed} Mbit/s" if speed else ""


def _by_connection(facts: Sequence[Facts]) -> NetworkChoice:
    links = {}
    for item in facts:
        found = [one for one in _candidates(item, facts) if str(_address(one)) == item.ssh_address]
        if not found:
            have = ", ".join(f"{one.name} {one.ipv4}" for one in item.interfaces if one.ipv4) or "none"
            raise PreflightError(
                "no subnet is common to all hosts, and SSH did not arrive on a usable interface",
                where=item.host,
                fix=f"set network: in the run file; interfaces here: {have}",
            )
        links[item.host] = _link(found[0])
    return NetworkChoice(links=links, reason="no subnet is common to all hosts: the interface SSH arrives on")
