from __future__ import annotations

import pytest
from tests.cluster.hosts import make_facts, make_interface

from llmtrain.cluster.network import choose_network, shared_subnets
from llmtrain.errors import PreflightError


def _hosts(*lists):
    return [make_facts(f"gpu{i}", i, interfaces=tuple(items)) for i, items in enumerate(lists, start=1)]


def _two(make):
    return _hosts(*[[make_interface("lo", "127.0.0.1/8"), *make(i)] for i in (1, 2)])


def _chosen(facts, wanted=None, measured=None):
    choice = choose_network(facts, wanted or {item.host: None for item in facts}, measured)
    return {host: (link.interface, link.address) for host, link in choice.links.items()}, choice.reason


def test_measured_speed_beats_reported_speed():
    """A network that is measured to be faster wins over the one that SSH uses and over what drivers report."""
    facts = _two(
        lambda i: [make_interface("eth0", f"10.0.0.{i}/24"), make_interface("eth1", f"10.1.0.{i}/24", speed_mbits=None)]
    )
    links, reason = _chosen(facts, measured={"10.0.0.0/24": 95.0, "10.1.0.0/24": 9000.0})
    assert links == {"gpu1": ("eth1", "10.1.0.1"), "gpu2": ("eth1", "10.1.0.2")}
    assert "9000 Mbit/s measured" in reason
    assert "network: overrides" in reason


def test_reported_speed_decides_without_a_measurement():
    """Without a measurement the slowest host's reported link speed decides."""
    facts = _two(
        lambda i: [make_interface("eth0", f"10.0.0.{i}/24", speed_mbits=1000), make_interface("ens3", f"10.2.0.{i}/16")]
    )
    assert _chosen(facts)[0]["gpu1"][0] == "ens3"


def test_rdma_wins():
    """An RDMA interface wins over one that is measured faster over TCP."""
    facts = _two(
        lambda i: [make_interface("eth0", f"10.0.0.{i}/24"), make_interface("ib0", f"10.3.0.{i}/24", rdma=True)]
    )
    assert _chosen(facts, measured={"10.0.0.0/24": 9000.0, "10.3.0.0/24": 5000.0})[0]["gpu2"][0] == "ib0"


def test_a_network_that_lets_nothing_through_comes_last():
    """A subnet over which no byte arrived is not taken, RDMA or not."""
    facts = _two(
        lambda i: [make_interface("eth0", f"10.0.0.{i}/24"), make_interface("ib0", f"10.3.0.{i}/24", rdma=True)]
    )
    assert _chosen(facts, measured={"10.0.0.0/24": 900.0, "10.3.0.0/24": 0.0})[0]["gpu2"][0] == "eth0"


@pytest.mark.parametrize("name", ["docker0", "virbr0", "br-1a2b", "cni0", "flannel.1", "veth12"])
def test_container_networks_are_never_candidates(name):
    """Bridges and interfaces of container engines carry no traffic between hosts, whatever their speed."""
    facts = _two(
        lambda i: [
            make_interface("eth0", f"10.0.0.{i}/24"),
            make_interface(name, f"172.18.0.{i}/16", speed_mbits=99999),
        ]
    )
    assert list(shared_subnets(facts)) == ["10.0.0.0/24"]


def test_an_address_that_two_hosts_share_is_never_taken():
    """docker0 has the same address on every host, under whatever name."""
    facts = _two(lambda i: [make_interface("eth0", f"10.0.0.{i}/24"), make_interface("lan", "172.17.0.1/16")])
    assert list(shared_subnets(facts)) == ["10.0.0.0/24"]


def test_interfaces_may_be_named_differently():
    """Each host uses its own interface in the common subnet."""
    facts = _hosts([make_interface("eth0", "10.0.0.1/24")], [make_interface("enp5s0", "10.0.0.2/24")])
    assert _chosen(facts)[0] == {"gpu1": ("eth0", "10.0.0.1"), "gpu2": ("enp5s0", "10.0.0.2")}


def test_routed_hosts_use_the_interface_of_ssh():
    """Without a common subnet each host uses the interface on which SSH arrives."""
    facts = [
        make_facts("a", 1, interfaces=(make_interface("eth0", "10.0.0.1/24"),), ssh_address="10.0.0.1"),
        make_facts("b", 2, interfaces=(make_interface("eth0", "10.9.0.2/24"),), ssh_address="10.9.0.2"),
    ]
    links, reason = _chosen(facts)
    assert links == {"a": ("eth0", "10.0.0.1"), "b": ("eth0", "10.9.0.2")}
    assert "no subnet is common" in reason


def test_no_way_between_hosts_is_refused():
    """Without a common subnet and without a usable interface of SSH there is one error that names the interfaces."""
    facts = [
        make_facts("a", 1, interfaces=(make_interface("eth0", "10.0.0.1/24"),), ssh_address="192.0.2.9"),
        make_facts("b", 2, interfaces=(make_interface("eth0", "10.9.0.2/24"),), ssh_address="10.9.0.2"),
    ]
    with pytest.raises(PreflightError) as caught:
        _chosen(facts)
    assert caught.value.where == "a"
    assert "eth0 10.0.0.1/24" in caught.value.fix


def test_the_users_word_holds():
    """network: takes a subnet or an interface, per host where hosts differ."""
    facts = _two(
        lambda i: [make_interface("eth0", f"10.0.0.{i}/24"), make_interface("slow", f"10.7.0.{i}/24", speed_mbits=10)]
    )
    assert _chosen(facts, {"gpu1": "10.7.0.0/24", "gpu2": "slow"})[0]["gpu2"] == ("slow", "10.7.0.2")


@pytest.mark.parametrize(
    ("wanted", "words"), [("ib0", "no interface"), ("192.0.2.0/24", "no interface"), ("lo", "loopback")]
)
def test_a_network_that_cannot_serve_is_refused(wanted, words):
    """A wanted network that a host lacks, or that is loopback among several hosts, is refused."""
    facts = _two(lambda i: [make_interface("eth0", f"10.0.0.{i}/24")])
    with pytest.raises(PreflightError, match=words):
        _chosen(facts, {"gpu1": wanted, "gpu2": wanted})


def test_one_local_host_uses_loopback():
    """A run on this machine alone needs no network."""
    links, _ = _chosen([make_facts("localhost", 1, ssh_address="-")])
    assert links == {"localhost": ("lo", "127.0.0.1")}


def test_interfaces_that_are_down_or_link_local_are_left_out():
    """An interface without a carrier, or with a self-assigned address, is no candidate."""
    facts = _two(
        lambda i: [
            make_interface("eth0", f"10.0.0.{i}/24"),
            make_interface("eth1", f"10.1.0.{i}/24", up=False),
            make_interface("usb0", f"169.254.0.{i}/16"),
        ]
    )
    assert list(shared_subnets(facts)) == ["10.0.0.0/24"]
