"""Who can be fed how, and that the key of an SSH hop opens one port and nothing else."""

from __future__ import annotations

import pytest

from llmtrain.sync import hop
from llmtrain.sync.request import SOURCE
from llmtrain.sync.ways import Reach, choose_ways, render_ways

HOSTS = ("a", "b", "c")
ALL = {
    "a": Reach(tls=(SOURCE,), ssh=()),
    "b": Reach(tls=(SOURCE, "a"), ssh=("a",)),
    "c": Reach(tls=(SOURCE, "b", "a"), ssh=("b", "a")),
}
SSH_ONLY = {
    "a": Reach(tls=(), ssh=()),
    "b": Reach(tls=(), ssh=("a",)),
    "c": Reach(tls=(), ssh=("b", "a")),
}
APART = {host: Reach(tls=(), ssh=()) for host in HOSTS}


@pytest.mark.parametrize(
    ("reach", "wanted", "chain", "direct", "star"),
    [
        (ALL, "auto", HOSTS, (), ()),
        (ALL, "tls", HOSTS, (), ()),
        (ALL, "ssh-hop", HOSTS, (), ()),
        (ALL, "star", (), (), HOSTS),
        (SSH_ONLY, "auto", HOSTS, (), ()),
        (SSH_ONLY, "tls", (), (), HOSTS),
        (APART, "auto", ("a",), (), ("b", "c")),
        ({**ALL, "b": Reach(tls=(SOURCE,), ssh=())}, "auto", ("a", "c"), ("b",), ()),
    ],
)
def test_every_host_is_fed_by_the_best_way_it_has(reach, wanted, chain, direct, star):
    """A chain wherever a host before answers, by TLS or by sshd; the source, then the head's SSH, for the others."""
    ways = choose_ways(HOSTS, reach, wanted)
    assert (ways.chain, ways.direct, ways.star) == (chain, direct, star)


def test_a_port_that_is_open_is_used_before_ssh():
    """Hops are only for pairs whose ports are closed to each other, or where they are asked for."""
    assert not choose_ways(HOSTS, ALL, "auto").hopping
    assert choose_ways(HOSTS, ALL, "ssh-hop").hops["c"] == ("a", "b")
    mixed = choose_ways(HOSTS, {**SSH_ONLY, "c": Reach(tls=("b",), ssh=("b", "a"))}, "auto")
    assert (mixed.hops["c"], mixed.away) == (("a",), frozenset(HOSTS))


def test_what_costs_more_than_one_copy_is_said_with_the_figures():
    """The number of copies, their bytes and the remedy; nothing where nothing is wrong."""
    assert render_ways(choose_ways(HOSTS, ALL, "auto"), (20000, 29999), 10**9) == ""
    text = render_ways(choose_ways(HOSTS, APART, "auto"), (20000, 29999), 10**9)
    assert "3 copies (3.00 GB) leave the source through SSH, instead of one (1.00 GB)" in text


def test_the_key_of_a_hop_is_bound_and_leaves_with_its_sync(tmp_path, monkeypatch):
    """One port, no command, from hosts of the sync, for a day; other keys stay, lines of crashed syncs go."""
    monkeypatch.setenv("HOME", str(tmp_path))
    keys = tmp_path / ".ssh/authorized_keys"
    keys.parent.mkdir()
    keys.write_text("ssh-ed25519 AAAA me@home\nssh-ed25519 BBBB llmtrain-hop-dead-1000000000\n")
    hop.allow("ssh-ed25519 CCCC", ["10.0.0.2", "10.0.0.1"], "10.0.0.3:20001", "cafe")
    mine, line = keys.read_text().splitlines()
    assert mine == "ssh-ed25519 AAAA me@home"
    for part in ("restrict", 'permitopen="10.0.0.3:20001"', 'command="/bin/false"', 'from="10.0.0.1,10.0.0.2"'):
        assert part in line
    hop.forbid("cafe")
    assert keys.read_text() == "ssh-ed25519 AAAA me@home\n"
