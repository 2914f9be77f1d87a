"""Where everything lives, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from llmtrain.plan.shards import find_parameter, plan_links, tensor_rows
from llmtrain.plan.traffic import plan_traffic

if TYPE_CHECKING:
    from rich.console import Console

    from llmtrain.plan.shards import Placement, Slice


def size_text(size: float) -> str:
    """Bytes in the unit that keeps it short."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:,.1f} {unit}"
    return f"{size:.0f} B"


def lead_sentence(placement: Placement) -> str:
    """What a person must know first."""
    ranks, stage = placement.setup.ranks, placement.setup.stage
    if stage == 3:
        return (
            f"ZeRO-3 cuts every tensor into {ranks} equal slices, one for each GPU. No layer lives on a GPU:"
            " each GPU holds a slice of all of them, and gathers one layer at a time when it computes."
        )
    if stage in (1, 2):
        return (
            f"ZeRO-{stage}: every GPU holds all weights. The optimizer's states"
            f"{' and gradients' if stage == 2 else ''} are cut into {ranks} ranges of consecutive tensors."
        )
    return "No ZeRO: every GPU holds everything."


def show_map(console: Console, placement: Placement) -> None:
    """The whole picture in words and tables."""
    setup = placement.setup
    console.print(lead_sentence(placement), markup=False)
    table = Table(box=None, pad_edge=False)
    for column in ("tensor", "shape", "numbers", "slice of each rank", "padding", "layers like it", ""):
        table.add_column(column, overflow="fold")
    for row in tensor_rows(placement):
        share = f"{row['slice']:,}" if setup.stage == 3 else "all"
        padding = f"{row['padding']}" if setup.stage == 3 and row["padding"] else ""
        shape = "x".join(map(str, row["shape"]))
        kept = "kept whole too" if row["kept"] else ""
        table.add_row(row["name"], shape, f"{row['numel']:,}", share, padding, str(row["times"]), kept)
    console.print(table)
    console.print(f"\neach rank ({setup.ranks} of them, {setup.slots} on a host):", markup=False)
    for role, (where, size) in placement.bytes_of_rank(0).items():
        console.print(f"  {role}: {size_text(size)} on its {where}", markup=False)
    console.print("\none optimizer step:", markup=False)
    for item in plan_traffic(placement.shape, setup):
        console.print(
            f"  {item.kind} of {item.what}: {size_text(item.size_bytes)} x {item.repeats}"
            f"{' inside hosts' if item.local else ''}",
            markup=False,
        )
    matrix = plan_links(placement)
    names = placement.cluster.names
    if len(names) > 1:
        console.print(
            f"between neighbouring hosts: {size_text(matrix[0][1])} each way of the ring; inside each host:"
            f" {size_text(matrix[0][0])}",
            markup=False,
        )


def show_slice(console: Console, placement: Placement, name: str, rank: int | None) -> None:
    """One tensor, on one rank or on all."""
    item = find_parameter(placement.shape, name)
    console.print(f"{item.name} {'x'.join(map(str, item.shape))}: {item.numel:,} numbers", markup=False)
    if placement.setup.stage == 3:
        chosen = [rank] if rank is not None else range(min(placement.setup.ranks, 16))
        for one in chosen:
            console.print(f"  {describe_slice(placement, placement.weight_slice(item, one))}", markup=False)
        return
    for one in [rank] if rank is not None else range(placement.setup.ranks):
        for piece in placement.state_slices(one):
            if piece.parameter is item:
                console.print(f"  optimizer states: {describe_slice(placement, piece)}", markup=False)


def describe_slice(placement: Placement, piece: Slice) -> str:
    """A slice in words."""
    rows = f", rows {piece.rows[0]} to {piece.rows[1]}" if piece.rows else ""
    padding = f", {piece.padding} of padding" if piece.padding else ""
    host = placement.host_of(piece.rank)
    return f"rank {piece.rank} on {host}: numbers {piece.first:,} to {piece.last:,}{rows}{padding}"


def show_rank(console: Console, placement: Placement, rank: int) -> None:
    """What one rank holds."""
    console.print(f"rank {rank} on {placement.host_of(rank)}", markup=False)
    for role, (where, size) in placement.bytes_of_rank(rank).items():
        console.print(f"  {role}: {size_text(size)} on its {where}", markup=False)
    pieces = placement.state_slices(rank)
    console.print(f"  optimizer states of {len(pieces)} tensors:", markup=False)
    for piece in pieces[:12]:
        console.print(f"    {piece.parameter.name}: {describe_slice(placement, piece)}", markup=False)
    if len(pieces) > 12:
        console.print(f"    ... and {len(pieces) - 12} more", markup=False)
