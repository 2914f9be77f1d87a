from __future__ import annotations

import json

from tests.train.runs import make_run

from llmtrain.train.card import read_versions, render_card
from llmtrain.train.data import DataFacts, TrainingData
from llmtrain.train.runjson import read_run


def test_card_says_what_and_how(tmp_path):
    """The card names base, data and digest, recipe, losses, versions and the DeepSpeed keys, but no folders."""
    run = read_run(make_run(tmp_path / "run-7", "/secret/place/base-1b", "/secret/place/chat.jsonl", world=2))
    counts = {"examples": 9, "dropped": 1, "truncated": 2, "split": 0, "unstopped": 0, "tokens": 50}
    facts = DataFacts(
        path="/secret/place/chat.jsonl",
        digest_sha256="ab" * 32,
        method="template prefixes",
        trained_tokens=20,
        stop_tokens=(2,),
        **counts,
    )
    data = TrainingData(train=None, train_rows=7, evaluation=None, eval_rows=1, facts=facts)
    losses = {"first": 5.0, "last": 1.25, "held-out": None}
    card = render_card(run, data, None, steps=11, losses=losses, versions={"torch": "2.0"})
    for part in (
        *("# base-1b, fine-tuned", "`chat.jsonl`", "ab" * 32, "`run-7`", "| steps | 11 |", "| last loss | 1.2500 |"),
        *("7 trained on, 1 held out, 1 left out", "4 = 2 x 1 x 2 ranks", "torch 2.0", "| ZeRO stage | 3 |"),
    ):
        assert part in card
    assert "held-out loss" not in card
    assert "secret" not in card
    assert json.loads(card.split("```json")[1].split("```")[0]) == run.deepspeed


def test_versions():
    """What is installed is listed with its version."""
    versions = read_versions()
    assert {"llmtrain", "Python", "torch", "deepspeed", "transformers", "trl"} <= set(versions)
