"""The batch equation: global = micro x accumulation x ranks."""

from __future__ import annotations

from dataclasses import dataclass

from llmtrain.errors import InputFileError
from llmtrain.spec.choice import Choice

USUAL_GLOBAL = 32
"""Examples per optimizer step when nobody says: a common value for supervised fine-tuning at 1e-5."""


@dataclass(frozen=True, kw_only=True)
class BatchRequest:
    """What the user fixed of the batch; None is open."""

    global_: int | None = None
    """Examples in one optimizer step, over all ranks."""
    micro: int | None = None
    """Examples in one forward pass on one rank."""
    accumulation: int | None = None
    """Forward passes in one optimizer step on one rank."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A batch for which the equation holds."""

    global_: int
    """Examples in one optimizer step, over all ranks."""
    micro: int
    """Examples in one forward pass on one rank."""
    accumulation: int
    """Forward passes in one optimizer step on one rank."""
    world_size: int
    """Ranks, each of them with its own examples."""

    def __str__(self) -> str:
        return equation(self.global_, self.micro, self.accumulation, self.world_size)


def equation(global_: int | None, micro: int | None, accumulation: int | None, world_size: int) -> str:
    """Write the batch equation with its numbers; what is open is a question mark."""
    shown = [("?" if value is None else str(value)) for value in (global_, micro, accumulation)]
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    return f"batch.global {shown[0]} = micro {shown[1]} x accumulation {shown[2]} x {ranks}"


def choose_batch(
    request: BatchRequest, *, world_size: int, where: str | None = None
) -> tuple[Batch, tuple[Choice, ...]]:
    """Solve the batch equation for what the user left open.

    Args:
        request: what the user fixed.
        world_size: number of ranks; all of them hold different examples.
        where: the file or option the numbers come from, for errors.

    Returns:
        The batch, and a choice for each number that the user did not give.

    Raises:
        InputFileError: the equation has no solution in whole numbers; the message shows it.
    """
    for key, value in (("global", request.global_), ("micro", request.micro), ("accumulation", request.accumulation)):
        if value is not None and value < 1:
            raise InputFileError(f"batch.{key} is {value}", where=where, fix=f"set batch.{key} to 1 or more")
    if request.global_ is None:
        return _from_parts(request, world_size)
    if request.micro is not None and request.accumulation is not None:
        batch = Batch(
            global_=request.global_, micro=request.micro, accumulation=request.accumulation, world_size=world_size
        )
        _check_equation(batch, where)
        return batch, ()
    return _from_global(request, request.global_, world_size, where)


def _from_parts(request: BatchRequest, world_size: int) -> tuple[Batch, tuple[Choice, ...]]:
    choices = []
    micro = request.micro
    if micro is None:
        micro = 1
        choices.append(_micro_of_one())
    accumulation = request.accumulation
    if accumulation is None:
        accumulation = max(1, USUAL_GLOBAL // (micro * world_size))
        reason = f"brings a step to about {USUAL_GLOBAL} examples; batch.global was not given"
        choices.append(Choice(key="batch.accumulation", value=accumulation, reason=reason))
    batch = Batch(
        global_=micro * accumulation * world_size, micro=micro, accumulation=accumulation, world_size=world_size
    )
    return batch, (*choices, Choice(key="batch.global", value=batch.global_, reason=str(batch)))


def _micro_of_one() -> Choice:
    return Choice(key="batch.micro", value=1, reason="takes the least memory; raise it until memory is used")


def _check_equation(batch: Batch, where: str | None) -> None:
    product = batch.micro * batch.accumulation * batch.world_size
    if batch.global_ != product:
        raise InputFileError(
            f"{batch} does not hold: the product is {product}",
            where=where,
            fix=f"leave one of the three out, or set batch.global to {product}",
        )


def _from_global(
    request: BatchRequest, global_: int, world_size: int, where: str | None
) -> tuple[Batch, tuple[Choice, ...]]:
    micro, accumulation = request.micro, request.accumulation
    choices = []
    if micro is None and accumulation is None:
        micro = 1
        choices.append(_micro_of_one())
    unit = (micro or accumulation or 1) * world_size
    if global_ % unit:
        raise InputFileError(
            f"{equation(global_, micro, accumulation, world_size)} does not divide; nearest: {_nearest(global_, unit)}",
            where=where,
            fix=f"set batch.global to {_nearest(global_, unit)}, or change the other number or the ranks",
        )
    rest = global_ // unit
    solved = Batch(
        global_=global_,
        micro=rest if micro is None else micro,
        accumulation=rest if accumulation is None else accumulation,
        world_size=world_size,
    )
    key = "batch.micro" if micro is None else "batch.accumulation"
    return solved, (*choices, Choice(key=key, value=rest, reason=str(solved)))


def _nearest(global_: int, unit: int) -> str:
    below = global_ // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"
