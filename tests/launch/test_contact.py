"""The network of the ranks: measured on the lab, overridden by the user, never a container's."""

from __future__ import annotations

import pytest
from tests.launch.launchlab import RUN_FILE


@pytest.fixture(scope="module")
def two(launch_lab):
    """A working folder for runs over two hosts."""
    return launch_lab.folder("/root/networks", hosts="node1 node2")


def choose(launch_lab, folder, *more):
    """Host -> (interface, address) that a launch there would use, and the reason."""
    run = launch_lab.launch(folder, "--dry-run", "--json", *more)
    assert run.wait() == 0, run.err
    reason = next(choice["reason"] for choice in run.json["choices"] if choice["key"] == "network")
    return {host["name"]: (host["interface"], host["address"]) for host in run.json["hosts"]}, reason


def test_unnamed_fast_network_beats_the_slow_one_that_names_lead_to(launch_lab, two):
    """Where host names resolve to a slow network and a fast one has no name, the fast one is measured and taken."""
    launch_lab.lab.rate("node1", "50mbit", nic="eth0")
    chosen, reason = choose(launch_lab, two)
    assert chosen == {"node1": ("eth1", "10.78.0.1"), "node2": ("eth1", "10.78.0.2")}
    assert reason.startswith("10.78.0.0/24")
    assert "others: 10.77.0.0/24" in reason


def test_named_network_is_taken_where_it_is_the_fast_one(launch_lab, two):
    """The other way round the named network is taken."""
    launch_lab.lab.rate("node2", "50mbit", nic="eth1")
    assert choose(launch_lab, two)[0] == {"node1": ("eth0", "10.77.0.1"), "node2": ("eth0", "10.77.0.2")}


def test_network_that_carries_nothing_is_not_taken(launch_lab, two):
    """A network whose link looks up but loses everything is not chosen."""
    launch_lab.lab.blackhole("node2", nic="eth1")
    assert choose(launch_lab, two)[0]["node2"] == ("eth0", "10.77.0.2")


@pytest.mark.parametrize("network", ["10.77.0.0/24", "eth0"])
def test_network_of_the_run_file_overrides(launch_lab, two, network):
    """`network:` as a subnet or as an interface wins over what would be chosen."""
    launch_lab.lab.rate("node1", "50mbit", nic="eth0")
    chosen, reason = choose(launch_lab, two, "--set", f"network={network}")
    assert chosen == {"node1": ("eth0", "10.77.0.1"), "node2": ("eth0", "10.77.0.2")}
    assert reason == "as the run file's network says"


def test_ranks_are_told_the_exact_interface(launch_lab, two):
    """NCCL gets the exact form of the interface, Gloo the plain one, and host 0's address there is the master's."""
    run = launch_lab.launch(two, "--dry-run", "--json", "--set", "network=eth1")
    assert run.wait() == 0, run.err
    environ = run.json["hosts"][0]["env"]
    assert (environ["NCCL_SOCKET_IFNAME"], environ["GLOO_SOCKET_IFNAME"]) == ("=eth1", "eth1")
    assert run.json["master"].startswith("10.78.0.1:")


def test_loopback_and_alien_networks_are_refused(launch_lab):
    """Loopback among several hosts, and a network that a host lacks, are refused with code 4 and the interfaces."""
    folder = launch_lab.folder("/root/loopback", hosts="node1 node2", run=f"{RUN_FILE}network: lo\n")
    run = launch_lab.launch(folder, "--json")
    assert run.wait() == 4
    assert "loopback" in run.json["error"]
    run = launch_lab.launch(folder, "--json", "--set", "network=192.0.2.0/24")
    assert run.wait() == 4
    assert "eth0 10.77.0.1/24" in run.json["fix"]
