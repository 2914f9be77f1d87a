"""Where everything lives: which slice of which tensor, and what crosses which link. Arithmetic only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmtrain.errors import UsageError
from llmtrain.plan.partition import persistent, plan_flat_groups, plan_sub_groups, slice_of
from llmtrain.plan.traffic import plan_traffic

if TYPE_CHECKING:
    from llmtrain.plan.setup import Setup
    from llmtrain.plan.shape import ModelShape, Parameter
    from llmtrain.plan.traffic import Collective
    from llmtrain.spec.hostfile import Cluster


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A rank's part of one tensor."""

    parameter: Parameter
    """The tensor."""
    rank: int
    """Whose part."""
    first: int
    """First number, counted in the flattened tensor."""
    last: int
    """One past the last number; equal to ``first`` where nothing but padding is left."""
    padding: int
    """Numbers after it that belong to no tensor."""

    @property
    def rows(self) -> tuple[int, int] | None:
        """First and last row of a matrix that it touches, None for vectors and empty slices."""
        shape = self.parameter.shape
        if len(shape) < 2 or self.first == self.last:
            return None
        width = self.parameter.numel // shape[0]
        return self.first // width, (self.last - 1) // width


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The whole picture of one configuration."""

    shape: ModelShape
    """The model."""
    setup: Setup
    """The run."""
    cluster: Cluster
    """Hosts by name."""

    def host_of(self, rank: int) -> str:
        """The host a rank runs on."""
        first = 0
        for host in self.cluster.hosts:
            first += len(host.slots)
            if rank < first:
                return host.name
        raise UsageError(f"there is no rank {rank}", where="--rank", fix=f"0 to {self.setup.ranks - 1}")

    def weight_slice(self, item: Parameter, rank: int) -> Slice:
        """A rank's part of a weight in stage 3; below it, every rank holds all of it."""
        if self.setup.stage < 3:
            return Slice(parameter=item, rank=rank, first=0, last=item.numel, padding=0)
        share = slice_of(item, self.setup.ranks)
        first = min(rank * share, item.numel)
        last = min(first + share, item.numel)
        return Slice(parameter=item, rank=rank, first=first, last=last, padding=share - (last - first))

    def state_slices(self, rank: int) -> tuple[Slice, ...]:
        """A rank's parts of the optimizer's states: of every tensor in stage 3, a range of tensors in 1 and 2."""
        if self.setup.stage == 3:
            return tuple(self.weight_slice(item, rank) for item in self.shape.parameters)
        if self.setup.stage in (1, 2):
            return tuple(
                Slice(parameter=item, rank=rank, first=first, last=last, padding=0)
                for group in plan_flat_groups(self.shape, self.setup)
                for item, first, last in group.owned_by(rank)
            )
        return tuple(
            Slice(parameter=item, rank=rank, first=0, last=item.numel, padding=0) for item in self.shape.parameters
        )

    def bytes_of_rank(self, rank: int) -> dict[str, tuple[str, int]]:
        """Role -> (device, bytes) of one rank's model states, padding included."""
        setup = self.setup
        slices = self.state_slices(rank)
        own = sum(item.last - item.first + item.padding for item in slices)
        weights = own if setup.stage == 3 else self.shape.total
        gradients = own if setup.stage >= 2 else self.shape.total
        where = {"none": "GPU", "cpu": "CPU", "nvme": "NVMe"}
        found = {
            "weights": (where[setup.params], setup.width * weights),
            "gradients": (where[setup.optimizer].replace("NVMe", "CPU"), setup.gradient_width * gradients),
            "master weights": (where[setup.optimizer], 4 * own if setup.width < 4 else 0),
            "Adam moments": (where[setup.optimizer], 8 * own),
        }
        kept = sum(item.numel for item in persistent(self.shape, setup))
        if kept:
            found["kept whole"] = ("GPU", setup.width * kept)
        return found


def find_parameter(shape: ModelShape, name: str) -> Parameter:
    """A tensor by its name or the unique part of one.

    Raises:
        UsageError: none, or several.
    """
    found = [item for item in shape.parameters if item.name in (name, f"{name}.weight")]
    found = found or [item for item in shape.parameters if name in item.name]
    if len(found) == 1:
        return found[0]
    some = ", ".join(item.name for item in found[:4]) or ", ".join(item.name for item in shape.parameters[:4])
    raise UsageError(f"{len(found)} parameters are called {name!r}", where="--param", fix=f"one of: {some}, ...")


def plan_links(placement: Placement) -> list[list[float]]:
    """Host-by-host bytes of one optimizer step: NCCL's ring goes through the ranks in order, host after host."""
    setup = placement.setup
    count = len(placement.cluster.hosts)
    matrix = [[0.0] * count for _ in range(count)]
    for item in plan_traffic(placement.shape, setup):
        if item.local or count == 1:
            inside = item.ring_bytes(setup.slots if item.local else setup.ranks)
            for index, host in enumerate(placement.cluster.hosts):
                matrix[index][index] += inside * len(host.slots)
            continue
        sent = item.ring_bytes(setup.ranks)
        for index, host in enumerate(placement.cluster.hosts):
            matrix[index][index] += sent * (len(host.slots) - 1)
            matrix[index][(index + 1) % count] += sent
    return matrix


def tensor_rows(placement: Placement) -> list[dict[str, Any]]:
    """Every tensor once; decoder layers with equal shapes are folded into one entry with the number of them."""
    shape, setup = placement.shape, placement.setup
    kept = {item.name for item in persistent(shape, setup)}
    signatures: dict[int, tuple[Any, ...]] = {}
    for index in range(shape.layers):
        signatures[index] = tuple(
            (item.name.split(f".{index}.", 1)[-1], item.shape) for item in shape.parameters if item.layer == index
        )
    counts = Counter(signatures.values())
    seen: set[tuple[Any, ...]] = set()
    rows: list[dict[str, Any]] = []
    shown: dict[int, bool] = {}
    for item in shape.parameters:
        times, layer = 1, item.layer
        if layer is not None:
            signature = signatures[layer]
            shown.setdefault(layer, signature not in seen)
            seen.add(signature)
            if not shown[layer]:
                continue
            times = counts[signature]
        share = slice_of(item, setup.ranks)
        rows.append(
            {
                "name": item.name,
                "shape": list(item.shape),
                "numel": item.numel,
                "slice": share,
                "padding": share * setup.ranks - item.numel,
                "kept": item.name in kept,
                "layer": layer,
                "times": times,
            }
        )
    return rows


def map_json(placement: Placement) -> dict[str, Any]:
    """The map as data: what the picture is drawn from, and what ``--json`` prints."""
    setup, shape = placement.setup, placement.shape
    groups = plan_sub_groups(shape, setup) if setup.stage == 3 else ()
    return {
        "model": {"name": shape.family, "parameters": shape.total, "layers": shape.layers, "width": setup.width},
        "stage": setup.stage,
        "ranks": setup.ranks,
        "hosts": [{"name": host.name, "slots": len(host.slots)} for host in placement.cluster.hosts],
        "batch": {"micro": setup.micro, "accumulation": setup.accumulation, "length": setup.length},
        "places": {"weights": setup.params, "states": setup.optimizer},
        "tensors": tensor_rows(placement),
        "rank_bytes": {
            role: {"device": where, "bytes": size} for role, (where, size) in placement.bytes_of_rank(0).items()
        },
        "ranges": _ranges(placement),
        "sub_groups": [
            {"tensors": len(group.parameters), "numel": group.numel, "on_host": group.on_host} for group in groups
        ],
        "traffic": [_traffic(item) for item in plan_traffic(shape, setup)],
        "links": plan_links(placement),
        "checkpointing": setup.checkpointing,
    }


def _traffic(item: Collective) -> dict[str, Any]:
    return {
        "kind": item.kind,
        "what": item.what,
        "bytes": item.size_bytes,
        "repeats": item.repeats,
        "per_step": item.per_step,
        "step_bytes": item.step_bytes,
        "local": item.local,
    }


def _ranges(placement: Placement) -> list[dict[str, Any]]:
    """Stages 1 and 2: the first and last tensor of each rank's range, for the ranks a picture can show."""
    if placement.setup.stage not in (1, 2):
        return []
    found = []
    for rank in range(min(placement.setup.ranks, 1024)):
        pieces = placement.state_slices(rank)
        if pieces:
            layers = [piece.parameter.layer for piece in pieces if piece.parameter.layer is not None]
            found.append(
                {
                    "rank": rank,
                    "first": pieces[0].parameter.name,
                    "last": pieces[-1].parameter.name,
                    "layers": [min(layers), max(layers)] if layers else None,
                    "numel": sum(piece.last - piece.first for piece in pieces),
                }
            )
    return found
