"""How the ranks' 32-bit parts in a DeepSpeed checkpoint make parameters.

Layouts as in deepspeed/utils/zero_to_fp32.py (0.19.8).

Stage 3 cuts every parameter over all ranks, the last part padded; a rank's parts lie one after the other in its
sub-groups. Stages 1 and 2 lay the parameters of a group end to end, pad, and cut the whole over the ranks. Without
ZeRO the one file of rank 0 has whole parameters.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from llmtrain.errors import InputFileError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

OPTIMIZER_FILE = re.compile(r"(?:.*_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt$")
MODEL_FILES = ("zero_pp_rank_0_mp_rank_00_model_states.pt", "mp_rank_00_model_states.pt")
LAYOUT = "layout.json"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which parameters there are, and how they are cut."""

    stage: int
    """ZeRO stage; 0 for whole parameters in the file of rank 0."""
    ranks: int
    """Parts."""
    groups: list[list[tuple[str, list[int]]]]
    """Name and shape of every trained parameter, group by group, in their order."""
    paddings: list[list[int]] | None
    """Numbers of padding behind each parameter of each group (stages 1 and 2, newer DeepSpeed); None for none."""
    shared: dict[str, str]
    """Further names of parameters -> the name they are kept under."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Numbers of one parameter in one rank's part."""

    rank: int
    """Whose part."""
    start: int
    """First number, counted from the beginning of the part."""
    count: int
    """How many."""


def find_parts(tag: Path) -> dict[int, Path]:
    """Rank -> file with its 32-bit weights; rank 0's model file where ZeRO is off."""
    found = {int(match[1]): path for path in sorted(tag.iterdir()) if (match := OPTIMIZER_FILE.match(path.name))}
    plain = tag / MODEL_FILES[1]
    return found or ({0: plain} if plain.is_file() else {})


def load_groups(path: Path) -> list[Any]:
    """A rank's flat 32-bit tensors, mapped from the file and not read.

    Raises:
        InputFileError: it is no file of a ZeRO optimizer.
    """
    state = _load(path)
    if OPTIMIZER_FILE.match(path.name) is None:
        return [tensor.reshape(-1) for tensor in _whole(state).values()]
    optimizer = state["optimizer_state_dict"]
    groups = optimizer.get("fp32_flat_groups") or optimizer.get("single_partition_of_fp32_groups")
    if groups is None:
        raise InputFileError("no 32-bit weights of ZeRO in it", where=str(path))
    return list(groups)


def read_layout(tag: Path, parts: Mapping[int, Path]) -> Layout | None:
    """Names, shapes and cuts, where this host has the files that say so; None on the others.

    Args:
        tag: DeepSpeed's folder in a checkpoint.
        parts: as found by :func:`find_parts`.
    """
    model = next((tag / name for name in MODEL_FILES if (tag / name).is_file()), None)
    if model is None or 0 not in parts:
        return None
    state = _load(model)
    if OPTIMIZER_FILE.match(parts[0].name) is None:
        groups = [[(name, list(tensor.shape)) for name, tensor in _whole(state).items()]]
        return Layout(stage=0, ranks=1, groups=groups, paddings=None, shared=dict(state["shared_params"]))
    optimizer = _load(parts[0])["optimizer_state_dict"]
    count = optimizer["partition_count"]
    return Layout(
        stage=int(optimizer["zero_stage"]),
        ranks=max(count) if isinstance(count, list) else int(count),
        groups=[[(name, list(shape)) for name, shape in group.items()] for group in state["param_shapes"]],
        paddings=optimizer.get("param_alignment_paddings"),
        shared=dict(state["shared_params"]),
    )


def _load(path: Path) -> dict[str, Any]:
    import torch

    # Our own files, whose digests have been compared with the manifest; optimizer states are classes.
    state: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    return state


def _whole(state: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of a model file; tied ones once."""
    skipped = {*state["buffer_names"], *state["shared_params"], *(state.get("frozen_param_shapes") or ())}
    return {name: tensor for name, tensor in state["module"].items() if name not in skipped}


def write_layout(folder: Path, layout: Layout) -> None:
    """As JSON."""
    (folder / LAYOUT).write_text(json.dumps(asdict(layout)), encoding="utf-8")


def parse_layout(text: str) -> Layout:
    """What :func:`write_layout` wrote."""
    values = json.loads(text)
    values["groups"] = [[(name, shape) for name, shape in group] for group in values["groups"]]
    return Layout(**values)


def locate(layout: Layout, sizes: Mapping[int, Sequence[int]]) -> dict[str, list[Piece]]:
    """Where the numbers of every parameter are, in their order. Pure.

    Args:
        layout: the cuts.
        sizes: rank -> numbers in each of its groups (of stage 3: sub-groups).

    Raises:
        InputFileError: parts are missing, or do not add up.
    """
    missing = [rank for rank in range(layout.ranks) if rank not in sizes]
    if missing:
        raise InputFileError(f"the parts of ranks {missing[:8]} are missing: {layout.ranks} ranks wrote it")
    if layout.stage in (1, 2):
        return _locate_vectors(layout, sizes)
    found: dict[str, list[Piece]] = {}
    at = 0
    for name, shape in (entry for group in layout.groups for entry in group):
        numel = math.prod(shape)
        share = -(-numel // layout.ranks)
        counts = [min(share, max(0, numel - rank * share)) for rank in range(layout.ranks)]
        found[name] = [Piece(rank=rank, start=at, count=count) for rank, count in enumerate(counts) if count]
        at += share
    for rank in range(layout.ranks):
        _refuse_odd(sum(sizes[rank]), at, rank)
    return found


def _locate_vectors(layout: Layout, sizes: Mapping[int, Sequence[int]]) -> dict[str, list[Piece]]:
    found: dict[str, list[Piece]] = {}
    for number, group in enumerate(layout.groups):
        starts = {rank: sum(sizes[rank][:number]) for rank in range(layout.ranks)}
        lengths = [sizes[rank][number] for rank in range(layout.ranks)]
        at = 0
        for index, (name, shape) in enumerate(group):
            found[name] = _cut(at, math.prod(shape), lengths, starts)
            at += math.prod(shape) + (layout.paddings[number][index] if layout.paddings else 0)
        if not at <= sum(lengths):
            _refuse_odd(sum(lengths), at, number)
    return found


def _cut(at: int, numel: int, lengths: Sequence[int], starts: Mapping[int, int]) -> list[Piece]:
    """Pieces of the numbers ``at`` to ``at + numel`` of a vector that is cut into these lengths."""
    pieces, begin = [], 0
    for rank, length in enumerate(lengths):
        first, last = max(at, begin), min(at + numel, begin + length)
        if first < last:
            pieces.append(Piece(rank=rank, start=starts[rank] + first - begin, count=last - first))
        begin += length
    return pieces


def _refuse_odd(have: int, want: int, rank: int) -> None:
    if have != want:
        raise InputFileError(f"the parts do not add up: {have} numbers of rank {rank} for {want}")
