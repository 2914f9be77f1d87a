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


def choose_network(facts: Sequence[Facts], wanted: Mapping[str, str | None]) -> NetworkChoice:
    """Choose an interface on every host.

    Args:
        facts: the hosts in rank order.
        wanted: host name -> the user's subnet or interface name, or None.

    Raises:
        PreflightError: a wanted network is missing on a host, or no interface serves all hosts.
    """
    if any(wanted.values()):
        return _wanted(facts, wanted)
    if len(facts) == 1 and facts[0].ssh_address == "-":
        link = Link(interface="lo", address="127.0.0.1")
        return NetworkChoice(links={facts[0].host: link}, reason="one host, this machine: loopback")
    candidates = {item.host: _candidates(item, facts) for item in facts}
    subnets = _common_subnets(candidates)
    if not subnets:
        return _by_connection(facts, candidates)
    ranked = sorted(subnets, key=lambda net: _rank(net, facts, candidates))
    best = ranked[0]
    links = {host: _link(_in_subnet(items, best)) for host, items in candidates.items()}
    return NetworkChoice(links=links, reason=_reason(best, ranked, facts, candidates))


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


def _common_subnets(candidates: Mapping[str, list[Interface]]) -> list[ipaddress.IPv4Network]:
    sets = [{_network(one) for one in items} for items in candidates.values()]
    return sorted(set.intersection(*sets)) if sets else []


def _in_subnet(items: list[Interface], subnet: ipaddress.IPv4Network) -> Interface:
    inside = [one for one in items if _network(one) == subnet]
    return min(inside, key=lambda one: (not one.rdma, -(one.speed_mbits or 0), one.name))


def _link(one: Interface) -> Link:
    return Link(interface=one.name, address=str(_address(one)))


def _rank(
    subnet: ipaddress.IPv4Network, facts: Sequence[Facts], candidates: Mapping[str, list[Interface]]
) -> tuple[bool, int, bool, bool, str]:
    """RDMA first, then the slowest host's speed, then physical, then the network SSH came in on."""
    chosen = [_in_subnet(candidates[item.host], subnet) for item in facts]
    return (
        not all(one.rdma for one in chosen),
        -min(one.speed_mbits or 0 for one in chosen),
        not all(one.physical for one in chosen),
        not _is_ssh_network(subnet, facts),
        str(subnet),
    )


def _is_ssh_network(subnet: ipaddress.IPv4Network, facts: Sequence[Facts]) -> bool:
    return all(item.ssh_address != "-" and _is_inside(item.ssh_address, subnet) for item in facts)


def _is_inside(address: str, subnet: ipaddress.IPv4Network) -> bool:
    try:
        return ipaddress.IPv4Address(address) in subnet
    except ValueError:
        return False


def _reason(
    best: ipaddress.IPv4Network,
    ranked: list[ipaddress.IPv4Network],
    facts: Sequence[Facts],
    candidates: Mapping[str, list[Interface]],
) -> str:
    chosen = [_in_subnet(candidates[item.host], best) for item in facts]
    speed = min(one.speed_mbits or 0 for one in chosen)
    what = f"{best}{', RDMA' if all(one.rdma for one in chosen) else ''}{f', {speed} Mbit/s' if speed else ''}"
    if len(ranked) == 1:
        return f"{what}: the only subnet that all hosts share"
    others = ", ".join(str(net) for net in ranked[1:])
    return (
        f"{what}: the fastest of the {len(ranked)} subnets that all hosts share (others: {others}); network: overrides"
    )


def _by_connection(facts: Sequence[Facts], candidates: Mapping[str, list[Interface]]) -> NetworkChoice:
    links = {}
    for item in facts:
        found = [one for one in candidates[item.host] if str(_address(one)) == item.ssh_address]
        if not found:
            have = ", ".join(f"{one.name} {one.ipv4}" for one in item.interfaces if one.ipv4) or "none"
            raise PreflightError(
                "no subnet is common to all hosts, and SSH did not arrive on a usable interface",
                where=item.host,
                fix=f"set network: in the run file; interfaces here: {have}",
            )
        links[item.host] = _link(found[0])
    return NetworkChoice(links=links, reason="no subnet is common to all hosts: the interface SSH arrives on")
