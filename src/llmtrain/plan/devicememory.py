"""Memory of one accelerator: model states by ZeRO stage, buffers, gathered weights, activations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmtrain.plan.activations import LOGITS, LOGITS_OLD, estimate_activations
from llmtrain.plan.gather import plan_gathers
from llmtrain.plan.partition import persistent, plan_flat_groups, plan_sub_groups, share_of_rank, slice_of
from llmtrain.plan.terms import AFTER_STEP, TRAINING, Phase, Term

if TYPE_CHECKING:
    from llmtrain.plan.setup import Setup
    from llmtrain.plan.shape import ModelShape

ZERO12 = "DeepSpeed runtime/zero/stage_1_and_2.py"
ZERO3 = "DeepSpeed runtime/zero/stage3.py"
FETCH = "DeepSpeed runtime/zero/partitioned_param_coordinator.py"
MODEL = "transformers 5, held by a FakeTensor trace"
STEP: tuple[Phase, ...] = ("first step", "step")
PASS: tuple[Phase, ...] = ("forward", "loss", "backward")


def term(name: str, size: float, formula: str, source: str, phases: tuple[Phase, ...] = TRAINING) -> Term:
    """A part of an accelerator's memory."""
    return Term(name=name, place="gpu", size_bytes=int(size), formula=formula, source=source, phases=phases)


def device_terms(shape: ModelShape, setup: Setup, rank: int = 0) -> tuple[Term, ...]:
    """Everything one rank allocates on its accelerator.

    Args:
        shape: the model.
        setup: the run.
        rank: whose; ranks differ by a few bytes in stages 1 and 2.
    """
    states = _stage3(shape, setup) if setup.stage == 3 else _stage012(shape, setup, rank)
    found = [*states, *_loading(shape, setup), *_passes(shape, setup)]
    return tuple(item for item in found if item.size_bytes > 0)


def trained_share(shape: ModelShape, setup: Setup) -> float:
    """Share of the numbers that have gradients: 1, or the adapters' part with LoRA."""
    return lora_numel(shape, setup) / shape.total if setup.lora else 1.0


def lora_numel(shape: ModelShape, setup: Setup) -> int:
    """Numbers in all adapters."""
    if setup.lora is None:
        return 0
    pairs = [item.shape for item in shape.parameters if item.module.rpartition(".")[2] in setup.lora.targets]
    return sum(setup.lora.rank * sum(pair[-2:]) for pair in pairs)


def _stage012(shape: ModelShape, setup: Setup, rank: int) -> list[Term]:
    groups = plan_flat_groups(shape, setup)
    whole = sum(group.total for group in groups) if setup.stage else shape.total
    own = share_of_rank(shape, setup)
    trained = trained_share(shape, setup)
    host = setup.optimizer != "none"
    divided = "/N" if setup.stage else ""
    held = sum(group.held_by(rank) for group in groups) if setup.stage == 2 else shape.total
    found = [term("weights", setup.width * whole, f"{setup.width}P, whole on every rank", ZERO12)]
    if not (host and setup.stage == 2):
        where = "of the tensors that reach into a rank's range" if setup.stage == 2 else "P, whole until the step"
        found.append(
            term("gradients", setup.gradient_width * held * trained, f"{setup.gradient_width} B {where}", ZERO12)
        )
    if not host:
        master = 4 if setup.stage or setup.width < 4 else 0
        found += [
            term("master weights", master * own * trained, f"4P{divided}, 32-bit", ZERO12),
            term(
                "Adam moments",
                8 * own * trained,
                f"8P{divided}, made by the first step",
                ZERO12,
                (*AFTER_STEP, "first step"),
            ),
            term("32-bit gradients", 4 * own * trained if setup.stage else 0, "4P/N, while stepping", ZERO12, STEP),
        ]
    else:
        largest = 4 * shape.largest.numel + setup.gradient_width * shape.largest.numel
        found.append(term("offload staging", largest, "largest gradient, at both widths", ZERO12, ("backward",)))
    if setup.stage:
        buffers = 2 if setup.overlap else 1
        size = setup.traffic_width * setup.reduce_bucket * buffers
        found.append(term("reduce buckets", size, f"reduce_bucket_size x {buffers}", ZERO12, ("backward",)))
    return found


def _stage3(shape: ModelShape, setup: Setup) -> list[Term]:
    groups = plan_sub_groups(shape, setup)
    own = sum(group.numel for group in groups)
    here = sum(group.numel for group in groups if not group.on_host)
    trained = trained_share(shape, setup)
    kept = sum(item.numel for item in persistent(shape, setup))
    found = [term("kept whole", setup.width * kept, "parameters up to the persistence threshold", ZERO3)]
    if setup.params == "none":
        found.append(term("weights", setup.width * own, f"{setup.width}P/N", ZERO3))
    if setup.optimizer == "none":
        found.append(term("gradients", setup.gradient_width * own * trained, f"{setup.gradient_width}P/N", ZERO3))
        largest = max(group.numel for group in groups)
        found.append(
            term("32-bit gradients", 4 * largest * trained, "4 x the largest sub-group, while stepping", ZERO3, STEP)
        )
    found += [
        term("master weights", (4 if setup.width < 4 else 0) * here * trained, "4P/N, 32-bit", ZERO3),
        term("Adam moments", 8 * here * trained, "8P/N, made by the first step", ZERO3, (*AFTER_STEP, "first step")),
        term(
            "reduce bucket",
            setup.traffic_width * setup.reduce_bucket if setup.contiguous else 0,
            "reduce_bucket_size",
            ZERO3,
        ),
    ]
    if setup.hpz > 1:
        found.append(term("second partition", setup.width * shape.total / setup.hpz, "2P/hpz (ZeRO++)", ZERO3))
    return found


def _loading(shape: ModelShape, setup: Setup) -> list[Term]:
    if setup.stage == 3 and setup.whole_load:
        return [term("whole model", setup.width * shape.total, "2P: no zero.Init", ZERO3, ("load",))]
    return []


def _passes(shape: ModelShape, setup: Setup) -> list[Term]:
    size = estimate_activations(shape, setup)
    found = [
        term("activations kept", size.kept_layers, "per layer, until its backward pass", MODEL, PASS),
        term("activations of the ends", size.kept_ends, "last norm, mask, positions", MODEL, PASS),
        term(
            "logits",
            size.logits_peak,
            _loss_formula(setup),
            MODEL,
            ("loss",),
        ),
        term("logits kept", size.logits_kept, _kept_formula(setup), MODEL, ("forward",)),
        term("layer in progress", size.layer_peak, "one layer's activations and gradients", MODEL, ("backward",)),
    ]
    if setup.stage < 3:
        weight = max(item.numel for item in shape.parameters if item.layer is not None)
        found.append(term("gradient in progress", setup.width * weight, "one weight's", MODEL, ("backward",)))
        return found
    return found + _gathered(shape, setup)


def _loss_formula(setup: Setup) -> str:
    if setup.tiled_loss:
        own = "" if setup.lora else f" + {4 + setup.width} B x vocabulary x width"
        return f"one tile{own} + {4 + 2 * setup.width} B x tokens x width"
    if setup.fused_loss:
        return "12 B x 1024 tokens x vocabulary"
    return f"{LOGITS_OLD if setup.old_loss else LOGITS} B x tokens x vocabulary"


def _kept_formula(setup: Setup) -> str:
    if setup.tiled_loss or setup.fused_loss:
        return f"{setup.width if setup.tiled_loss else 2} B x tokens x width"
    return "4 B x tokens x vocabulary"


def _gathered(shape: ModelShape, setup: Setup) -> list[Term]:
    gathers = plan_gathers(shape, setup)
    width = setup.width
    biggest = max(setup.prefetch, _largest_module(shape))
    copies = width * min(biggest, gathers.peak_live)
    found = [
        term(
            "gathered weights", width * gathers.peak_live, "whole at once, over one micro batch", FETCH, ("backward",)
        ),
        term(
            "gathered weights", width * gathers.live_at_turn, "whole when the loss is known", FETCH, ("forward", "loss")
        ),
        term("gather copies", copies, "torch.cat of one fetch", FETCH, ("backward",)),
        term(
            "reduce copy",
            setup.traffic_width * _reduced(shape, setup),
            "one reduce-scatter's input",
            ZERO3,
            ("backward",),
        ),
        term("gradient in progress", width * shape.largest.numel, "the largest weight's", MODEL, ("backward",)),
    ]
    if setup.native_linear:
        layers = sum(item.numel for item in shape.parameters if item.layer is not None)
        kept = shape.layer_max if setup.checkpointing else layers
        size = max(0, kept - gathers.live_at_turn)
        found.append(
            term("weights kept by autograd", width * size, "no memory-efficient linear", ZERO3, ("loss", "backward"))
        )
    return found


def _largest_module(shape: ModelShape) -> int:
    sizes: dict[str, int] = {}
    for item in shape.parameters:
        sizes[item.module] = sizes.get(item.module, 0) + item.numel
    return max(sizes.values())


def _reduced(shape: ModelShape, setup: Setup) -> int:
    largest = max(item.numel for item in shape.parameters)
    return max(min(setup.reduce_bucket, shape.total), slice_of(shape.largest, 1) if largest else 0)
