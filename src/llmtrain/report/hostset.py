"""Many host names in few characters: ``gpu[001-016,020]``."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_NUMBERED = re.compile(r"(.*?)(\d+)(\D*)")


def fold_hosts(names: Iterable[str]) -> str:
    """Names that differ in one number only, as ranges; order of first appearance."""
    groups: dict[tuple[str, str, int], list[int]] = defaultdict(list)
    single: dict[tuple[str, str, int], str] = {}
    for name in dict.fromkeys(names):
        match = _NUMBERED.fullmatch(name)
        if match is None:
            key = (name, "", -1)
            groups[key] = []
        else:
            head, digits, tail = match.groups()
            # Numbers with a leading zero have a fixed width; others may grow.
            key = (head, tail, len(digits) if digits.startswith("0") else _width(groups, head, tail, len(digits)))
            groups[key].append(int(digits))
        single.setdefault(key, name)
    return ",".join(_render(key, numbers, single[key]) for key, numbers in groups.items())


def _width(groups: dict[tuple[str, str, int], list[int]], head: str, tail: str, length: int) -> int:
    """A number without a leading zero joins padded ones of its length."""
    return length if (head, tail, length) in groups else 0


def _render(key: tuple[str, str, int], numbers: list[int], name: str) -> str:
    if len(numbers) < 2:
        return name
    head, tail, width = key
    return f"{head}[{','.join(_ranges(sorted(numbers), width))}]{tail}"


def _ranges(numbers: list[int], width: int) -> list[str]:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [f"{run[0]:0{width}d}" if len(run) == 1 else f"{run[0]:0{width}d}-{run[-1]:0{width}d}" for run in runs]
