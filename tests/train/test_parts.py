"""How parts of ranks make parameters again."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtrain.errors import InputFileError
from llmtrain.train.assemble import match_names
from llmtrain.train.shards import Layout, locate

SHAPES = st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=3), min_size=1, max_size=8)


def name_groups(shapes, groups):
    """Parameters dealt to groups in turn."""
    named = [(f"p{number}", shape) for number, shape in enumerate(shapes)]
    return [named[at::groups] for at in range(groups)]


def read(pieces, parts):
    """The numbers of a parameter."""
    return [number for piece in pieces for number in parts[piece.rank][piece.start : piece.start + piece.count]]


@given(shapes=SHAPES, ranks=st.integers(1, 5), groups=st.integers(1, 2))
def test_stage_3_cuts_every_parameter(shapes, ranks, groups):
    """Each parameter is padded and cut over all ranks; put together in order, the numbers are those it had."""
    named = name_groups(shapes, groups)
    layout = Layout(stage=3, ranks=ranks, groups=named, paddings=None, shared={})
    parts = {rank: [] for rank in range(ranks)}
    wanted = {}
    for name, shape in (entry for group in named for entry in group):
        share = -(-math.prod(shape) // ranks)
        wanted[name] = [(name, at) for at in range(math.prod(shape))]
        padded = wanted[name] + [None] * (share * ranks - math.prod(shape))
        for rank in range(ranks):
            parts[rank] += padded[rank * share : (rank + 1) * share]
    where = locate(layout, {rank: [len(numbers)] for rank, numbers in parts.items()})
    assert {name: read(pieces, parts) for name, pieces in where.items()} == wanted


@given(shapes=SHAPES, ranks=st.integers(1, 5), groups=st.integers(1, 2), padding=st.integers(0, 3))
def test_stages_1_and_2_cut_a_vector_for_each_group(shapes, ranks, groups, padding):
    """Parameters lie end to end, each with its padding, and the whole is padded and cut over the ranks."""
    named = name_groups(shapes, groups)
    paddings = [[padding] * len(group) for group in named]
    layout = Layout(stage=2, ranks=ranks, groups=named, paddings=paddings, shared={})
    parts, sizes, wanted = {rank: [] for rank in range(ranks)}, {rank: [] for rank in range(ranks)}, {}
    for group in named:
        vector = []
        for name, shape in group:
            wanted[name] = [(name, at) for at in range(math.prod(shape))]
            vector += wanted[name] + [None] * padding
        share = -(-len(vector) // ranks)
        vector += [None] * (share * ranks - len(vector))
        for rank in range(ranks):
            parts[rank] += vector[rank * share : (rank + 1) * share]
            sizes[rank].append(share)
    where = locate(layout, sizes)
    assert {name: read(pieces, parts) for name, pieces in where.items()} == wanted


def test_parts_that_are_missing_or_odd_are_refused():
    """A rank's part that is not there, or is longer than the parameters, is no checkpoint to export."""
    layout = Layout(stage=3, ranks=2, groups=[[("w", [4])]], paddings=None, shared={})
    with pytest.raises(InputFileError, match=r"ranks \[1\] are missing"):
        locate(layout, {0: [2]})
    with pytest.raises(InputFileError, match="do not add up"):
        locate(layout, {0: [2], 1: [3]})


def test_names_of_the_bases_files():
    """Tied weights and files without the inner model's name find their parameter; what has no place is refused."""
    layout = Layout(
        stage=3,
        ranks=1,
        groups=[[("model.embed.weight", [4, 2]), ("model.norm.weight", [2])]],
        paddings=None,
        shared={"lm_head.weight": "model.embed.weight"},
    )
    base = {"lm_head.weight": (4, 2), "norm.weight": (2,), "inv_freq": (1,)}
    assert match_names(layout, base, "/m") == {
        "lm_head.weight": "model.embed.weight",
        "norm.weight": "model.norm.weight",
    }
    with pytest.raises(InputFileError, match=r"1 trained tensors .* example model\.norm\.weight"):
        match_names(layout, {"lm_head.weight": (4, 2)}, "/m")
    with pytest.raises(InputFileError, match=r"example norm\.weight"):
        match_names(layout, {**base, "norm.weight": (3,)}, "/m")
