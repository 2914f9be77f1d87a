"""What the ranks read from data in different shapes, and from several files at once."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import pytest
from tests.spec.test_tables import CONTAINERS, SHAPES, write
from tests.train.runs import make_run

from llmtrain.spec.source import Source
from llmtrain.train.runjson import read_run


@pytest.fixture(scope="module")
def tokenizer_and_template(tiny_model):
    """The tiny model's tokenizer with its template."""
    from transformers import AutoTokenizer

    from llmtrain.train.templates import choose_template

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    template = choose_template(None, tokenizer)
    tokenizer.chat_template = template.text
    return tokenizer, template


def read(folder, tokenizer_and_template, sources, **data):
    """Rows of an epoch as (tokens, labels), as rank 0 of 2 on this host reads them, without the filler."""
    from llmtrain.train.data import read_training_data, write_tokenized

    path = make_run(folder, "/m", sources[0].path, data_part={"sources": [one.to_json() for one in sources], **data})
    run = read_run(path)
    for block in range(2):
        write_tokenized(run, block, *tokenizer_and_template, tick=lambda: None)
    found = read_training_data(run)
    rows = [(tuple(row["input_ids"]), tuple(row["labels"])) for row in found.train]
    assert len(rows) == found.train_rows + 1
    return rows[:-1], found


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_format_gives_the_same_tokens_and_masks(tmp_path, tokenizer_and_template):
    """One content in every shape and container gives identical token sequences and masks."""
    seen = {}
    for shape, rows in SHAPES.items():
        for container in CONTAINERS:
            folder = tmp_path / f"{shape}-{container}"
            folder.mkdir()
            source = Source(path=str(write(folder, rows, container)))
            seen[shape, container], _ = read(folder / "run", tokenizer_and_template, [source])
    first = seen["messages", "jsonl"]
    assert len(first) == 3
    assert all(any(label != -100 for label in labels) for _, labels in first)
    assert all(found == first for found in seen.values())


def test_mix_weighs_its_files(tmp_path, tokenizer_and_template):
    """A file of weight 2 is seen twice in an epoch, one of 0.5 by half, and the draw is the same each time."""
    sources = []
    for number, weight in enumerate((2.0, 0.5)):
        path = tmp_path / f"{number}.jsonl"
        lines = [{"prompt": f"{number} {at}", "completion": "a"} for at in range(4)]
        path.write_text("\n".join(map(json.dumps, lines)))
        sources.append(Source(path=str(path), weight=weight))
    rows, found = read(tmp_path / "run", tokenizer_and_template, sources)
    counts = Counter(rows)
    assert sorted(counts.values()) == [1, 1, 2, 2, 2, 2]
    assert (found.train_rows, found.facts.examples) == (10, 8)
    assert " + " in found.facts.path
    again, _ = read(tmp_path / "again", tokenizer_and_template, sources)
    assert again == rows


def test_held_out_examples_are_never_trained_on(tmp_path, tokenizer_and_template):
    """Examples are held out before they are repeated, and a text file may stand beside conversations."""
    chat, text = tmp_path / "chat.jsonl", tmp_path / "text.txt"
    chat.write_text("\n".join(json.dumps({"prompt": f"q{at}", "completion": "a"}) for at in range(6)))
    text.write_text("\n\n".join(f"text {at}" for at in range(4)))
    sources = [Source(path=str(chat), weight=3.0), Source(path=str(text))]
    rows, found = read(tmp_path / "run", tokenizer_and_template, sources, eval=0.3, format="mixed")
    held = {tuple(row["input_ids"]) for row in found.evaluation.select(range(found.eval_rows))}
    assert found.eval_rows == 3
    assert not held & {tokens for tokens, _ in rows}
    assert len({tokens for tokens, _ in rows} | held) == 10


def test_weights_that_leave_nothing(tmp_path, tokenizer_and_template):
    """A mixture without any example is an error, not an endless epoch."""
    from llmtrain.errors import InputFileError

    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps({"prompt": "q", "completion": "a"}))
    with pytest.raises(InputFileError, match="leave no example"):
        read(tmp_path / "run", tokenizer_and_template, [Source(path=str(path), weight=0.1)])


def test_sources_come_through_run_json(tmp_path):
    """What the head found about every file reaches the ranks; an older run.json names one file."""
    source = Source(path="/d", format="sharegpt", rename={"a": "b"}, roles={"me": "human"}, weight=2.0)
    path = make_run(tmp_path / "run", "/m", "/d", data_part={"sources": [source.to_json()]})
    assert read_run(path).data.sources == (source,)
    old = make_run(tmp_path / "old", "/m", "/d")
    assert read_run(old).data.sources == (dataclasses.replace(Source(path="/d"), format="messages"),)
