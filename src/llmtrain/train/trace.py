"""Trace the activations of the real model class: every tensor of one forward and backward pass, none of them real.

Fake tensors have shapes but no numbers, so a 7B model takes a few seconds and no memory. Called by
``llmtrain plan --trace`` and by the tests that hold the formulas of ``plan/activations.py``.
"""

from __future__ import annotations

import json
import sys
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoConfig, AutoModelForCausalLM

ROUND = 512
"""CUDA's allocator hands out multiples of this many bytes."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Bytes of one micro batch on one rank, weights and their accumulated gradients left out."""

    forward_end: int
    """Held when the loss is known."""
    peak: int
    """Most at any moment of forward and backward, the gradient of the weight being computed included."""


class _Ledger(TorchDispatchMode):  # type: ignore[misc]
    """Adds a storage when an operation returns it and takes it off when the last reference goes."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: set[int] = set()

    def ignore(self, tensor: torch.Tensor) -> None:
        self._known.add(tensor.untyped_storage()._cdata)  # noqa: SLF001

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        for item in tree_iter(result):
            if isinstance(item, torch.Tensor):
                self._add(item.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata  # noqa: SLF001
        if key in self._known:
            return
        self._known.add(key)
        size = -(-storage.nbytes() // ROUND) * ROUND
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def trace_activations(
    keys: dict[str, Any], *, micro: int, length: int, attention: str, checkpointing: bool, dtype: str = "bf16"
) -> Trace:
    """Run one fake micro batch of the class that ``config.json`` names.

    Args:
        keys: the parsed config.json.
        micro: rows.
        length: tokens of a row.
        attention: ``eager`` or ``sdpa``.
        checkpointing: recompute each layer in the backward pass, as the Trainer does.
        dtype: precision of the model.
    """
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    fields = {key: value for key, value in keys.items() if key not in ("model_type", "torch_dtype", "dtype")}
    config = AutoConfig.for_model(keys["model_type"], **fields)
    config.use_cache = False
    config._attn_implementation = attention  # noqa: SLF001
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = AutoModelForCausalLM.from_config(config, dtype=kind).train()
        if checkpointing:
            _checkpoint(model)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(_forget)
        ids = torch.zeros((micro, length), dtype=torch.long)
        ledger = _Ledger()
        for tensor in (*model.parameters(), *model.buffers(), ids):
            ledger.ignore(tensor)
        with ledger:
            loss = model(input_ids=ids, labels=ids).loss
            end = ledger.live
            loss.backward()
    return Trace(forward_end=end, peak=ledger.peak)


def _forget(parameter: torch.Tensor) -> None:
    """ZeRO moves a gradient into its bucket as soon as it is there."""
    parameter.grad = None


def _checkpoint(model: Any) -> None:
    newer = getattr(model, "activation_checkpointing_enable", None)
    if newer is not None:
        newer()  # transformers 5: not reentrant anyway
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def main() -> None:
    """``python -m llmtrain.train.trace JSON``: keyword arguments in, ``forward_end`` and ``peak`` out."""
    found = trace_activations(**json.loads(sys.argv[1]))
    print(json.dumps({"forward_end": found.forward_end, "peak": found.peak}))  # noqa: T201


if __name__ == "__main__":
    main()
