"""Which rank this process is, as DeepSpeed's launcher told it (standard library only)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmtrain.errors import RankFailedError

if TYPE_CHECKING:
    from collections.abc import Mapping


class WorldSizeError(RankFailedError):
    """The launcher started another number of ranks than the run was planned for."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """This process among all ranks."""

    rank: int
    """Number among all ranks, from 0."""
    local_rank: int
    """Number among the ranks of this host, from 0."""
    world_size: int
    """Number of ranks in the run."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes what exists once."""
        return self.rank == 0

    @property
    def is_first_on_host(self) -> bool:
        """Whether this rank does what is done once per host."""
        return self.local_rank == 0


def parse_place(environment: Mapping[str, str], planned: int) -> Place:
    """Find the place of this process and check it against the plan.

    Raises:
        WorldSizeError: the launcher's variables are missing or contradict the plan.
    """
    try:
        rank, local_rank, world_size = (int(environment[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    except (KeyError, ValueError) as problem:
        raise WorldSizeError(
            f"RANK, LOCAL_RANK and WORLD_SIZE must be numbers in the environment ({problem})",
            fix="ranks are started by DeepSpeed's launcher",
        ) from None
    if world_size != planned:
        raise WorldSizeError(
            f"the launcher started {world_size} ranks, but the run was planned for {planned}",
            fix="look for a host or slot that the launcher left out",
        )
    if not 0 <= rank < world_size:
        raise WorldSizeError(f"rank {rank} does not exist in a run of {world_size} ranks")
    return Place(rank=rank, local_rank=local_rank, world_size=world_size)
