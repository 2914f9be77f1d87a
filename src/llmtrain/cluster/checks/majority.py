"""Which hosts differ from the others. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

V = TypeVar("V")


def odd_ones(values: Mapping[str, V | None]) -> list[tuple[str, V, V]]:
    """(host, its value, the commonest value) of every host that differs; unknown values are nobody's fault.

    The host that comes first wins a tie.
    """
    present = [value for value in values.values() if value is not None]
    if len(set(present)) < 2:
        return []
    wanted = Counter(present).most_common(1)[0][0]
    return [(host, value, wanted) for host, value in values.items() if value is not None and value != wanted]
