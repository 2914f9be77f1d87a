"""From a data file to what the trainer reads: tokenized once per host, memory-mapped by every rank.

The ranks of a host share the work: each tokenizes one block of the file, and the blocks are read in order, so that
the rows are the same however many ranks there are.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.errors import InputFileError
from llmtrain.process import write_json
from llmtrain.spec.dataset import iter_examples
from llmtrain.spec.source import Source
from llmtrain.train.masking import IGNORED, Encoded, MaskError, encode_by_prefixes, encode_marked, encode_text
from llmtrain.train.packing import choose_packs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from llmtrain.train.runjson import RankRun
    from llmtrain.train.templates import Template

CHUNK_ROWS = 512
SET = "set.json"
"""File of a set that was tokenized beforehand; says in how many blocks it lies."""


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """What became of a data file."""

    path: str
    """The file."""
    digest_sha256: str
    """SHA-256 of its bytes, in hex."""
    method: str
    """How the trained tokens were found: ``template markers``, ``template prefixes`` or ``all tokens``."""
    examples: int
    """Examples in the file."""
    dropped: int
    """Examples left out because nothing to learn from remained within the length limit."""
    truncated: int
    """Examples that were kept but cut at the length limit."""
    split: int
    """Conversations whose prompts and answers were tokenized apart (see ``masking``)."""
    unstopped: int
    """Examples with an answer that no special token ends, so that the model cannot learn to stop there."""
    tokens: int
    """Tokens in the kept examples."""
    trained_tokens: int
    """Tokens among them that are trained on."""
    stop_tokens: tuple[int, ...]
    """Ids of the tokens that end what is trained on; generation must stop at them."""

    @property
    def kept(self) -> int:
        """Examples that are trained on; also the row of the filler, which is stored after them."""
        return self.examples - self.dropped


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """The rows of a run as memory-mapped datasets; each has one more row, the filler, at its end."""

    train: Any
    """``datasets.Dataset`` of ``input_ids`` and ``labels`` to train on."""
    train_rows: int
    """Number of examples in ``train``; also the index of its filler."""
    evaluation: Any
    """The held-out examples, with fillers up to a whole number of batches over all ranks; or None."""
    eval_rows: int
    """Number of examples held out."""
    facts: DataFacts
    """About the training file."""
    packs: tuple[tuple[int, ...], ...] | None = None
    """Indices into ``train`` of the examples that share a row, row by row; None without packing."""

    @property
    def step_rows(self) -> int:
        """Rows of one epoch: what the batch counts."""
        return self.train_rows if self.packs is None else len(self.packs)


# --- once per host ---------------------------------------------------------------------------------------------


def write_tokenized(
    run: RankRun, block: int, tokenizer: Any, template: Template | None, tick: Callable[[], None]
) -> None:
    """Tokenize one block of the run's data into its cache on this host.

    Args:
        run: the run.
        block: the local rank; there are as many blocks as ranks on this host.
        tokenizer: the model's, with the chosen chat template.
        template: the chosen template; None for plain text.
        tick: called now and then, to show that it goes on.

    Raises:
        InputFileError: an example cannot be masked.
    """
    blocks = len(run.ranks)
    filler = _filler(tokenizer) if block == blocks - 1 else None
    for name, source in _files(run):
        count = sum(1 for _ in iter_examples(source))
        bounds = range(count * block // blocks, count * (block + 1) // blocks)
        rows = _iter_encoded(source, bounds, tokenizer, template)
        stem = cache_dir(run) / f"{name}-{block}"
        lengths: collections.Counter[int] = collections.Counter()
        counted = _count_lengths(rows, lengths)
        counts = _write_rows(stem.with_suffix(".arrow"), counted, run.data.max_length, filler, tick)
        method = "all tokens" if template is None else "template " + ("markers" if template.has_markers else "prefixes")
        digest = read_digest(Path(source.path)) if block == 0 else ""
        facts = DataFacts(path=source.path, digest_sha256=digest, method=method, **counts)
        write_json(stem.with_suffix(".json"), {**dataclasses.asdict(facts), "lengths": lengths})


def _count_lengths(rows: Iterable[Encoded], lengths: collections.Counter[int]) -> Iterator[Encoded]:
    for row in rows:
        lengths[len(row.ids)] += 1
        yield row


def cache_dir(run: RankRun) -> Path:
    """Where this host keeps its tokenized rows; apart by host, because the run folder may lie on a shared disk."""
    if run.data.tokenized:
        return Path(run.data.tokenized)
    return run.run_dir / "cache" / run.host


def read_digest(path: Path) -> str:
    """SHA-256 of the bytes of a file, or of a saved dataset's files, in hex."""
    digest = hashlib.sha256()
    for part in sorted(path.rglob("*.arrow")) if path.is_dir() else [path]:
        with part.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _files(run: RankRun) -> list[tuple[str, Source]]:
    files = [(f"train{number or ''}", source) for number, source in enumerate(run.data.sources)]
    if isinstance(run.data.eval, str):
        same = run.data.format if len(run.data.sources) == 1 else "auto"
        files.append(("eval", Source(path=run.data.eval, format=same)))
    return files


def _iter_encoded(source: Source, bounds: range, tokenizer: Any, template: Template | None) -> Iterator[Encoded]:
    examples = itertools.islice(iter_examples(source), bounds.start, bounds.stop)
    for number, example in enumerate(examples, start=bounds.start + 1):
        if template is None or "text" in example:
            yield encode_text(tokenizer, example["text"])
            continue
        encode = encode_marked if template.has_markers else encode_by_prefixes
        try:
            yield encode(tokenizer, example["messages"])
        except MaskError as problem:
            raise InputFileError(
                f"example {number}: {problem}; training would be on the wrong tokens",
                where=source.path,
                fix="set data.chat_template to a template with {% generation %} blocks, or change the example",
            ) from None


def _filler(tokenizer: Any) -> list[int]:
    token = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else 0
    return [token, token]  # two, because the first token of a row is never predicted


def _write_rows(
    path: Path, rows: Iterable[Encoded], max_length: int, filler: list[int] | None, tick: Callable[[], None]
) -> dict[str, Any]:
    """Stream rows, and the filler if there is one, into an Arrow file under a temporary name; returns the counts."""
    import pyarrow as pa  # type: ignore[import-untyped]

    schema = pa.schema([("input_ids", pa.list_(pa.int32())), ("labels", pa.list_(pa.int32()))])
    counts = dict.fromkeys(("examples", "dropped", "truncated", "split", "unstopped", "tokens", "trained_tokens"), 0)
    stops: set[int] = set()

    def iter_kept() -> Iterator[tuple[list[int], list[int]]]:
        for row in rows:
            counts["examples"] += 1
            ids, labels = row.ids[:max_length], row.labels[:max_length]
            trained = sum(label != IGNORED for label in labels[1:])
            if not trained:
                counts["dropped"] += 1
                continue
            counts["truncated"] += len(row.ids) > max_length
            counts["split"] += row.split
            counts["unstopped"] += not row.stops
            counts["tokens"] += len(ids)
            counts["trained_tokens"] += trained
            if row.stops:
                stops.add(next(label for label in reversed(row.labels) if label != IGNORED))
            yield ids, labels
        if filler is not None:
            yield filler, [IGNORED] * len(filler)

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with pa.OSFile(str(partial), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        kept = iter_kept()
        while chunk := list(itertools.islice(kept, CHUNK_ROWS)):
            writer.write_batch(pa.record_batch(list(map(list, zip(*chunk, strict=True))), schema=schema))
            tick()
    partial.replace(path)
    return {**counts, "stop_tokens": tuple(sorted(stops))}


# --- on every rank ---------------------------------------------------------------------------------------------


def read_training_data(run: RankRun) -> TrainingData:
    """Open what ``write_tokenized`` left, and divide it into training and held-out rows.

    Raises:
        InputFileError: nothing is left to train on or to evaluate on.
    """
    rows, facts, kept = _read_train(run)
    filler = len(rows) - 1
    held: list[int] = []
    if isinstance(run.data.eval, float):
        every = [row for part in kept for row in part]
        held = [every[at] for at in _choose_held_out(len(every), run.data.eval, run.training.seed)]
    order = _weigh(run, kept, frozenset(held))
    train = rows if order == list(range(filler)) else rows.select([*order, filler])
    evaluation, eval_rows = None, len(held)
    if held:
        evaluation = rows.select([*held, *_fillers(run, len(held), filler)])
    if isinstance(run.data.eval, str):
        others, other = _read_rows(run, "eval")
        eval_rows = other.kept
        evaluation = others.select([*range(eval_rows), *_fillers(run, eval_rows, eval_rows)])
    packs = _pack(run, train, len(order)) if run.data.packing else None
    return TrainingData(
        train=train,
        train_rows=len(order),
        evaluation=evaluation,
        eval_rows=eval_rows,
        packs=packs,
        facts=facts,
    )


def _pack(run: RankRun, train: Any, count: int) -> tuple[tuple[int, ...], ...]:
    import pyarrow.compute as pc  # type: ignore[import-untyped]

    table = train.with_format("arrow")
    lengths: list[int] = []
    for start in range(0, count, CHUNK_ROWS):
        lengths += pc.list_value_length(table[start : min(start + CHUNK_ROWS, count)]["input_ids"]).to_pylist()
    return tuple(map(tuple, choose_packs(lengths, run.data.max_length, run.training.seed)))


def _read_train(run: RankRun) -> tuple[Any, DataFacts, list[range]]:
    """Rows of all training files one after the other, each followed by its filler; which of them are examples."""
    from datasets import concatenate_datasets

    parts = [_read_rows(run, f"train{number or ''}") for number in range(len(run.data.sources))]
    kept, start = [], 0
    for _, facts in parts:
        kept.append(range(start, start + facts.kept))
        start += facts.kept + 1
    if len(parts) == 1:
        return (*parts[0], kept)
    total = _add_up([dataclasses.asdict(facts) for _, facts in parts])
    digests = "".join(facts.digest_sha256 for _, facts in parts)
    named = " + ".join(facts.path for _, facts in parts)
    total = dataclasses.replace(total, digest_sha256=hashlib.sha256(digests.encode()).hexdigest(), path=named)
    return concatenate_datasets([rows for rows, _ in parts]), total, kept


def _weigh(run: RankRun, kept: list[range], held: frozenset[int]) -> list[int]:
    """Rows of one epoch: each file as many times as its weight says, a part of a time being a seeded draw."""
    order: list[int] = []
    for number, (source, rows) in enumerate(zip(run.data.sources, kept, strict=True)):
        left = [row for row in rows if row not in held]
        whole, part = divmod(source.weight, 1)
        draw = random.Random(f"{run.training.seed}/mix/{number}")  # noqa: S311 - reproducible on purpose
        order += left * int(whole) + sorted(draw.sample(left, round(part * len(left))))
    if not order:
        raise InputFileError("data.mix: the weights leave no example to train on", fix="raise a weight")
    return order


def _read_rows(run: RankRun, name: str) -> tuple[Any, DataFacts]:
    from datasets import Dataset, concatenate_datasets

    stems = [cache_dir(run) / f"{name}-{block}" for block in range(_count_blocks(run))]
    facts = _add_up([_read_facts(stem.with_suffix(".json")) for stem in stems])
    if not facts.kept:
        raise InputFileError(
            f"none of its {facts.examples} examples has anything to learn within {run.data.max_length} tokens",
            where=facts.path,
            fix="raise data.max_length",
        )
    return concatenate_datasets([Dataset.from_file(str(stem.with_suffix(".arrow"))) for stem in stems]), facts


def _count_blocks(run: RankRun) -> int:
    if not run.data.tokenized:
        return len(run.ranks)
    return int(json.loads((cache_dir(run) / SET).read_text(encoding="utf-8"))["blocks"])


def _read_facts(path: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    del facts["lengths"]
    return facts


def _add_up(blocks: list[dict[str, Any]]) -> DataFacts:
    counts = {name: sum(block[name] for block in blocks) for name, value in blocks[0].items() if isinstance(value, int)}
    stops = {token for block in blocks for token in block["stop_tokens"]}
    return DataFacts(**{**blocks[0], **counts, "stop_tokens": tuple(sorted(stops))})


def _choose_held_out(kept: int, share: float, seed: int) -> list[int]:
    """Rows for the evaluation: a seeded draw of at least one, leaving at least one to train on."""
    count = max(1, round(kept * share))
    if count >= kept:
        raise InputFileError(
            f"data.eval: holding out {share:g} of {kept} examples leaves none to train on", fix="use more data"
        )
    return sorted(random.Random(seed).sample(range(kept), count))  # noqa: S311 - reproducible on purpose


def _fillers(run: RankRun, rows: int, filler: int) -> list[int]:
    """Row indices that make the evaluation a whole number of micro-batches for every rank.

    Otherwise the loader repeats examples, and the loss depends on the number of ranks.
    """
    return [filler] * (-rows % (run.batch.micro * run.world_size))


class EpochOrder:
    """The order of rows in each epoch: every example once, then fillers up to a whole number of steps.

    A sampler for PyTorch's loader. The order depends on seed and epoch alone, not on ranks or hosts: the loader
    deals micro-batches to the ranks in turn, so a step sees the same examples however many ranks there are.
    """

    def __init__(self, *, rows: int, step: int, seed: int) -> None:
        """Args: *rows* examples before the filler, *step* examples per optimizer step."""
        self._rows = rows
        self._step = step
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration is for; called by the loader."""
        self._epoch = epoch

    def __len__(self) -> int:
        return math.ceil(self._rows / self._step) * self._step

    def __iter__(self) -> Iterator[int]:
        order = list(range(self._rows))
        random.Random(f"{self._seed}/{self._epoch}").shuffle(order)  # noqa: S311 - reproducible on purpose
        yield from order
        yield from itertools.repeat(self._rows, len(self) - self._rows)
