from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtrain.errors import UsageError
from llmtrain.spec.hostrange import expand


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a", ("a",)),
        ("a, b", ("a", "b")),
        ("gpu[008-011]", ("gpu008", "gpu009", "gpu010", "gpu011")),
        ("n[1,3-4].x", ("n1.x", "n3.x", "n4.x")),
        ("r[1-2]n[1-2]", ("r1n1", "r1n2", "r2n1", "r2n2")),
        ("head,gpu[1,2]", ("head", "gpu1", "gpu2")),
    ],
)
def test_names_are_written_out(text, names):
    """Ranges keep their leading zeros and their order."""
    assert expand(text) == names


@pytest.mark.parametrize(
    "text", ["", "a,a", "n[2-1]", "n[1-99999]", "n[a-b]", "n[", "-oProxy", "a b", "u@a", "n[]", "a;b"]
)
def test_what_is_no_name_is_refused(text):
    """Nothing that ssh or a hostfile could read as something else comes out."""
    with pytest.raises(UsageError) as caught:
        expand(text)
    assert caught.value.fix


@given(st.integers(0, 500), st.integers(0, 20), st.integers(1, 6))
def test_a_range_holds_each_number_once(first, more, width):
    """A range gives as many names as numbers, all with the same digits at least."""
    names = expand(f"n[{first:0{width}}-{first + more:0{width}}]")
    assert [int(name[1:]) for name in names] == list(range(first, first + more + 1))
    assert all(len(name) > width for name in names)
