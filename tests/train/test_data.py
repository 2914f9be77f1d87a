from __future__ import annotations

import dataclasses
import hashlib
import json

import pytest
from tests.train.runs import make_run

from llmtrain.errors import InputFileError
from llmtrain.train.data import EpochOrder, cache_dir, read_training_data, write_tokenized
from llmtrain.train.masking import IGNORED
from llmtrain.train.runjson import read_run
from llmtrain.train.templates import choose_template
from llmtrain.train.tinymodel import make_tokenizer


def prepare(tmp_path, rows, *, world=1, **part):
    """Tokenize rows (texts or (question, answer) pairs) as a run would; returns the run and its data."""
    tmp_path.mkdir(exist_ok=True)
    path = tmp_path / "rows.jsonl"
    chat = not isinstance(rows[0], str)
    with path.open("w") as file:
        for row in rows:
            turns = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), row, strict=False)]
            file.write(json.dumps({"messages": turns} if chat else {"text": row}) + "\n")
    part = {"format": "messages" if chat else "text", **part}
    run = read_run(make_run(tmp_path / "run", tmp_path, path, world=world, data_part=part))
    tokenizer = make_tokenizer()
    template = choose_template(run.data.chat_template, tokenizer) if chat else None
    if template:
        tokenizer.chat_template = template.text
    for block in run.ranks:
        write_tokenized(run, block, tokenizer, template, tick=lambda: None)
    return run, read_training_data(run)


# In ChatML: start, "user", newline, question, end, newline, start, "assistant", newline = 19 tokens and the question;
# then the answer, end, newline.
def test_counts_of_dropped_and_truncated(tmp_path):
    """An answer wholly beyond the limit drops its example, one partly beyond it is cut; both are counted."""
    rows = [("q" * 3, "fits"), ("q" * 40, "gone"), ("q" * 21, "is cut off here"), ("q" * 21, "!")]
    _, data = prepare(tmp_path, rows, max_length=42)
    facts = data.facts
    assert (facts.examples, facts.kept, facts.dropped, facts.truncated) == (4, 3, 1, 2)
    assert [len(row) for row in data.train["input_ids"]] == [19 + 3 + 4 + 2, 42, 42, 2]
    trained = [sum(label != IGNORED for label in row) for row in data.train["labels"]]
    assert trained == [5, 2, 2, 0]  # answer and end; "is"; "!" and end; the filler
    assert facts.trained_tokens == 9
    assert facts.tokens == 28 + 42 + 42
    assert facts.method == "template prefixes"


def test_nothing_left(tmp_path):
    """When every answer lies beyond the limit, the run ends with the length to change."""
    with pytest.raises(InputFileError, match="none of its 2 examples") as caught:
        prepare(tmp_path, [("q" * 9, "a"), ("q" * 9, "b")], max_length=20)
    assert "max_length" in caught.value.fix


@pytest.mark.parametrize("world", [2, 3, 5])
def test_rows_do_not_depend_on_the_ranks(tmp_path, world):
    """However many ranks of a host share the work, even more than examples, rows and counts are the same."""
    rows = [("q" * 30, "gone"), ("a", "one"), ("b", "two"), ("c", "three")]
    _, alone = prepare(tmp_path / "alone", rows, max_length=40)
    _, shared = prepare(tmp_path / "shared", rows, max_length=40, world=world)
    assert shared.train[:] == alone.train[:]
    changed = {"path": alone.facts.path}
    assert dataclasses.replace(shared.facts, **changed) == alone.facts


def test_facts_on_disk(tmp_path):
    """Digest and stop tokens are noted beside the rows."""
    run, data = prepare(tmp_path, [("a", "b")])
    assert data.facts.digest_sha256 == hashlib.sha256((tmp_path / "rows.jsonl").read_bytes()).hexdigest()
    assert data.facts.stop_tokens == (make_tokenizer().eos_token_id,)
    assert sorted(path.name for path in cache_dir(run).iterdir()) == ["train-0.arrow", "train-0.json"]


def test_plain_text(tmp_path):
    """Plain text is trained on whole."""
    _, data = prepare(tmp_path, ["ab", "c"])
    assert data.facts.method == "all tokens"
    assert data.train["labels"][:2] == data.train["input_ids"][:2]


def test_refused_example_is_named(tmp_path):
    """An example that the template refuses ends the run with its number and the file."""
    template = tmp_path / "picky.jinja"
    template.write_text(
        "{% for m in messages %}{{ raise_exception('no') if m.content == 'bad' else m.content }}{% endfor %}"
    )
    with pytest.raises(InputFileError, match="example 2: the chat template refuses it: no") as caught:
        prepare(tmp_path, [("a", "b"), ("bad", "c")], chat_template=str(template))
    assert caught.value.where.endswith("rows.jsonl")


def test_held_out_rows_are_apart(tmp_path):
    """A share held out is at least one row, is the same for the same seed, and is not trained on."""
    _, data = prepare(tmp_path, [f"text number {at}" for at in range(10)], eval=0.05)
    assert (data.train_rows, data.eval_rows) == (9, 1)
    held, trained = data.evaluation["input_ids"][0], data.train["input_ids"]
    assert held not in trained
    assert len(trained) == 10  # and the filler
    assert read_training_data(read_run(tmp_path / "run" / "run.json")).evaluation["input_ids"][0] == held


def test_evaluation_fills_whole_batches(tmp_path):
    """Held-out rows are filled up to whole batches on all ranks with rows that have no loss."""
    _, data = prepare(tmp_path, [f"text number {at}" for at in range(10)], eval=0.5, world=3)
    assert data.eval_rows == 5
    assert len(data.evaluation) == 6
    assert set(data.evaluation["labels"][-1]) == {IGNORED}


def test_evaluation_file(tmp_path):
    """A file of its own is evaluated on whole, and all training rows are trained on."""
    (tmp_path / "eval.jsonl").write_text('{"text": "other"}\n' * 3)
    _, data = prepare(tmp_path, ["a", "b"], eval=str(tmp_path / "eval.jsonl"))
    assert (data.train_rows, data.eval_rows) == (2, 3)
    assert len(data.evaluation) == 4


def test_nothing_left_to_train(tmp_path):
    """Holding out everything is refused."""
    with pytest.raises(InputFileError, match="leaves none to train on"):
        prepare(tmp_path, ["only one"], eval=0.5)


def test_every_example_once_an_epoch():
    """Each epoch has every row once, in an order of its own, and fillers up to whole steps."""
    order = EpochOrder(rows=10, step=4, seed=1)
    epochs = []
    for epoch in range(3):
        order.set_epoch(epoch)
        epochs.append(list(order))
    assert all(sorted(rows) == [*range(10), 10, 10] and len(rows) == len(order) == 12 for rows in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_order_depends_on_seed_and_epoch_alone():
    """The same seed and epoch give the same order, so that a resumed run goes on where it was."""
    first, again, other = (EpochOrder(rows=50, step=8, seed=seed) for seed in (1, 1, 2))
    for order in (first, again, other):
        order.set_epoch(5)
    assert list(first) == list(again) != list(other)
