"""`llmtrain data` on this machine."""

from __future__ import annotations

import json
import sys

import pytest

from llmtrain import cli
from llmtrain.report.data import render_histogram, render_sample


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model."""
    from llmtrain.train.tinymodel import write_tiny_model

    path = tmp_path_factory.mktemp("tokens") / "model"
    write_tiny_model(path)
    return path


def count(monkeypatch, capfd, model, path, *more):
    """What `data --json` says."""
    argv = ["llmtrain", "data", "--model", str(model), "--data", str(path), *more, "--json"]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code or 0, json.loads(capfd.readouterr().out)


def write(path, pairs):
    """Chat data."""
    rows = [[{"role": "user", "content": ask}, {"role": "assistant", "content": answer}] for ask, answer in pairs]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return path


def test_data_counts_and_reuses(monkeypatch, capfd, model, tmp_path):
    """Tokens, cut and dropped examples, duplicates and steps are counted; only other content is tokenized again."""
    path = write(tmp_path / "chat.jsonl", [("a", "b"), ("a", "b"), ("a", "c" * 60), ("q" * 80, "d")])
    sets = ("--set", "data.max_length=64", "--set", "batch.global=2")
    code, found = count(monkeypatch, capfd, model, path, *sets)
    wanted = {"examples": 4, "trained_on": 3, "dropped": 1, "truncated": 1, "duplicates": 1, "steps_per_epoch": 2}
    assert code == 0
    assert {key: found[key] for key in wanted} == wanted
    assert found["tokens"] == 2 * (20 + 3) + 64
    assert sum(found["lengths"].values()) == 4
    assert [piece["text"] for piece in found["sample"] if piece["trained"]] == ["b<|im_end|>"]
    assert found["reused"] is False
    assert count(monkeypatch, capfd, model, path, *sets)[1] == {**found, "reused": True}
    packed = count(monkeypatch, capfd, model, path, *sets, "--set", "data.packing=true")[1]
    assert (packed["reused"], packed["rows"]) == (True, 2)
    longer = count(monkeypatch, capfd, model, path, "--set", "data.max_length=99")[1]
    assert (longer["reused"], longer["tokenized"] == found["tokenized"]) == (False, False)
    write(path, [("a", "b"), ("a", "x")])
    assert count(monkeypatch, capfd, model, path, *sets)[1]["reused"] is False
    assert not [item.name for item in (tmp_path / ".llmtrain-tokenized").iterdir() if item.name.startswith(".")]


def test_data_that_cannot_be_masked(monkeypatch, capfd, model, tmp_path):
    """An example that the template refuses is named, and nothing is left that a launch would take."""
    template = tmp_path / "refusing.jinja"
    template.write_text("{{ raise_exception('not like this') }}")
    path = write(tmp_path / "chat.jsonl", [("a", "b")])
    code, found = count(monkeypatch, capfd, model, path, "--set", f"data.chat_template={template}")
    assert (code, found["where"]) == (3, str(path))
    assert "example 1: the chat template refuses it: not like this" in found["error"]
    assert not list((tmp_path / ".llmtrain-tokenized").iterdir())


def test_unknown_template_is_found_here(monkeypatch, capfd, model, tmp_path):
    """A name that no template has is told on the head, with the nearest one."""
    path = write(tmp_path / "chat.jsonl", [("a", "b")])
    code, found = count(monkeypatch, capfd, model, path, "--set", "data.chat_template=chatlm")
    assert (code, found["fix"]) == (3, "did you mean chatml?")


def test_python_that_is_not_here(monkeypatch, capfd, model, tmp_path):
    """An interpreter of the hosts that this machine lacks is named."""
    path = write(tmp_path / "chat.jsonl", [("a", "b")])
    code, found = count(monkeypatch, capfd, model, path, "--set", "python=/nowhere/python")
    assert (code, found["where"]) == (2, "/nowhere/python")


def test_masked_words_are_dim():
    """What is not learned is dim on a terminal and in brackets elsewhere; control characters do not get through."""
    pieces = [{"text": "ask\x1b", "trained": False}, {"text": "answer", "trained": True}]
    assert render_sample(pieces, colours=False).plain == "⟨ask⟩answer"
    text = render_sample(pieces, colours=True)
    assert [(text.plain[span.start : span.end], span.style) for span in text.spans] == [
        ("ask", "dim"),
        ("answer", "bold"),
    ]


def test_histogram_shows_the_cut():
    """Bars double in length; the limit is a border, and what lies beyond it is marked."""
    lines = render_histogram({"10": 4, "100": 2, "101": 2, "500": 1}, 100)
    assert [line.split()[0:3] + line.split()[4:] for line in lines if line.split()[-1] != "0"] == [
        ["1", "to", "16", "4"],
        ["65", "to", "100", "2"],
        ["101", "to", "128", "2", "cut"],
        ["257", "to", "512", "1", "cut"],
    ]
