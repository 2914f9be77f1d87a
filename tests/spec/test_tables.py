from __future__ import annotations

import csv
import json
import sys

import pytest
from datasets import Dataset, DatasetDict
from hypothesis import given
from hypothesis import strategies as st

from llmtrain.errors import InputFileError
from llmtrain.spec.dataset import iter_examples, read_dataset
from llmtrain.spec.source import parse_source, resolve_source

PAIRS = [("one\ntwo, three", 'say "yes"'), ("grüße", "漢字"), ("a", "b")]
MESSAGES = [
    {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in PAIRS
]  # what every file here must give
ALPACA = [{"instruction": q.partition("\n")[0], "input": q.partition("\n")[2], "output": a} for q, a in PAIRS]
SHAREGPT = [{"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]} for q, a in PAIRS]
COMPLETION = [{"prompt": q, "completion": a} for q, a in PAIRS]
LISTS = [{"prompt": row["messages"][:1], "completion": row["messages"][1:]} for row in MESSAGES]
SHAPES = {"messages": MESSAGES, "alpaca": ALPACA, "sharegpt": SHAREGPT, "completion": COMPLETION, "lists": LISTS}
CONTAINERS = ("jsonl", "json", "lines", "csv", "parquet", "saved", "splits")


def write(folder, rows, container):
    """The rows in one container; returns its path."""
    path = folder / f"data.{container}"
    if container == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif container == "json":
        path.write_text(json.dumps(rows, indent=2, ensure_ascii=False))
    elif container == "lines":
        path = folder / "data.json"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif container == "csv":
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, rows[0])
            table.writeheader()
            for row in rows:
                cells = {key: value if isinstance(value, str) else json.dumps(value) for key, value in row.items()}
                table.writerow(cells)
    elif container == "parquet":
        Dataset.from_list(rows).to_parquet(path)
    elif container == "saved":
        Dataset.from_list(rows).save_to_disk(path)
    else:
        DatasetDict(train=Dataset.from_list(rows), test=Dataset.from_list(rows[:1])).save_to_disk(path)
    return path


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_one_content_in_every_shape_and_container(tmp_path, shape, container):
    """The same examples come out whatever shape and container they lie in."""
    path = write(tmp_path, SHAPES[shape], container)
    assert list(iter_examples(path)) == MESSAGES
    assert read_dataset(path).examples == len(PAIRS)


def test_dataset_info_names_columns_and_speakers(tmp_path):
    """An entry of LLaMA-Factory's dataset_info.json gives the same examples, also after the way through run.json."""
    rows = [{"q": q, "a": a} for q, a in PAIRS]
    turns = [{"talk": [{"who": "me", "says": q}, {"who": "bot", "says": a}]} for q, a in PAIRS]
    write(tmp_path, rows, "jsonl").rename(tmp_path / "qa.jsonl")
    write(tmp_path, turns, "json").rename(tmp_path / "talk.json")
    tags = {"role_tag": "who", "content_tag": "says", "user_tag": "me", "assistant_tag": "bot"}
    info = {
        "qa": {"file_name": "qa.jsonl", "columns": {"prompt": "q", "response": "a"}},
        "talk": {
            "file_name": "talk.json", "formatting": "sharegpt", "columns": {"messages": "talk"}, "tags": tags,
        },
        "far": {"hf_hub_url": "x/y"},
    }  # fmt: skip
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    for name in ("qa", "talk"):
        source = resolve_source(f"{tmp_path}/dataset_info.json#{name}")
        assert list(iter_examples(parse_source(json.loads(json.dumps(source.to_json()))))) == MESSAGES
    for name, words in (("far", "file_name"), ("qb", "no dataset is called 'qb'")):
        with pytest.raises(InputFileError, match=words):
            resolve_source(f"{tmp_path}/dataset_info.json#{name}")
    with pytest.raises(InputFileError, match="which dataset") as caught:
        resolve_source(f"{tmp_path}/dataset_info.json")
    assert "qa, talk, far" in caught.value.fix


BAD = [
    ("x.json", '[{"text": "a"},\n{"text": 1}]', ":2", "expected a string"),
    ("x.json", '[{"text": "a"},\n{"text": "b"}', ":2", "comma or the end"),
    ("x.json", '[{"text": "a"} {"text": "b"}]', ":1", "comma or the end"),
    ("x.json", "[\n\n7]", ":3", "expected an object"),
    ("x.json", '[{"text": "a", "text": "b"}]', ":1", "twice"),
    ("x.csv", "text\na,b\n", ":2", "2 cells"),
    ("x.csv", "text,text\na,b\n", ":1", "twice"),
    ("x.csv", 'text\n"a', ":2", "not CSV"),
    ("x.parquet", "PAR1", "x.parquet", "not a Parquet file"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "where", "words"), BAD)
def test_a_fault_in_a_table_is_named_with_its_line(tmp_path, name, text, where, words):
    """A fault is an error with file and line, not a traceback."""
    (tmp_path / name).write_text(text)
    with pytest.raises(InputFileError, match=words) as caught:
        read_dataset(tmp_path / name)
    assert caught.value.where.endswith(where)


def test_a_head_without_pyarrow(tmp_path, monkeypatch):
    """Parquet without pyarrow is an error that names what to install."""
    path = write(tmp_path, COMPLETION, "parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(InputFileError, match="needs pyarrow") as caught:
        read_dataset(path)
    assert "llmtrain[data]" in caught.value.fix


@given(st.text(max_size=400))
def test_any_json_document_is_read_or_refused(tmp_path_factory, text):
    """No text in a .json file ends in anything but examples or an error for the user."""
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_bytes(("[" + text).encode("utf-8", "surrogatepass"))
    with pytest.raises(InputFileError):
        read_dataset(path)


FOREIGN = [
    ("sharegpt", '{"conversations": []}', "the list is empty", "give it a question"),
    ("sharegpt speaker", '{"conversations": [{"from": "me", "value": "x"}]}', "'me' is not a speaker", "human"),
    ("sharegpt value", '{"conversations": [{"from": "human"}]}', "conversations[0].value: missing", "value"),
    ("sharegpt tools", '{"conversations": [], "tools": "x"}', "tools: not supported", "remove it"),
    ("alpaca", '{"instruction": "x"}', "no field 'output'", "needs its output"),
    ("alpaca history", '{"instruction": "x", "output": "y", "history": [["q"]]}', "history[0]: expected", "answer"),
    ("completion", '{"prompt": "x"}', "no field 'completion'", "needs its completion"),
    ("completion list", '{"prompt": [], "completion": "y"}', "one is a list of messages", "both alike"),
]


@pytest.mark.parametrize(("line", "error", "fix"), [case[1:] for case in FOREIGN], ids=[case[0] for case in FOREIGN])
def test_a_fault_in_a_foreign_record_is_named_with_its_field(tmp_path, line, error, fix):
    """What is wrong with a record is said in the words of its own format."""
    (tmp_path / "data.jsonl").write_text(line)
    with pytest.raises(InputFileError) as caught:
        read_dataset(tmp_path / "data.jsonl")
    assert error in caught.value.error
    assert fix in caught.value.fix
