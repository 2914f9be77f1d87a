"""Who gets which chunks from whom. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from llmtrain.sync.manifest import MIB, SMALL, Entry, block_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LAG_CHUNKS = 8
SLOW_SHARE = 0.6
SLOW_FOR_S = 5.0
Ranges = list[list[int]]


@dataclass(frozen=True, kw_only=True)
class ChunkPlan:
    """What travels."""

    chunks: tuple[list[list[int]], ...]
    """Each chunk as segments ``[file, first block, last block]``, in the order they travel."""
    needed: Mapping[str, Ranges]
    """Host -> chunks it lacks, as ranges."""
    total_bytes: int
    """Bytes of all chunks: what leaves the source."""
    host_bytes: Mapping[str, int]
    """Host -> bytes it lacks."""


def chunk_bytes(total: int, hosts: int) -> int:
    """Size of a chunk: filling the chain must cost at most 2% of the transfer, yet small files travel together."""
    if hosts < 2:
        return MIB
    return max(SMALL, min(4 * MIB, int(0.02 * total / (hosts - 1))))


def plan_chunks(entries: Sequence[Entry], needs: Mapping[str, Mapping[int, Ranges]]) -> ChunkPlan:
    """Group the blocks that some host lacks into chunks, such that all blocks of a chunk are lacking on the same hosts.

    So a host is sent exactly what it lacks, however different the hosts are.

    Args:
        entries: the tree; the numbers in ``needs`` count these.
        needs: host -> file -> ranges of blocks it lacks.
    """
    hosts = list(needs)
    pieces = _pieces(entries, needs, hosts)
    size = chunk_bytes(sum(length for *_, length, _ in pieces), len(hosts))
    chunks: list[list[list[int]]] = []
    masks: list[int] = []
    room = 0
    for file, first, last, _, mask in pieces:
        step = block_size(entries[file].size)
        block = first
        while block <= last:
            if not masks or masks[-1] != mask or room <= 0:
                chunks.append([])
                masks.append(mask)
                room = size
            count = min(last - block + 1, max(1, room // step))
            chunks[-1].append([file, block, block + count - 1])
            end = min(entries[file].size, (block + count) * step)
            room -= end - block * step
            block += count
    needed: dict[str, Ranges] = {host: [] for host in hosts}
    for number, mask in enumerate(masks):
        for bit, host in enumerate(hosts):
            if mask >> bit & 1:
                if needed[host] and needed[host][-1][1] == number - 1:
                    needed[host][-1][1] = number
                else:
                    needed[host].append([number, number])
    host_bytes = {host: sum(length for *_, length, mask in pieces if mask >> bit & 1) for bit, host in enumerate(hosts)}
    total = sum(length for *_, length, _ in pieces)
    return ChunkPlan(chunks=tuple(chunks), needed=needed, total_bytes=total, host_bytes=host_bytes)


def _pieces(
    entries: Sequence[Entry], needs: Mapping[str, Mapping[int, Ranges]], hosts: Sequence[str]
) -> list[tuple[int, int, int, int, int]]:
    """(file, first block, last block, bytes, mask of hosts), cut wherever the set of hosts changes."""
    pieces = []
    for file in sorted({file for wanted in needs.values() for file in wanted}):
        cuts: dict[int, int] = {}
        for bit, host in enumerate(hosts):
            for first, last in needs[host].get(file, ()):
                cuts[first] = cuts.get(first, 0) ^ (1 << bit)
                cuts[last + 1] = cuts.get(last + 1, 0) ^ (1 << bit)
        size, step, mask = entries[file].size, block_size(entries[file].size), 0
        edges = sorted(cuts)
        for edge, following in pairwise(edges):
            mask ^= cuts[edge]
            if mask:
                length = min(size, following * step) - edge * step
                pieces.append((file, edge, following - 1, length, mask))
    return pieces


def choose_slow(
    order: Sequence[str], have: Mapping[str, int], rate: Mapping[str, float], behind_s: Mapping[str, float], total: int
) -> str | None:
    """The host that holds the others up, to be moved to the tail; None while all keep pace.

    Args:
        order: the chain; the last host cannot hold anybody up.
        have: host -> chunks it has.
        rate: host -> chunks per second lately.
        behind_s: host -> seconds it has been far behind its predecessor.
        total: all chunks.
    """
    for before, host in pairwise(order[:-1]):
        far = have[before] - have[host] > max(LAG_CHUNKS, total // 50)
        if far and behind_s[host] >= SLOW_FOR_S and rate[host] < SLOW_SHARE * rate[before]:
            return host
    return None


def is_behind(before: int, host: int, total: int) -> bool:
    """Whether a host is so far behind its predecessor that it may be a slow one."""
    return before - host > max(LAG_CHUNKS, total // 50)
