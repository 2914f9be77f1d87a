"""Memory of one host: offloaded states with page-locked rounding, processes, loaders, the load; and NVMe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmtrain.plan.devicememory import ZERO3, ZERO12, trained_share
from llmtrain.plan.partition import plan_flat_groups, plan_sub_groups, slice_of
from llmtrain.plan.terms import AFTER_STEP, ALWAYS, TRAINING, Phase, Place, Term

if TYPE_CHECKING:
    from collections.abc import Iterable

    from llmtrain.plan.setup import Setup
    from llmtrain.plan.shape import ModelShape

PROCESS = 4_000_000_000
"""A rank's process: interpreter, torch, CUDA's and NCCL's host side (3 to 5 GB observed)."""
WORKER = 500_000_000
"""A loader process (0.3 to 1 GB observed)."""
SYSTEM = 4_000_000_000
"""The operating system and its services."""
PINNING = "PyTorch CachingHostAllocator: each page-locked block is a power of two"


def power_of_two(size: int) -> int:
    """The block a page-locked request gets."""
    return 1 << (size - 1).bit_length() if size > 0 else 0


def pinned_total(sizes: Iterable[int], setup: Setup) -> int:
    """Bytes of page-locked buffers after rounding."""
    rounds = setup.pin and not setup.pin_native
    return sum(power_of_two(size) if rounds else size for size in sizes)


def host_terms(shape: ModelShape, setup: Setup) -> tuple[Term, ...]:
    """Everything one host holds: its ranks' offloaded states, its processes."""
    found = [
        _term("system", SYSTEM, "fixed", "assumption", ALWAYS),
        _term("processes", PROCESS * setup.slots, "4 GB x slots", "3 to 5 GB observed", ALWAYS),
        _term(
            "loaders", WORKER * setup.workers * setup.slots, "0.5 GB x loader_workers x slots", "0.3 to 1 GB observed"
        ),
        _term(*_load(shape, setup), "transformers from_pretrained", ("load",)),
    ]
    if setup.stage == 3:
        found += _stage3(shape, setup)
    elif setup.optimizer != "none":
        found += _stage12(shape, setup)
    return tuple(item for item in found if item.size_bytes > 0)


def _term(
    name: str,
    size: float,
    formula: str,
    source: str,
    phases: tuple[Phase, ...] = TRAINING,
    *,
    place: Place = "ram",
    pinned: bool = False,
) -> Term:
    return Term(
        name=name, place=place, size_bytes=int(size), formula=formula, source=source, phases=phases, pinned=pinned
    )


def _load(shape: ModelShape, setup: Setup) -> tuple[str, float, str]:
    whole = setup.width * shape.total
    if setup.stage == 3 and not setup.whole_load:
        return "loading", whole, "2P once per host: rank 0 of it reads, the others receive"
    return "loading", whole * setup.slots, "2P x slots: every rank reads the whole model"


def _stage3(shape: ModelShape, setup: Setup) -> list[Term]:
    groups = plan_sub_groups(shape, setup)
    slots, trained = setup.slots, trained_share(shape, setup)
    away = [int(group.numel * trained) for group in groups if group.on_host]
    place: Place = "nvme" if setup.optimizer == "nvme" else "ram"
    found: list[Term] = []
    if setup.optimizer != "none":
        gradient = setup.gradient_width * int(sum(group.numel for group in groups) * trained)
        found += [
            _term("master weights", 4 * sum(away) * slots, "4 B x P/N x slots", ZERO3, place=place),
            _term(
                "Adam moments",
                8 * sum(away) * slots,
                "8 B x P/N x slots, made by the first step",
                ZERO3,
                (*AFTER_STEP, "first step"),
                place=place,
            ),
            _term(
                "gradients",
                pinned_total([gradient], setup) * slots,
                f"{setup.gradient_width} B x P/N, one buffer",
                f"{ZERO3}; {PINNING}",
                pinned=setup.pin,
            ),
        ]
        if place == "ram":
            sizes = [4 * numel for numel in away]
            found.append(
                _term(
                    "32-bit gradients",
                    pinned_total(sizes, setup) * slots,
                    "4 B x P/N, a buffer per sub-group",
                    f"{ZERO3}; {PINNING}",
                    pinned=setup.pin,
                )
            )
        else:
            found += [
                _term("32-bit gradients", 4 * sum(away) * slots, "4 B x P/N x slots", ZERO3, place="nvme"),
                _term(
                    "optimizer swap buffers",
                    pinned_total([4 * 4 * max(away)], setup) * slots,
                    "4 x largest sub-group",
                    "DeepSpeed runtime/swap_tensor",
                    pinned=True,
                ),
            ]
    return found + _weights(shape, setup)


def _weights(shape: ModelShape, setup: Setup) -> list[Term]:
    if setup.params == "none":
        return []
    slots, width = setup.slots, setup.width
    groups = shape.groups(split=setup.two_groups)
    flat = [width * sum(slice_of(item, setup.ranks) for item in group) for group in groups]
    if setup.params == "nvme":
        swap = width * setup.buffer_size * setup.buffer_count
        return [
            _term("weights", sum(flat) * slots, "2 B x P/N x slots", ZERO3, place="nvme"),
            _term(
                "weight swap buffers",
                pinned_total([swap], setup) * slots,
                "buffer_count x buffer_size",
                ZERO3,
                pinned=True,
            ),
        ]
    # These are page-locked whatever pin_memory says, hence the rounding without asking.
    rounded = sum(size if setup.pin_native else power_of_two(size) for size in flat)
    first = [width * slice_of(item, setup.ranks) for item in shape.parameters]
    found = [_term("weights", rounded * slots, "2 B x P/N, one buffer per group", f"{ZERO3}; {PINNING}", pinned=True)]
    if setup.pin:
        found.append(
            _term(
                "first weights",
                pinned_total(first, setup) * slots,
                "2 B x P/N, one block per tensor, never returned",
                f"DeepSpeed partition_parameters.py; {PINNING}",
                ALWAYS,
                pinned=True,
            )
        )
    return found


def _stage12(shape: ModelShape, setup: Setup) -> list[Term]:
    slots, trained = setup.slots, trained_share(shape, setup)
    groups = plan_flat_groups(shape, setup)
    shares = [int(group.share * trained) for group in groups]
    both = f"{ZERO12}; {PINNING}"
    found = [
        _term(
            "master weights",
            pinned_total([4 * share for share in shares], setup) * slots,
            "4 B x P/N",
            both,
            pinned=setup.pin,
        ),
        _term(
            "Adam moments",
            8 * sum(shares) * slots,
            "8 B x P/N, made by the first step",
            ZERO12,
            (*AFTER_STEP, "first step"),
        ),
        _term(
            "32-bit gradients",
            pinned_total([4 * share for share in shares], setup) * slots,
            "4 B x P/N",
            both,
            pinned=setup.pin,
        ),
        _term(
            "upload buffers",
            pinned_total([setup.width * share for share in shares], setup) * slots,
            "2 B x P/N",
            both,
            pinned=setup.pin,
        ),
    ]
    if setup.accumulation > 1:
        sizes = [setup.gradient_width * item.numel for group in groups for item, _, _ in group.owned_by(0)]
        found.append(
            _term(
                "accumulated gradients",
                pinned_total(sizes, setup) * slots,
                "2 B of a rank's tensors, a block each",
                both,
                pinned=setup.pin,
            )
        )
    return found
