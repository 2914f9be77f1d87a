"""The values of a lab: options, names, addresses, errors."""

from __future__ import annotations

from dataclasses import dataclass

HEAD = "head"
HEAD_INDEX = 254
MAX_NODES = 200
NICS = ("eth0", "eth1")
"""eth0 is the named network, eth1 the unnamed second one."""


class LabError(Exception):
    """The lab cannot do what was asked."""


class CommandFailedError(LabError):
    """A command on a host ended with an error or ran out of time; `returncode` is None then."""

    def __init__(self, host: str, argv: list[str], returncode: int | None, stdout: str, stderr: str) -> None:
        self.host, self.argv, self.returncode, self.stdout, self.stderr = host, argv, returncode, stdout, stderr
        ending = "ran out of time" if returncode is None else f"exit {returncode}"
        super().__init__(f"{host}: {argv} {ending}\nstdout: {stdout[-2000:]}\nstderr: {stderr[-2000:]}")


@dataclass(frozen=True, kw_only=True)
class LabOptions:
    """What the hosts of a lab are like from the start."""

    network: str = "10.77.0"
    """First three numbers of the named /24 network; nodeN is .N, the head .254."""
    second: str = "10.78.0"
    """The same for the second network, which /etc/hosts does not name."""
    second_network: bool = False
    """Whether eth1 on the second network exists from the start."""
    docker0: bool = False
    """Whether each host has the bridge docker0 with the same 172.17.0.1."""
    loopback_name: bool = False
    """Whether each host maps its own name to 127.0.1.1, as Debian's installer does."""
    shares: tuple[str, ...] = ()
    """Absolute paths of this machine, bound read-only at the same path in each host."""
    head_shares: tuple[str, ...] = ()
    """The same for the head alone."""
    private_copies: tuple[tuple[str, str], ...] = ()
    """(directory here, path in each host): a writable copy of its own for each host."""
    shm_mb: int = 256
    """Size of /dev/shm in MiB."""
    ttl_s: int = 14400
    """Seconds until a host or the switch turns itself off."""


def host_names(nodes: int) -> list[str]:
    """`["head", "node1", ...]`."""
    if not 1 <= nodes <= MAX_NODES:
        raise LabError(f"a lab has 1 to {MAX_NODES} nodes, not {nodes}")
    return [HEAD, *(f"node{i}" for i in range(1, nodes + 1))]


def host_index(name: str) -> int:
    """The last number of the host's addresses."""
    return HEAD_INDEX if name == HEAD else int(name.removeprefix("node"))


def address(options: LabOptions, name: str, nic: str = "eth0") -> str:
    """The host's IPv4 address on that network."""
    return f"{options.network if nic == 'eth0' else options.second}.{host_index(name)}"


def mac(name: str, nic: str) -> str:
    """The same at every boot, so that rules on the switch can name a host by it."""
    return f"02:4c:42:00:{NICS.index(nic):02x}:{host_index(name):02x}"


def port(name: str, nic: str) -> str:
    """The switch's end of the cable."""
    return f"{'pq'[NICS.index(nic)]}{host_index(name)}"
