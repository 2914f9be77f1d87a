"""What the hosts see of each other: names, ports, packet sizes, shared folders. Pure."""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from typing import TYPE_CHECKING

from llmtrain.cluster.checks.majority import odd_ones
from llmtrain.cluster.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmtrain.cluster.network import Link
    from llmtrain.cluster.peers import Sight
    from llmtrain.cluster.probes import Facts


def judge_peers(
    facts: Mapping[str, Facts], links: Mapping[str, Link], sights: Mapping[str, Sight], master_port: int | None
) -> list[Finding]:
    """Everything that takes two hosts to see.

    Args:
        facts: host name -> facts.
        links: host name -> interface and address the ranks will use.
        sights: host name -> what it saw.
        master_port: the port where ranks meet, if the user chose one.
    """
    return [
        *judge_ports(links, sights),
        *judge_master(sights, master_port),
        *judge_names(facts, sights),
        *judge_shared(facts, sights),
        *judge_mtu(facts, links, sights),
    ]


def judge_ports(links: Mapping[str, Link], sights: Mapping[str, Sight]) -> list[Finding]:
    """One finding for the host that several others cannot reach, else one for the pair."""
    blocked: dict[str, dict[str, str]] = defaultdict(dict)
    for host, sight in sights.items():
        for peer, why in sight.reached.items():
            if why is not None:
                blocked[peer][host] = why
    tried = {peer: [host for host, sight in sights.items() if peer in sight.reached] for peer in links}
    return [
        Finding(
            host=peer,
            check="ports",
            level="fail",
            saw=f"{_who(list(whys), tried[peer])} an open port of {peer} at {links[peer].address}: "
            f"{next(iter(whys.values()))}",
            wanted="every host reaches every port of every other: ranks choose ports as they go",
            fix=f"ssh -- {peer} iptables -I INPUT -i {links[peer].interface} -s {_range(links)} -j ACCEPT",
        )
        for peer, whys in blocked.items()
    ]


def _who(hosts: list[str], tried: list[str]) -> str:
    if len(hosts) > 1 and len(hosts) == len(tried):
        return "no other host reaches"
    return " and ".join(hosts[:3]) + (f" and {len(hosts) - 3} more" if len(hosts) > 3 else "") + " cannot reach"


def _range(links: Mapping[str, Link]) -> str:
    """The smallest network that holds all addresses."""
    numbers = [int(ipaddress.IPv4Address(link.address)) for link in links.values()]
    width = (min(numbers) ^ max(numbers)).bit_length()
    return str(ipaddress.IPv4Network((min(numbers) >> width << width, 32 - width)))


def judge_master(sights: Mapping[str, Sight], port: int | None) -> list[Finding]:
    """The port where ranks meet, on the first host."""
    return [
        Finding(
            host=host,
            check="master-port",
            level="fail",
            saw=f"port {port}: {sight.master_busy}",
            wanted="a port nobody uses",
            fix=f"leave --master-port out, or see who has it: ssh -- {host} ss -ltnp sport = :{port}",
        )
        for host, sight in sights.items()
        if sight.master_busy
    ]


def judge_names(facts: Mapping[str, Facts], sights: Mapping[str, Sight]) -> list[Finding]:
    """Names that lead nowhere, to loopback, or to another machine.

    llmtrain itself tells the ranks addresses, so nothing here stops a run; where no host knows any other's name
    (they are the head's own aliases), nothing is said.
    """
    known = any(found for host, sight in sights.items() for name, found in sight.names.items() if name != host)
    if not known:
        return []
    findings = []
    for host, sight in sights.items():
        for name, found in sight.names.items():
            wrong = _wrong(name, found, facts)
            if wrong and not _is_address(name):
                findings.append(_name_finding(host, name, wrong, facts))
    return findings


def _wrong(name: str, found: tuple[str, ...] | None, facts: Mapping[str, Facts]) -> str | None:
    if found is None:
        return "gets no answer from its resolver"
    if not found:
        return "does not resolve"
    if all(ipaddress.ip_address(address).is_loopback for address in found):
        return f"leads to loopback ({found[0]})"
    own = {one.ipv4.partition("/")[0] for one in facts[name].interfaces if one.ipv4} if name in facts else set()
    seen = {facts[name].ssh_address} if name in facts else set()
    if own and not own & set(found) and not seen & set(found):
        return f"leads to {found[0]}, which is not {name}"
    return None


def _name_finding(host: str, name: str, wrong: str, facts: Mapping[str, Facts]) -> Finding:
    address = facts[name].ssh_address if name in facts else "ADDRESS"
    edit = f"sed -i '/[[:space:]]{name}$/d; $ a {address} {name}' /etc/hosts"
    return Finding(
        host=host,
        check="names",
        level="warn",
        saw=f"{'its own name' if name == host else name} {wrong} there",
        wanted=f"{name} leads to {address}; llmtrain does without names, other programs do not",
        fix=f'ssh -- {host} "{edit}"',
    )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def judge_shared(facts: Mapping[str, Facts], sights: Mapping[str, Sight]) -> list[Finding]:
    """Hosts that see each other's marks have one working folder."""
    machines = {host: item.boot_id for host, item in facts.items()}
    findings = []
    for host, sight in sights.items():
        others = [other for other in sight.marks if machines.get(other) != machines.get(host)]
        if others:
            findings.append(
                Finding(
                    host=host,
                    check="shared-dir",
                    level="fail",
                    saw=f"{facts[host].node_dir} is one folder with {', '.join(others[:3])}",
                    wanted="a working folder of its own for every host",
                    fix="set node_dir: in the run file to a folder on a local disk",
                )
            )
    return findings


def judge_mtu(facts: Mapping[str, Facts], links: Mapping[str, Link], sights: Mapping[str, Sight]) -> list[Finding]:
    """Interfaces set differently, and paths that lose what the interface would send."""
    sizes = {host: _mtu(facts[host], links[host]) for host in links if host in facts}
    findings = [
        Finding(
            host=host,
            check="mtu",
            level="warn",
            saw=f"{links[host].interface} has MTU {have}",
            wanted=f"MTU {wanted}, as on most hosts",
            fix=f"ssh -- {host} ip link set {links[host].interface} mtu {wanted}",
        )
        for host, have, wanted in odd_ones(sizes)
    ]
    for host, sight in sights.items():
        lost = [peer for peer, seen in sight.pings.items() if seen["small"] and not seen["large"]]
        alike = [peer for peer in lost if sizes.get(peer) == sizes.get(host)]
        if alike:
            findings.append(_path_finding(host, alike, links[host], sizes[host]))
    return findings


def _path_finding(host: str, lost: Sequence[str], link: Link, size: int | None) -> Finding:
    return Finding(
        host=host,
        check="mtu",
        level="warn",
        saw=f"small packets reach {', '.join(lost)}, those of {size} bytes do not",
        wanted="every switch on the way passes what the interface sends (large transfers hang otherwise)",
        fix=f"ssh -- {host} ip link set {link.interface} mtu 1400  # or raise it on the switch",
    )


def _mtu(item: Facts, link: Link) -> int | None:
    return next((one.mtu for one in item.interfaces if one.name == link.interface), None)
