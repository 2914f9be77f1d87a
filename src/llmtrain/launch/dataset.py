"""What ``llmtrain data`` does: recognise, tokenize once, count."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmtrain.errors import UsageError
from llmtrain.launch.job import Selection, python_on, read_material
from llmtrain.launch.render import render
from llmtrain.launch.tokens import find_set, tokenize
from llmtrain.spec.hostfile import read_hostfile
from llmtrain.spec.modelinfo import read_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmtrain.spec.runspec import RunSpec


@dataclass(frozen=True, kw_only=True)
class DataSummary:
    """What became of a run's data."""

    files: tuple[dict[str, Any], ...]
    """Path, format, examples, bytes and ignored keys of each training file."""
    counts: dict[str, Any]
    """What the training's own code counted, see ``train/tokenized``."""
    place: str
    """Where the tokenized rows lie."""
    reused: bool
    """Whether they lay there already."""
    batch: int | None
    """Rows of an optimizer step; None where neither batch nor hosts say it."""

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps of one pass."""
        return math.ceil(self.counts["rows"] / self.batch) if self.batch else None

    def to_json(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
        return {
            "schema": 1,
            "files": list(self.files),
            **self.counts,
            "batch": self.batch,
            "steps_per_epoch": self.steps_per_epoch,
            "tokenized": self.place,
            "reused": self.reused,
        }


def summarise(spec: RunSpec, tell: Callable[[str], None]) -> DataSummary:
    """Read, tokenize unless that was done, and count.

    Args:
        spec: the run; needs model and data.
        tell: called with what is going on.

    Raises:
        UsageError: model or data are not named.
        InputFileError: one of them cannot be used.
    """
    if spec.model.path is None:
        raise UsageError("--model DIR is missing", where="command line", fix="add --model DIR: its tokenizer is used")
    if not (spec.data.path or spec.data.mix):
        raise UsageError("--data PATH is missing", where="command line", fix="add --data PATH")
    material = read_material(spec, read_model(spec.model.path))
    reused = find_set(spec, material) is not None
    tell("tokenized already" if reused else f"tokenizing {material.total.examples} examples")
    first = read_hostfile(spec.hosts).names[0] if spec.hosts else "localhost"
    counts, place = tokenize(spec, material, python=python_on(spec, first))
    files = tuple(
        {
            "path": source.path,
            "format": report.format,
            "examples": report.examples,
            "bytes": report.bytes,
            "weight": source.weight,
            "ignored": list(report.ignored),
        }
        for source, report in material.files
    )
    return DataSummary(files=files, counts=counts, place=str(place), reused=reused, batch=_batch(spec))


def _batch(spec: RunSpec) -> int | None:
    if spec.hosts and spec.config:
        return render(spec, Selection()).batch.global_
    return spec.batch.global_
