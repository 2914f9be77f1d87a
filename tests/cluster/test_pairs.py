from __future__ import annotations

import pytest

from llmtrain.cluster.checks.links import judge_links
from llmtrain.cluster.pairs import MAX_ROUNDS, PairResult, plan_rounds


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 16, 29])
def test_every_pair_is_measured_once_each_way_and_no_link_is_shared(count):
    """In a round each host takes part once at most; together the rounds hold every ordered pair once."""
    names = [f"n{number}" for number in range(count)]
    rounds = plan_rounds(names)
    for pairs in rounds:
        busy = [name for pair in pairs for name in pair]
        assert len(busy) == len(set(busy))
        assert len(busy) >= count - 1
    done = [pair for pairs in rounds for pair in pairs]
    assert len(done) == len(set(done)) == count * (count - 1)


def test_large_clusters_are_measured_in_a_bounded_number_of_rounds():
    """A hundred hosts are each measured against some others, not against all."""
    rounds = plan_rounds([f"n{number}" for number in range(100)])
    assert len(rounds) == 2 * MAX_ROUNDS


def results(rates, loss=()):
    """All pairs between hosts of these rates."""
    return [
        PairResult(
            sender=a,
            receiver=b,
            mbits=min(rates[a], rates[b]),
            latency_ms=0.1,
            loss=0.05 if {a, b} & set(loss) or (a, b) in loss else 0.0,
        )
        for a in rates
        for b in rates
        if a != b
    ]


def test_equal_links_give_nothing():
    """No finding among equals, nor for two hosts, nor where one is merely slower than the others."""
    assert judge_links(results(dict.fromkeys("abcd", 940.0))) == []
    assert judge_links(results(dict.fromkeys("ab", 10.0))) == []
    assert judge_links(results({"a": 940.0, "b": 940.0, "c": 500.0})) == []
    assert judge_links([]) == []


def test_a_host_at_a_tenth_of_its_siblings_is_found():
    """The slow host is named once, not each of its pairs."""
    (finding,) = judge_links(results({"a": 9400.0, "b": 9400.0, "c": 940.0 / 2, "d": 9400.0}))
    assert (finding.host, finding.level) == ("c", "warn")


def test_loss_of_a_host_and_of_a_pair():
    """A host whose every link loses packets is one finding; a single lossy pair is named by itself."""
    rates = dict.fromkeys("abcd", 940.0)
    (finding,) = judge_links(results(rates, loss=("b",)))
    assert finding.host == "b"
    (finding,) = judge_links(results(rates, loss=(("a", "c"),)))
    assert (finding.host, "c" in finding.saw) == ("a", True)


def test_a_slow_pair_of_fast_hosts_is_found():
    """One bad path between hosts that are fast to others is named with both."""
    rates = dict.fromkeys("abcd", 940.0)
    pairs = [
        PairResult(sender=one.sender, receiver=one.receiver, mbits=20.0, latency_ms=0.1, loss=0.0)
        if (one.sender, one.receiver) == ("a", "d")
        else one
        for one in results(rates)
    ]
    (finding,) = judge_links(pairs)
    assert (finding.host, "to d" in finding.saw) == ("a", True)
