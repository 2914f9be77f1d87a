"""Tokenize a run's data once, on the head: ``python -m llmtrain.train.tokenized RUN_JSON TARGET``.

Writes the rows that ranks would make, in as many blocks as RUN_JSON has ranks, to the new folder TARGET, and prints
what became of the data as one JSON document.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.errors import InputFileError, LlmtrainError
from llmtrain.process import write_json
from llmtrain.train.data import SET, cache_dir, read_training_data, write_tokenized
from llmtrain.train.masking import IGNORED
from llmtrain.train.runjson import RankRun, read_run
from llmtrain.train.templates import load_tokenizer

if TYPE_CHECKING:
    from llmtrain.train.data import TrainingData

SAMPLE_TOKENS = 600
"""As much of the sample is shown."""


def tokenize(run: RankRun, target: Path) -> dict[str, Any]:
    """Make the set unless it is there, and say what became of the data.

    Raises:
        InputFileError: an example cannot be used.
    """
    tokenizer, template = load_tokenizer(run)
    if run.data.tokenized is None:
        try:
            _write_set(run, tokenizer, template, target)
        finally:
            shutil.rmtree(run.run_dir, ignore_errors=True)
        run = dataclasses.replace(run, data=dataclasses.replace(run.data, tokenized=str(target)))
    report = _describe(run, read_training_data(run), tokenizer, _lengths(target))
    return {**report, "template": None if template is None else f"{template.name} ({template.reason})"}


def _write_set(run: RankRun, tokenizer: Any, template: Any, target: Path) -> None:
    context = multiprocessing.get_context("fork")  # the tokenizer is shared as it lies
    with context.Pool(len(run.ranks)) as pool:
        jobs = [pool.apply_async(_write_block, (run, block, tokenizer, template)) for block in range(len(run.ranks))]
        for problem in [job.get() for job in jobs]:
            if problem:
                raise InputFileError(problem[0], where=problem[1], fix=problem[2])
    folder = cache_dir(run)
    write_json(folder / SET, {"schema": 1, "blocks": len(run.ranks)})
    try:
        folder.rename(target)
    except OSError:
        if not (target / SET).is_file():  # else another one was first, with the same
            raise


def _write_block(run: RankRun, block: int, tokenizer: Any, template: Any) -> tuple[str, str | None, str | None] | None:
    """An error as its parts, since not every exception survives the way between processes."""
    try:
        write_tokenized(run, block, tokenizer, template, tick=lambda: None)
    except LlmtrainError as problem:
        return problem.error, problem.where, problem.fix
    return None


def _lengths(folder: Path) -> dict[int, int]:
    """Tokens of an example before any cut -> how many examples have so many, over all training files."""
    found: collections.Counter[int] = collections.Counter()
    for path in folder.glob("train*-*.json"):
        for length, count in json.loads(path.read_text(encoding="utf-8"))["lengths"].items():
            found[int(length)] += count
    return dict(sorted(found.items()))


def _describe(run: RankRun, data: TrainingData, tokenizer: Any, lengths: dict[int, int]) -> dict[str, Any]:
    facts = data.facts
    seen: set[bytes] = set()
    kept = 0
    rows = data.train.with_format("arrow")
    for start in range(0, data.train_rows, 1000):
        for ids in rows[start : min(start + 1000, data.train_rows)]["input_ids"]:
            kept += 1
            seen.add(hash_row(ids.as_py()))
    first = data.train[0]
    return {
        "examples": facts.examples,
        "trained_on": data.train_rows,
        "held_out": data.eval_rows,
        "dropped": facts.dropped,
        "truncated": facts.truncated,
        "duplicates": kept - len(seen),
        "unstopped": facts.unstopped,
        "split": facts.split,
        "tokens": facts.tokens,
        "trained_tokens": facts.trained_tokens,
        "method": facts.method,
        "digest_sha256": facts.digest_sha256,
        "rows": data.step_rows,
        "packing": data.packs is not None,
        "max_length": run.data.max_length,
        "lengths": {str(length): count for length, count in lengths.items()},
        "sample": render_sample(first["input_ids"][:SAMPLE_TOKENS], first["labels"], tokenizer),
    }


def hash_row(ids: list[int]) -> bytes:
    """Short name of a row; equal rows have equal names."""
    return hashlib.blake2b(json.dumps(ids).encode(), digest_size=12).digest()


def render_sample(ids: list[int], labels: list[int], tokenizer: Any) -> list[dict[str, Any]]:
    """Text of a row in pieces that are trained on, or not."""
    pairs = zip(ids, labels, strict=False)
    groups = itertools.groupby(pairs, key=lambda pair: pair[1] != IGNORED)
    return [
        {"text": tokenizer.decode([token for token, _ in group], skip_special_tokens=False), "trained": trained}
        for trained, group in groups
    ]


def main(argv: list[str]) -> int:
    """``RUN_JSON TARGET``; errors go to standard output as JSON, since libraries write to the other."""
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    run_json, target = argv
    try:
        report = tokenize(read_run(Path(run_json)), Path(target))
    except LlmtrainError as problem:
        report = {"error": problem.error, "where": problem.where, "fix": problem.fix}
    sys.stdout.write("\n" + json.dumps(report) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
