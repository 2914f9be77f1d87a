"""Several examples in one row, none of which sees another; proven on the loaded model before the first step.

Positions start again at 0 with every example and no attention mask is given: that is how transformers is told where
examples end. SDPA and eager attention get a block-diagonal mask from it, flash attention the lengths of the blocks.
A model that mixes tokens in another way (a recurrence, attention of its own code) would let examples see each other
and would not say so, which is why ``prove_isolation`` asks the model itself.
"""

from __future__ import annotations

import bisect
import itertools
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmtrain.errors import InputFileError
from llmtrain.train.masking import IGNORED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llmtrain.train.runjson import ModelPart

LEAK_SHARE = 0.01
"""Of what another example changes where nothing isolates it; rounding is far below, a real leak far above."""


def choose_packs(lengths: Sequence[int], capacity: int, seed: int) -> list[list[int]]:
    """Which examples share a row: each goes, in a seeded order, into the fullest row that still has room for it.

    Args:
        lengths: tokens of each example, none more than *capacity*.
        capacity: tokens of a row.
        seed: of the order; the result depends on nothing else.

    Returns:
        Indices into *lengths*, each exactly once, row by row.
    """
    order = list(range(len(lengths)))
    random.Random(f"{seed}/packs").shuffle(order)  # noqa: S311 - reproducible on purpose
    packs: list[list[int]] = []
    open_rows: dict[int, list[int]] = {}  # room left -> rows that have it
    rooms: list[int] = []  # its keys, sorted
    for example in order:
        at = bisect.bisect_left(rooms, lengths[example])
        if at == len(rooms):
            number, room = len(packs), capacity
            packs.append([])
        else:
            room = rooms[at]
            number = open_rows[room].pop()
            if not open_rows[room]:
                del open_rows[room], rooms[at]
        packs[number].append(example)
        left = room - lengths[example]
        if left not in open_rows:
            open_rows[left] = []
            bisect.insort(rooms, left)
        open_rows[left].append(number)
    return packs


class PackedRows:
    """The rows of a packed run for PyTorch's loader; the last one is the filler, as in the rows they are made of."""

    def __init__(self, rows: Any, packs: list[list[int]]) -> None:
        """*rows*: examples and the filler at their end; *packs*: of their indices."""
        self._rows = rows
        self._packs = packs

    def __len__(self) -> int:
        return len(self._packs) + 1

    def __getitem__(self, number: int) -> dict[str, list[int]]:
        members = self._packs[number] if number < len(self._packs) else [len(self._rows) - 1]
        found = self._rows[members]
        labels = [label for row in found["labels"] for label in [IGNORED, *row[1:]]]  # nothing comes before the first
        ids = [token for row in found["input_ids"] for token in row]
        return {"input_ids": ids, "labels": labels, "seq_lengths": [len(row) for row in found["input_ids"]]}


class PackingCollator:
    """Packed rows to one batch. Each token of padding is an example of its own, seen by none."""

    def __init__(self, pad_token: int, *, flat: bool) -> None:
        """*flat*: all rows in one, without padding, as flash attention wants it."""
        self._pad_token = pad_token
        self._flat = flat

    def __call__(self, rows: Sequence[dict[str, list[int]]]) -> dict[str, Any]:
        """``input_ids``, ``labels`` and ``position_ids``, each (rows, tokens), or (1, all tokens) if flat."""
        import torch

        positions = [[at for length in row["seq_lengths"] for at in range(length)] for row in rows]
        columns = {
            "input_ids": ([row["input_ids"] for row in rows], self._pad_token),
            "labels": ([row["labels"] for row in rows], IGNORED),
            "position_ids": (positions, 0),
        }
        if self._flat:
            return {key: torch.tensor([[*itertools.chain(*values)]]) for key, (values, _) in columns.items()}
        width = max(len(row) for row in positions)
        return {
            key: torch.tensor([[*value, *[filler] * (width - len(value))] for value in values])
            for key, (values, filler) in columns.items()
        }


def count_tokens(positions: Any) -> int:
    """Tokens of a packed batch without its padding, which is what starts at 0 and does not go on."""
    import torch

    following = torch.nn.functional.pad(positions[:, 1:], (0, 1))
    return int(positions.numel() - ((positions == 0) & (following != 1)).sum())


# --- the proof -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Isolation:
    """How much the logits of an example change when another one in its row is replaced; largest absolute change."""

    packed: float
    """In a packed row."""
    unprotected: float
    """In the same row as one text, where they must change: shows that the measurement can see a leak."""

    @property
    def proven(self) -> bool:
        """Whether the examples are isolated."""
        return self.unprotected > 0 and self.packed <= LEAK_SHARE * self.unprotected


def measure_isolation(forward: Callable[[Any, Any], Any], tokens: Sequence[int], device: Any) -> Isolation:
    """Replace the first of two examples in a row and look at the second.

    Args:
        forward: ``input_ids`` and ``position_ids``, both (1, tokens), to logits (1, tokens, vocabulary).
        tokens: at least two different ids to make examples of.
        device: where the model is.
    """
    import torch

    size = 8
    first, other, second = ([tokens[(start + at * step) % len(tokens)] for at in range(size)] for start, step in _WALKS)
    packed = torch.tensor([[*range(size), *range(size)]], device=device)
    plain = torch.arange(2 * size, device=device)[None]

    def change(positions: Any) -> float:
        rows = [torch.tensor([[*one, *second]], device=device) for one in (first, other)]
        before, after = (forward(row, positions)[0, size:].float() for row in rows)
        return float((before - after).abs().max())

    return Isolation(packed=change(packed), unprotected=change(plain))


_WALKS = ((0, 1), (1, 3), (2, 1))


def prove_isolation(engine: Any, model: ModelPart, tokens: Sequence[int], device: Any) -> Isolation:
    """Refuse to train packed rows with a model that mixes them; every rank calls this, on the model it trains.

    Raises:
        InputFileError: an example changes what the model says about another one in its row.
    """
    import torch

    was_training = engine.training
    engine.eval()
    with torch.no_grad():
        found = measure_isolation(
            lambda ids, positions: engine(input_ids=ids, position_ids=positions, use_cache=False).logits, tokens, device
        )
    engine.train(was_training)
    if found.proven or found.unprotected != found.unprotected:  # a model that says NaN is told of at its first step
        return found
    raise InputFileError(
        f"data.packing: with {model.attention} attention this model lets examples of one row see each other"
        f" (logits change by {found.packed:.3g}; by {found.unprotected:.3g} without any isolation)",
        where=model.path,
        fix="set data.packing to false, or model.attention to sdpa or flash_attention_2",
    )
