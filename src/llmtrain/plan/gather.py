"""Which weights ZeRO-3 gathers in one micro batch, when it lets go of them, and how many are whole at once.

Follows DeepSpeed 0.19's ``partitioned_param_coordinator.py`` step by step over the sequence of modules, because
neither the traffic nor the live set follows from the sizes alone: fetching ahead and keeping for reuse interact.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from llmtrain.plan.partition import slice_of
from llmtrain.plan.setup import Setup

if TYPE_CHECKING:
    from llmtrain.plan.shape import ModelShape, Parameter

BEFORE_ATTENTION = re.compile(r"input_layernorm|ln_1$|norm_1$|ln_attn|ln_mlp|self_attn_layer_norm|attention_layernorm$")
AFTER_ATTENTION = re.compile(r"post_attention_layernorm|ln_2$|norm_2$|pre_feedforward|feedforward_layernorm$")

ACTIVATED = (".gate_proj", ".gate_up_proj", ".fc1", ".fc_in", ".c_fc", ".dense_h_to_4h")
"""Linear layers that are followed by the module of an activation function."""


@dataclass(frozen=True, kw_only=True)
class Module:
    """A module with weights of its own, fetched as one."""

    name: str
    """As in ``model.named_modules()``."""
    parameters: tuple[Parameter, ...]
    """Its own weights."""
    layer: int | None
    """Decoder layer it belongs to."""


@dataclass(frozen=True, kw_only=True)
class Gathers:
    """What one micro batch gathers, once the trace is complete."""

    forward: int
    """Numbers gathered in the forward pass, padding included."""
    backward: int
    """Numbers gathered in the backward pass, padding included."""
    calls: int
    """Collectives."""
    peak_live: int
    """Most numbers whole at once, besides persistent ones."""
    live_at_turn: int
    """Numbers whole when the loss is computed."""


def plan_modules(shape: ModelShape) -> tuple[Module, ...]:
    """Modules in the order of the forward pass."""
    by_name: dict[str, list[Parameter]] = {}
    for item in shape.parameters:
        by_name.setdefault(item.module, []).append(item)
    modules = [Module(name=name, parameters=tuple(items), layer=items[0].layer) for name, items in by_name.items()]
    head = [module for module in modules if module.name == "lm_head"]
    before = [m for m in modules if m.layer is None and m.name != "lm_head" and not _is_last_norm(m)]
    last = [m for m in modules if m.layer is None and m.name != "lm_head" and _is_last_norm(m)]
    if shape.tied:
        embedding = next(m for m in before if m.parameters[0].shape[0] == shape.vocab)
        head = [Module(name="lm_head", parameters=embedding.parameters[:1], layer=None)]
    layers: list[Module] = []
    for index in range(shape.layers):
        own = [module for module in modules if module.layer == index]
        layers += sorted(own, key=_place_in_layer)
    return tuple(before + layers + last + head)


def _is_last_norm(module: Module) -> bool:
    return re.search(r"(^|\.)(norm|ln_f|norm_f|final_layer_?norm)$", module.name) is not None


def _place_in_layer(module: Module) -> int:
    name = module.name
    if AFTER_ATTENTION.search(name):
        return 2
    if BEFORE_ATTENTION.search(name):
        return 0
    if re.search(r"attn|attention", name):
        return 1
    return 4 if "norm" in name else 3


def plan_gathers(shape: ModelShape, setup: Setup) -> Gathers:
    """Walk through one micro batch."""
    limits = (setup.prefetch, setup.persist, setup.max_live, setup.max_reuse)
    return _walk_once(shape, setup.ranks, limits, setup.checkpointing)


@lru_cache(maxsize=64)
def _walk_once(shape: ModelShape, ranks: int, limits: tuple[int, int, int, int], checkpointing: bool) -> Gathers:
    prefetch, persist, max_live, max_reuse = limits
    setup = Setup(
        stage=3,
        ranks=ranks,
        slots=1,
        micro=1,
        accumulation=1,
        length=1,
        checkpointing=checkpointing,
        prefetch=prefetch,
        persist=persist,
        max_live=max_live,
        max_reuse=max_reuse,
    )
    modules = _with_containers(plan_modules(shape))
    order = [*modules, *_backward_order(modules, checkpointing=setup.checkpointing)]
    keeps = {item.name for module in modules for item in module.parameters if item.numel <= setup.persist}
    return _Coordinator(order, len(modules), keeps, setup).run()


def _with_containers(modules: tuple[Module, ...]) -> tuple[Module, ...]:
    """Add the modules around them: entering one fetches ahead although it has no weights of its own."""
    found: list[Module] = []
    inside: list[str] = []
    for module in modules:
        around = ["", *_ancestors(module.name)]
        entered = [name for name in around if name not in inside]
        found += [Module(name=name, parameters=(), layer=_layer_of(name, module)) for name in entered]
        inside = around
        found.append(module)
        if module.name.endswith(ACTIVATED):
            found.append(Module(name=f"{around[-1]}.act_fn", parameters=(), layer=module.layer))
        elif module.layer is None and module is modules[0]:
            found.append(Module(name="rotary_emb", parameters=(), layer=None))
    return tuple(found)


def _ancestors(name: str) -> list[str]:
    parts = name.split(".")[:-1]
    joined = [".".join(parts[: end + 1]) for end in range(len(parts))]
    return [item for item in joined if not re.search(r"(^|\.)(layers|h|blocks|decoder)$", item)]


def _layer_of(name: str, module: Module) -> int | None:
    return module.layer if re.search(r"\.\d+(\.|$)", name) else None


def _backward_order(modules: tuple[Module, ...], *, checkpointing: bool) -> list[Module]:
    backwards = [module for module in reversed(modules) if module.name != "rotary_emb"]
    if not checkpointing:
        return backwards
    order: list[Module] = []
    done: set[int] = set()
    for module in backwards:
        order.append(module)
        if module.layer is not None and module.layer not in done:
            # The first gradient that needs an activation of the layer makes its forward pass run again.
            done.add(module.layer)
            order += [other for other in modules if other.layer == module.layer]
    return order


@dataclass
class _Walk:
    """Sums of one walk."""

    gathered: list[int] = field(default_factory=lambda: [0, 0])
    calls: int = 0
    live: int = 0
    peak: int = 0
    at_turn: int = 0


class _Coordinator:
    def __init__(self, order: list[Module], turn: int, keeps: set[str], setup: Setup) -> None:
        self._order, self._turn, self._keeps, self._setup = order, turn, keeps, setup
        self._queue = deque((item, step) for step, module in enumerate(order) for item in module.parameters)
        self._whole: set[str] = set()
        self._fetched_for: dict[str, int] = {}
        self._walk = _Walk()

    def run(self) -> Gathers:
        seen_layers: set[int] = set()
        open_modules: dict[str, Module] = {}
        for step, module in enumerate(self._order):
            backward = step >= self._turn
            self._fetch(module, step, backward=backward)
            if step == self._turn - 1:
                self._walk.at_turn = self._walk.live
            recomputing = backward and module.name in open_modules
            starts = backward and self._setup.checkpointing and module.layer not in (None, *seen_layers)
            if starts and module.layer is not None:
                # Its backward pass stays open while the whole layer is computed again.
                seen_layers.add(module.layer)
                open_modules[module.name] = module
                continue
            if recomputing:
                # Recomputation stops inside this module, so it is not released before its own gradient is done.
                del open_modules[module.name]
            self._release(module, step + 1)
        walk = self._walk
        return Gathers(
            forward=walk.gathered[0],
            backward=walk.gathered[1],
            calls=walk.calls,
            peak_live=walk.peak,
            live_at_turn=walk.at_turn,
        )

    def _gather(self, items: list[Parameter], *, backward: bool) -> None:
        fresh = {item.name: item for item in items if item.name not in self._whole | self._keeps}
        if not fresh:
            return
        ranks = self._setup.ranks
        self._walk.calls += 1
        self._walk.gathered[backward] += sum(slice_of(item, ranks) * ranks for item in fresh.values())
        self._walk.live += sum(item.numel for item in fresh.values())
        self._walk.peak = max(self._walk.peak, self._walk.live)
        self._whole |= set(fresh)

    def _fetch(self, module: Module, step: int, *, backward: bool) -> None:
        self._gather(list(module.parameters), backward=backward)
        waiting = {item.name for item in module.parameters if self._fetched_for.get(item.name, -1) < step}
        while self._queue and waiting:
            item, used_at = self._queue.popleft()
            self._fetched_for[item.name] = used_at
            waiting.discard(item.name)
        if self._setup.prefetch > 0:
            self._prefetch(backward=backward)

    def _prefetch(self, *, backward: bool) -> None:
        room = min(self._setup.max_live - self._walk.live, self._setup.prefetch)
        chosen: dict[str, Parameter] = {}
        numel = 0
        while self._queue and numel < room:
            item, used_at = self._queue.popleft()
            self._fetched_for[item.name] = max(self._fetched_for.get(item.name, -1), used_at)
            if item.name not in self._whole | self._keeps | set(chosen):
                chosen[item.name] = item
                numel += item.numel
        self._gather(list(chosen.values()), backward=backward)

    def _release(self, module: Module, step: int) -> None:
        going = {
            item.name: item
            for item in module.parameters
            if item.name not in self._keeps and self._fetched_for.get(item.name, -1) <= step
        }
        distance = 0
        for other in self._order[step:]:
            if distance >= self._setup.max_reuse:
                break
            for item in other.parameters:
                going.pop(item.name, None)
                distance += item.numel
        for name, item in going.items():
            if name in self._whole:
                self._whole.discard(name)
                self._walk.live -= item.numel
