"""The switch, the cables, and what is wrong with them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from typing import TYPE_CHECKING

from tests.lab.model import NICS, LabError, LabOptions, address, mac, port
from tests.lab.proc import Identity, namespace

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.lab.state import Faults

# A bucket larger than the 64 KiB the kernel sends at once: these would be cut into packets, at a cost of cores that
# real cards do not take; a few milliseconds of the rate where that is more.
BURST_BYTES = 72 << 10
START_S = 10.0


def in_net(pid: int, argv: Iterable[str], text: str | None = None) -> str:
    """Run a program of this machine in the network namespace of a process."""
    command = ["nsenter", "-t", str(pid), "-n", "--", *argv]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LabError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}\n{text or ''}")
    return done.stdout


def ip(pid: int, *lines: str) -> None:
    """Several `ip` commands in one process."""
    in_net(pid, ["ip", "-batch", "-"], "\n".join(lines) + "\n")


def start_switch(ttl_s: int) -> tuple[subprocess.Popen[bytes], Identity]:
    """A process that holds the switch's network namespace, and the first bridge in it."""
    argv = ["unshare", "--net", "sleep", str(ttl_s)]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    holder = subprocess.Popen(argv, **streams, start_new_session=True)
    identity = Identity.of(holder.pid)
    deadline = time.monotonic() + START_S
    while namespace(holder.pid, "net") in {None, namespace(os.getpid(), "net")}:
        if holder.poll() is not None or time.monotonic() > deadline:
            raise LabError("the switch did not start: is this user allowed to make network namespaces?")
        time.sleep(0.001)
    ip(holder.pid, "link add br0 type bridge", "link set br0 up")
    return holder, identity


def parse_pair(key: str) -> tuple[str, str]:
    """Two hosts, or a host and its nic, out of a fault's key."""
    first, _, second = key.partition("/")
    return first, second


def render_port_rules(faults: Faults, hosts: list[str], nics: tuple[str, ...]) -> str:
    """The switch's nftables rules: losses and cuts between two hosts, on the ports of the hosts that are on."""
    chains: dict[tuple[str, str], list[str]] = {}
    for nic in nics:
        for host, percent in faults.of("loss").items():
            rule = f"numgen random mod 100 < {percent} drop"
            if host in hosts:
                chains.setdefault((port(host, nic), "ingress"), []).append(rule)
                chains.setdefault((port(host, nic), "egress"), []).append(rule)
        for pair in map(parse_pair, faults.of("pair")):
            for source, target in (pair, pair[::-1]):
                if source in hosts:
                    chains.setdefault((port(source, nic), "ingress"), []).append(f"ether daddr {mac(target, nic)} drop")
    body = "".join(
        f'chain {name}_{hook} {{ type filter hook {hook} device "{name}" priority 0; {"; ".join(rules)}; }}\n'
        for (name, hook), rules in chains.items()
    )
    return f"add table netdev lab\ndelete table netdev lab\ntable netdev lab {{\n{body}}}\n"


def render_firewall(ports: Iterable[int | str]) -> str:
    """A host's nftables rules: inbound only these TCP ports (numbers, or ranges like 20000-20100), and replies."""
    accept = f"tcp dport {{ {', '.join(map(str, ports))} }} accept;" if ports else ""
    return (
        "add table inet firewall\ndelete table inet firewall\n"
        "table inet firewall {\nchain inbound { type filter hook input priority 0; policy drop; "
        'iif "lo" accept; ct state established,related accept; meta l4proto { icmp, ipv6-icmp } accept; '
        f"{accept} }}\n}}\n"
    )


def set_firewall(pid: int, ports: list[int | str] | None) -> None:
    """Put up the host's firewall, or take it away (None)."""
    clear = "add table inet firewall\ndelete table inet firewall\n"
    in_net(pid, ["nft", "-f", "-"], clear if ports is None else render_firewall(ports))


def set_docker0(pid: int, *, on: bool) -> None:
    """A bridge as Docker leaves it on every machine, with the same address everywhere."""
    if on:
        ip(pid, "link add docker0 type bridge", "addr add 172.17.0.1/16 dev docker0", "link set docker0 up")
    else:
        ip(pid, "link del docker0")


class Wires:
    """Brings the cables to the state that the faults describe."""

    def __init__(self, switch: int, options: LabOptions, faults: Faults) -> None:
        self.switch, self.options, self.faults = switch, options, faults

    @property
    def nics(self) -> tuple[str, ...]:
        """The nics that every host has now."""
        both = self.options.second_network or self.faults.has("second_network", "lab")
        return NICS if both else NICS[:1]

    def plug(self, host: str, pid: int, nic: str) -> None:
        """Connect a host that has just booted."""
        name = port(host, nic)
        ip(
            self.switch,
            f"link add {name} type veth peer name {nic} address {mac(host, nic)} netns {pid}",
            f"link set {name} master br{NICS.index(nic)} up",
        )
        ip(pid, "link set lo up", f"addr add {address(self.options, host, nic)}/24 dev {nic}", f"link set {nic} up")

    def unplug(self, host: str) -> None:
        """Take the cables out, at the switch; the host has no chance to say goodbye."""
        ip(self.switch, *(f"link set {port(host, nic)} down" for nic in self.nics))

    def discard(self, host: str) -> None:
        """Throw away the cables of a host that is off; the kernel may not have done so yet."""
        for nic in self.nics:
            with contextlib.suppress(LabError):
                ip(self.switch, f"link del {port(host, nic)}")

    def repair(self, host: str, pid: int) -> None:
        """Make this host's cables what the faults say."""
        lines = []
        for nic in self.nics:
            name = port(host, nic)
            lines.append(f"link set {name} {'down' if self._is('cut', host, nic) else 'up'}")
            black = self._is("blackhole", host, nic)
            lines.append(f"link set {name} nomaster" if black else f"link set {name} master br{NICS.index(nic)}")
        ip(self.switch, *lines)
        for nic in self.nics:
            rate = self.faults.of("rate").get(f"{host}/{nic}")
            shape(self.switch, port(host, nic), rate)
            shape(pid, nic, rate)

    def filter(self, hosts: list[str]) -> None:
        """Make the switch drop what the faults say; `hosts` are those that are on."""
        in_net(self.switch, ["nft", "-f", "-"], render_port_rules(self.faults, hosts, self.nics))

    def add_second(self, pids: dict[str, int]) -> None:
        """Give every host an eth1 on a bridge of its own."""
        ip(self.switch, "link add br1 type bridge", "link set br1 up")
        for host, pid in pids.items():
            self.plug(host, pid, "eth1")

    def remove_second(self, pids: dict[str, int]) -> None:
        """Remove eth1 everywhere."""
        ip(self.switch, *(f"link del {port(host, 'eth1')}" for host in pids), "link del br1")

    def _is(self, kind: str, host: str, nic: str) -> bool:
        return self.faults.has(kind, f"{host}/*") or self.faults.has(kind, f"{host}/{nic}")


def shape(pid: int, nic: str, rate: str | None) -> None:
    """Limit what leaves through a nic, or not (None)."""
    if rate is not None:
        bucket = ("tbf", "rate", rate, "burst", str(BURST_BYTES), "latency", "100ms")
        in_net(pid, ["tc", "qdisc", "replace", "dev", nic, "root", *bucket])
        return
    with contextlib.suppress(LabError):  # nothing to delete: not shaped
        in_net(pid, ["tc", "qdisc", "del", "dev", nic, "root"])
