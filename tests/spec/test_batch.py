from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtrain.errors import ExitCode, InputFileError
from llmtrain.spec.batch import BatchRequest, choose_batch

NUMBER = st.none() | st.integers(1, 64)


@pytest.mark.parametrize(
    ("given_", "world", "solved"),
    [
        ((None, None, None), 1, (32, 1, 32)),
        ((None, None, None), 8, (32, 1, 4)),
        ((None, None, None), 64, (64, 1, 1)),
        ((None, None, None), 3, (30, 1, 10)),
        ((64, None, None), 8, (64, 1, 8)),
        ((None, 4, None), 2, (32, 4, 4)),
        ((None, 40, None), 2, (80, 40, 1)),
        ((None, None, 2), 8, (16, 1, 2)),
        ((64, 4, None), 8, (64, 4, 2)),
        ((64, None, 2), 8, (64, 4, 2)),
        ((None, 4, 2), 8, (64, 4, 2)),
        ((64, 4, 2), 8, (64, 4, 2)),
    ],
)
def test_solves_for_what_is_open(given_, world, solved):
    """Whatever the user gives, the rest follows from the equation, and is reported as a choice."""
    request = BatchRequest(global_=given_[0], micro=given_[1], accumulation=given_[2])
    batch, choices = choose_batch(request, world_size=world)
    assert (batch.global_, batch.micro, batch.accumulation) == solved
    chosen = {choice.key.removeprefix("batch."): choice.value for choice in choices}
    names = ("global", "micro", "accumulation")
    assert chosen == {name: value for name, value, start in zip(names, solved, given_, strict=True) if start is None}


@pytest.mark.parametrize(
    ("given_", "world", "message", "fix"),
    [
        ((30, 1, None), 8, "batch.global 30 = micro 1 x accumulation ? x 8 ranks does not divide", "24 or 32"),
        (
            (30, 4, None),
            8,
            "batch.global 30 = micro 4 x accumulation ? x 8 ranks does not divide",
            "batch.global to 32",
        ),
        ((30, None, None), 8, "batch.global 30 = micro 1 x accumulation ? x 8 ranks does not divide", "24 or 32"),
        ((30, None, 4), 1, "batch.global 30 = micro ? x accumulation 4 x 1 rank does not divide", "28 or 32"),
        ((30, 4, 2), 8, "batch.global 30 = micro 4 x accumulation 2 x 8 ranks does not hold: the product is 64", "64"),
        ((0, None, None), 8, "batch.global is 0", "1 or more"),
        ((None, -1, None), 8, "batch.micro is -1", "1 or more"),
    ],
)
def test_shows_the_equation_that_fails(given_, world, message, fix):
    """An unsolvable batch is an input error that shows the equation with its numbers and the way out."""
    request = BatchRequest(global_=given_[0], micro=given_[1], accumulation=given_[2])
    with pytest.raises(InputFileError) as caught:
        choose_batch(request, world_size=world, where="run.yaml")
    assert caught.value.exit_code == ExitCode.INPUT
    assert message in caught.value.error
    assert fix in caught.value.fix
    assert caught.value.where == "run.yaml"


@given(NUMBER, NUMBER, NUMBER, st.integers(1, 64))
def test_a_solution_keeps_what_was_given_and_holds(global_, micro, accumulation, world):
    """A batch that comes out satisfies the equation and every number the user gave."""
    try:
        batch, _ = choose_batch(BatchRequest(global_=global_, micro=micro, accumulation=accumulation), world_size=world)
    except InputFileError:
        return
    assert batch.global_ == batch.micro * batch.accumulation * world
    assert global_ in (None, batch.global_)
    assert micro in (None, batch.micro)
    assert accumulation in (None, batch.accumulation)
