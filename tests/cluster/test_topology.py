"""Links between the accelerators inside a host."""

from __future__ import annotations

import pytest

from llmtrain.cluster.checks.topology import describe_links, judge_topology


def whole(count, link):
    """All pairs linked alike."""
    names = [f"GPU{number}" for number in range(count)]
    return {(one, other): link for one in names for other in names if one != other}


MIXED = {**whole(4, "SYS"), **{(f"GPU{a}", f"GPU{b}"): "NV4" for a, b in ((0, 1), (1, 0), (2, 3), (3, 2))}}


@pytest.mark.parametrize(
    ("links", "said"),
    [
        (whole(8, "NV18"), "NV18 between all 8"),
        (MIXED, "NV4 2 pairs, SYS 4 pairs"),
        (whole(2, "PHB"), "PHB between all 2"),
    ],
)
def test_links_are_counted_by_pair(links, said):
    """Each pair counts once, although the matrix names it twice; NVLinks come first."""
    assert describe_links(links) == said


def test_the_odd_host_is_named():
    """A host that lost NVLinks is a warning with what it has and what most have; equal hosts, and none, are none."""
    found = judge_topology({"a": whole(4, "NV4"), "b": MIXED, "c": whole(4, "NV4")})
    assert [(one.host, one.check, one.level, one.saw) for one in found] == [
        ("b", "links", "warn", "accelerators inside: NV4 2 pairs, SYS 4 pairs")
    ]
    assert "NV4 between all 4" in found[0].wanted
    assert judge_topology({"a": whole(4, "NV4"), "b": whole(4, "NV4"), "c": {}}) == []
