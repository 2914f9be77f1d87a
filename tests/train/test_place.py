from __future__ import annotations

import pytest

from llmtrain.train.place import WorldSizeError, parse_place

RIGHT = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}


def test_place_of_a_rank():
    """Rank, local rank and world size come from the launcher's variables."""
    place = parse_place(RIGHT, 4)
    assert (place.rank, place.local_rank, place.world_size) == (3, 1, 4)
    assert (place.is_first, place.is_first_on_host) == (False, False)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"WORLD_SIZE": "2"}, "started 2 ranks, but the run was planned for 4"),
        ({"RANK": "4"}, "rank 4 does not exist"),
        ({"RANK": "x"}, "must be numbers"),
        ({"LOCAL_RANK": ""}, "must be numbers"),
    ],
)
def test_contradictions(change, said):
    """A launch that contradicts the plan is refused."""
    with pytest.raises(WorldSizeError, match=said):
        parse_place({**RIGHT, **change}, 4)


def test_no_launcher():
    """Without the launcher's variables the missing one is named."""
    with pytest.raises(WorldSizeError, match="RANK"):
        parse_place({}, 1)
