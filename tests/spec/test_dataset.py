"""Data files are recognised, validated line by line, and read the same way on the head and on a rank."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtrain.errors import ExitCode, InputFileError
from llmtrain.spec.dataset import iter_examples, read_dataset
from llmtrain.spec.formats import FORMATS, recognise
from llmtrain.spec.messages import ROLES

ROOT = Path(__file__).parents[2]
USER = {"role": "user", "content": "q"}
ASSISTANT = {"role": "assistant", "content": "a"}
GOOD = json.dumps({"messages": [USER, ASSISTANT]})


def chat(*messages: object, **more: object) -> str:
    """One line with these messages."""
    return json.dumps({"messages": list(messages), **more})


def refused(path: Path, data_format: str = "auto", **limits: int) -> InputFileError:
    """The error for a file that must not be accepted: one line each, exit code 3."""
    with pytest.raises(InputFileError) as caught:
        read_dataset(path, data_format, **limits)
    for part in (caught.value.error, caught.value.fix or ""):
        assert "\n" not in part
    assert caught.value.exit_code == ExitCode.INPUT == 3
    return caught.value


# --- what is wrong with one record -------------------------------------------------------------------------------

BAD_LINES = [
    # (why, line, words in the error, words in the fix)
    ("not JSON", "hello", "not JSON: Expecting value at column 1", "json"),
    ("cut in the middle", '{"messages": [{"role": "us', "not JSON: Unterminated string", "json"),
    ("value missing", '{"messages":', "not JSON: Expecting value at column 13", "json"),
    ("python, not JSON", "{'messages': []}", "double quotes at column 2", "json.dumps"),
    ("two objects", GOOD + GOOD, f"not JSON: Extra data at column {len(GOOD) + 1}", "json"),
    ("raw control character", '{"text": "a\tb"}', "Invalid control character", "json"),
    ("NaN", '{"messages": NaN}', "NaN is not a JSON value", "null"),
    ("digits without end", '{"messages": ' + "9" * 5000 + "}", "thousands of digits", ""),
    ("too deep", '{"messages": ' + "[" * 100_000, "nested too deeply", ""),
    ("a list", "[1]", "expected an object, found a list", "on each line"),
    ("a string", '"x"', "expected an object, found a string", "on each line"),
    ("null", "null", "expected an object, found null", "on each line"),
    ("a number", "7", "expected an object, found a number", "on each line"),
    ("a boolean", "true", "expected an object, found true or false", "on each line"),
    ("duplicate key", '{"messages": [], "messages": []}', "'messages' is there twice", "one of them"),
    ("duplicate inner key", '{"messages": [{"role": "user", "role": "tool"}]}', "'role' is there twice", ""),
    ("no field", "{}", "no field 'messages' (keys found: none)", "write lines like"),
    ("near field", '{"mesages": []}', "no field 'messages' (keys found: 'mesages')", "rename 'mesages' to 'messages'"),
    ("one message", json.dumps(USER), "one message a line data is not read yet", "into one line"),
    ("not a list", '{"messages": "hi"}', "messages: expected a list, found a string", '"role"'),
    ("null list", '{"messages": null}', "messages: expected a list, found null", '"role"'),
    ("empty list", '{"messages": []}', "messages: the list is empty", "remove"),
    ("message a string", chat("hi"), "messages[0]: expected an object, found a string", '"role"'),
    ("no role", chat({"content": "x"}), "messages[0].role: missing (keys found: 'content')", '"role"'),
    ("no content", chat(USER, {"role": "assistant"}), "messages[1].content: missing", '"content"'),
    ("inner sharegpt", chat({"from": "human", "value": "x"}), "role: missing (keys found: 'from', 'value')", '"role"'),
    ("role not a string", chat({"role": 1, "content": "x"}), "messages[0].role: expected a string, found a n", "user"),
    ("typo", chat(USER, ASSISTANT, {"role": "asistant", "content": "x"}), "messages[2].role: 'asistant'", "'assist"),
    ("capital", chat({"role": "User", "content": "x"}), "messages[0].role: 'User' is not a role", "mean 'user'?"),
    ("alias", chat(USER, {"role": "gpt", "content": "x"}), "messages[1].role: 'gpt' is not", "mean 'assistant'?"),
    ("strange role", chat({"role": "zzz", "content": "x"}), "'zzz' is not a role", "roles are system, user"),
    ("long role", chat({"role": "z" * 999, "content": "x"}), "zzz...' is not a role", "roles are"),
    ("content null", chat(USER, {"role": "assistant", "content": None}), "messages[1].content: expected a string", ""),
    ("content parts", chat({"role": "user", "content": [{"type": "text"}]}), "content: expected a string, f", "join"),
    ("content number", chat({"role": "user", "content": 3}), "messages[0].content: expected a string, found a num", ""),
    ("content empty", chat(USER, {"role": "assistant", "content": ""}), "messages[1].content: empty", "fill"),
    ("content blank", chat({"role": "user", "content": " \n"}, ASSISTANT), "messages[0].content: empty", "fill"),
    ("half a pair", chat(USER, {"role": "assistant", "content": "ab\ud800"}), "pair (\\ud800) at character 3", ""),
    ("nothing to learn", chat(USER), "messages: no assistant message", "answer"),
    ("only a system message", chat({"role": "system", "content": "x"}), "messages: no assistant message", "answer"),
    ("answer first", chat(ASSISTANT, USER), "messages[0].role: the conversation starts with 'assist", "user mess"),
    ("tool first", chat({"role": "tool", "content": "x"}, USER, ASSISTANT), "starts with 'tool'", "user message"),
    ("after system", chat({"role": "system", "content": "x"}, ASSISTANT), "messages[1].role: the conversation", "user"),
    ("two answers", chat(USER, ASSISTANT, ASSISTANT), "messages[2].role: two assistant messages in a row", "join"),
    ("tool call", chat(USER, {**ASSISTANT, "tool_calls": [{}]}), "messages[1].tool_calls: not supported", "remove"),
    ("loss weight", chat(USER, {**ASSISTANT, "weight": 0}), "messages[1].weight: not supported", "remove"),
    ("tools", chat(USER, ASSISTANT, tools=[{"name": "f"}]), "tools: not supported", "remove"),
    ("text in a messages file", '{"text": "x"}', "this line is text data, the lines before it are mess", "one file"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "error", "fix"), [case[1:] for case in BAD_LINES], ids=[case[0] for case in BAD_LINES]
)
def test_a_bad_line_is_named_with_its_number_and_field(tmp_path, line, error, fix):
    """Each fault is reported at its own line, although good, blank and CRLF lines stand before it."""
    path = tmp_path / "data.jsonl"
    path.write_text(f"{GOOD}\r\n\n{GOOD}\n{line}\n{GOOD}\n", newline="")
    fault = refused(path)
    assert fault.where == f"{path}:4"
    assert error in fault.error
    assert fix in (fault.fix or "")


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ('{"text": 3}', "text: expected a string, found a number"),
        ('{"text": null}', "text: expected a string, found null"),
        ('{"text": ["a"]}', "text: expected a string, found a list"),
        ('{"text": "\\n"}', "text: empty"),
        ('{"txt": "x"}', "no field 'text' (keys found: 'txt')"),
        (GOOD, "this line is messages data, the lines before it are text"),
    ],
)
def test_a_bad_line_of_a_text_file_is_named(tmp_path, line, error):
    """Plain text lines have their own field and their own faults."""
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a"}\n' + line + "\n")
    fault = refused(path)
    assert (fault.where, fault.error) == (f"{path}:2", error)


@pytest.mark.parametrize("asked", ["messages", "text"])
def test_a_format_that_was_asked_for_is_not_replaced_by_another(tmp_path, asked):
    """With data.format set, a file in another format is refused at its first record, naming the right setting."""
    other = {"messages": "text", "text": "messages"}[asked]
    path = tmp_path / "data.jsonl"
    path.write_text({"text": '{"text": "a"}', "messages": GOOD}[other] + "\n")
    fault = refused(path, asked)
    assert fault.where == f"{path}:1"
    assert (fault.error, fault.fix) == (
        f"this is {other} data, but data.format says {asked}",
        f"set data.format to {other}",
    )


def test_an_unknown_format_name_is_answered_with_the_nearest(tmp_path):
    """data.format accepts only names from the table."""
    path = tmp_path / "data.jsonl"
    path.write_text(GOOD)
    fault = refused(path, "message")
    assert "data.format: 'message'" in fault.error
    assert fault.fix == "did you mean messages? formats are auto, messages, text, sharegpt, alpaca, prompt-completion"


# --- what is accepted --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        chat(USER, ASSISTANT),
        chat({"role": "system", "content": "s"}, USER, ASSISTANT, USER, ASSISTANT),
        chat(USER, ASSISTANT, {"role": "tool", "content": "42"}, ASSISTANT),
        chat(USER, USER, ASSISTANT, USER),
        chat(USER, {**ASSISTANT, "name": "bot", "tool_calls": None, "weight": 1}, id=7, tools=[], text="unused"),
        json.dumps({"messages": [{"role": "user", "content": "𝄞"}, ASSISTANT]}),
        '{"messages": [{"content": "q\\u2028\\u0000", "role": "user"}, {"role": "assistant", "content": "a"}]}',
    ],
)
def test_a_conversation_gives_back_its_roles_and_contents(tmp_path, line):
    """Whatever else a record carries, an example holds exactly role and content of every message."""
    path = tmp_path / "data.jsonl"
    path.write_text(line + "\n", encoding="utf-8")
    wanted = [{"role": m["role"], "content": m["content"]} for m in json.loads(line)["messages"]]
    assert list(iter_examples(path)) == [{"messages": wanted}]


def test_keys_that_are_not_used_are_reported(tmp_path):
    """Nothing is left out in silence: ignored keys are listed, inner ones with their place."""
    path = tmp_path / "data.jsonl"
    path.write_text(GOOD + "\n" + chat(USER, {**ASSISTANT, "name": "bot"}, id=7) + "\n")
    report = read_dataset(path)
    assert (report.columns, report.ignored) == (("messages",), ("id", "messages[].name"))


def test_the_list_of_ignored_keys_is_bounded(tmp_path):
    """A file with a new key on every line cannot fill the head's memory."""
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"text": "x", f"key{at}": 1}) + "\n" for at in range(100)))
    assert len(read_dataset(path).ignored) == 20


def test_the_report_states_size_and_digest_of_the_file(tmp_path):
    """Examples, bytes and SHA-256 are those of the file, blank lines and CRLF included."""
    path = tmp_path / "DATA.JSONL"
    raw = f"\n{GOOD}\r\n \r\n{GOOD}".encode()
    path.write_bytes(raw)
    report = read_dataset(path)
    assert (report.path, report.container, report.format) == (str(path), "jsonl", "messages")
    assert (report.examples, report.bytes) == (2, len(raw))
    assert report.digest_sha256 == hashlib.sha256(raw).hexdigest()


# --- properties --------------------------------------------------------------------------------------------------

words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)
fillers = st.sampled_from(["", "\n", " \n", "\r\n"])


@st.composite
def conversations(draw):
    """Any order of roles in which every answer has a prompt before it."""
    roles = draw(st.sampled_from([[], ["system"]]))
    for _ in range(draw(st.integers(1, 3))):
        roles = [*roles, "user", "assistant", *draw(st.sampled_from([[], ["tool", "assistant"], ["user"]]))]
    return {"messages": [{"role": role, "content": draw(words)} for role in roles]}


datasets = st.one_of(st.lists(conversations(), min_size=1), st.lists(st.builds(dict, text=words), min_size=1))


def write_lines(path: Path, examples: list, draw) -> None:
    """Examples as JSON lines, in any spelling that JSON allows."""
    lines = [
        json.dumps(example, ensure_ascii=draw(st.booleans())) + draw(st.sampled_from(["\n", "\r\n"])) + draw(fillers)
        for example in examples
    ]
    path.write_bytes("".join(lines).encode())


@given(data=st.data(), examples=datasets)
def test_every_valid_data_set_comes_back_as_it_was_written(tmp_path_factory, data, examples):
    """Count, format and content of any valid JSON lines file are exact, however it is spelled."""
    path = tmp_path_factory.mktemp("valid") / "data.jsonl"
    write_lines(path, examples, data.draw)
    report = read_dataset(path)
    assert (report.examples, report.format, report.bytes) == (
        len(examples),
        recognise(examples[0]),
        path.stat().st_size,
    )
    assert list(iter_examples(path, report.format)) == examples


def corrupt(kind: str, line: str) -> bytes:
    """One line with one fault of that kind."""
    example = json.loads(line)
    column = recognise(example)
    if kind == "cut":
        return line[:-1].encode()
    if kind == "byte":
        return line.replace(": ", ": \xff", 1).encode("latin-1", "replace")
    if kind == "nul":
        return line.encode() + b"\0"
    if kind == "missing":
        return json.dumps({"other": 1}).encode()
    if kind == "null":
        return json.dumps({column: None}).encode()
    return json.dumps([example]).encode()


@given(
    data=st.data(),
    examples=st.lists(conversations(), min_size=1),
    kind=st.sampled_from(["cut", "byte", "nul", "missing", "null", "list"]),
)
def test_a_single_corrupted_line_is_reported_at_its_number(tmp_path_factory, data, examples, kind):
    """Whatever one line suffers, the error names that line and no other."""
    bad = data.draw(st.integers(0, len(examples) - 1))
    lines = [json.dumps(example).encode() for example in examples]
    lines[bad] = corrupt(kind, lines[bad].decode())
    path = tmp_path_factory.mktemp("bad") / "data.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    assert refused(path).where == f"{path}:{bad + 1}"


# --- head and rank, and the data set that is shipped -------------------------------------------------------------


def test_the_module_needs_nothing_but_the_standard_library():
    """A rank can import it from a staged copy, whatever its environment holds."""
    code = "import sys, llmtrain.spec.dataset; print(*{n.split('.')[0] for n in sys.modules} - sys.stdlib_module_names)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    ran = subprocess.run(
        [sys.executable, "-S", "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert set(ran.stdout.split()) <= {"llmtrain", "__main__"}


def test_each_format_is_recognised_by_its_own_sample():
    """The sample shown to a user is valid, and its format comes first in the table."""
    for known in FORMATS:
        sample = json.loads(known.sample)
        assert recognise(sample) == known.name
        example, extras = known.parse(sample)
        assert not extras
        assert example == sample or [turn["content"] for turn in example["messages"]] == ["...", "..."]
    assert recognise({"other": 1}) is None
    assert ROLES == ("system", "user", "assistant", "tool")


def test_the_shipped_data_set_is_valid_and_has_no_question_twice():
    """examples/data/multihost-qa.jsonl holds at least 240 different questions with short answers, as README says."""
    path = ROOT / "examples/data/multihost-qa.jsonl"
    report = read_dataset(path, "messages")
    assert report.examples >= 240
    assert report.ignored == ()
    messages = [message for example in iter_examples(path) for message in example["messages"]]
    questions = [message["content"] for message in messages if message["role"] == "user"]
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    assert len({" ".join(question.lower().split()) for question in questions}) == len(questions)
    assert len(set(answers)) == len(answers)
    assert all(len(answer.split()) <= 70 for answer in answers)
    assert f"{report.examples} short conversations" in (path.parent / "README.md").read_text()
