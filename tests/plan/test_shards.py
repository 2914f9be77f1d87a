from __future__ import annotations

import json
from itertools import pairwise

import pytest

from llmtrain.errors import UsageError
from llmtrain.plan.setup import Setup
from llmtrain.plan.shape import plan_shape
from llmtrain.plan.shards import Placement, find_parameter, map_json, plan_links, tensor_rows
from llmtrain.report.page import render_page
from llmtrain.report.placement import lead_sentence
from llmtrain.spec.hostfile import Cluster, Host

SHAPE = plan_shape(
    {
        "model_type": "llama",
        "vocab_size": 97,
        "hidden_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 37,
    },
    name="tiny",
)


def place(stage, hosts=2, slots=3):
    """A placement over some hosts."""
    cluster = Cluster(hosts=tuple(Host(name=f"n{i}", slots=tuple(range(slots))) for i in range(hosts)), origin="test")
    setup = Setup(stage=stage, ranks=hosts * slots, slots=slots, micro=1, accumulation=2, length=8, persist=30)
    return Placement(shape=SHAPE, setup=setup, cluster=cluster)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_states_are_divided_without_gap_or_overlap(stage):
    """The ranks' parts of every tensor join into the whole tensor."""
    placement = place(stage)
    parts = {item.name: [] for item in SHAPE.parameters}
    for rank in range(placement.setup.ranks):
        for piece in placement.state_slices(rank):
            if piece.first < piece.last:
                parts[piece.parameter.name].append((piece.first, piece.last))
    for item in SHAPE.parameters:
        ends = sorted(parts[item.name])
        assert ends[0][0] == 0
        assert ends[-1][1] == item.numel
        assert all(left[1] == right[0] for left, right in pairwise(ends))


def test_zero3_cuts_every_tensor():
    """In stage 3 every rank holds a slice of every tensor that has enough numbers."""
    placement = place(3)
    for rank in range(6):
        assert len(placement.state_slices(rank)) == len(SHAPE.parameters)


def test_links_follow_the_ring():
    """Only neighbours exchange data, and the ring closes."""
    matrix = plan_links(place(3, hosts=4))
    assert all((matrix[i][j] > 0) == (j in (i, (i + 1) % 4)) for i in range(4) for j in range(4))


def test_layers_are_folded():
    """Equal layers are drawn once, with their number."""
    rows = tensor_rows(place(3))
    assert {row["times"] for row in rows if row["layer"] is not None} == {3}
    assert sum(row["numel"] * row["times"] for row in rows) == SHAPE.total


def test_finds_a_tensor_by_part_of_its_name():
    """A unique part of a name is enough; one of several is refused with examples."""
    assert find_parameter(SHAPE, "layers.1.mlp.up_proj").name == "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(UsageError):
        find_parameter(SHAPE, "up_proj")


def test_leads_with_what_people_get_wrong():
    """The first sentence of a stage 3 map says that no layer lives on a GPU."""
    assert "No layer lives on a GPU" in lead_sentence(place(3))


def test_page_cannot_be_broken_by_names():
    """A name that would end a script element stays text."""
    document = map_json(place(3))
    document["model"]["name"] = "</script><b>x"
    text = render_page(document, {})
    assert "</script><b>x" not in text
    assert text.count("</script>") == 1


def test_page_needs_nothing_else():
    """The page loads no other file and asks no network."""
    text = render_page(map_json(place(3)), {})
    assert "http://" not in text
    assert "https://" not in text
    assert "src=" not in text


def test_map_is_plain_data():
    """The map can be written as JSON at any stage."""
    for stage in (0, 1, 2, 3):
        assert json.loads(json.dumps(map_json(place(stage))))["stage"] == stage
