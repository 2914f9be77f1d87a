from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtrain.errors import InputFileError
from llmtrain.spec.jsonfile import parse_json, read_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)


@given(VALUES, st.sampled_from([None, 0, 2]), st.booleans())
def test_reads_what_the_standard_library_reads(value, indent, ascii_only):
    """Any JSON document gives the value that json.loads gives."""
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert parse_json(text, name="x.json")[0] == json.loads(text)


@given(st.text(alphabet='{}[]":, \n01e-.truefalsnN\\', max_size=30))
def test_refuses_what_the_standard_library_refuses(text):
    """A text is accepted exactly if json.loads accepts it, duplicate keys and NaN aside."""
    try:
        expected = json.loads(text)
    except ValueError:
        with pytest.raises(InputFileError):
            parse_json(text, name="x.json")
        return
    try:
        assert parse_json(text, name="x.json")[0] == expected
    except InputFileError as error:
        assert "stands twice" in error.error or "is not part of JSON" in error.error  # noqa: PT017


def test_knows_the_line_of_every_key_and_item():
    """Each key and list item is found at its line."""
    text = '{\n "a": {"b": 1,\n  "c": [\n   1, 2,\n   3]},\n "d": 0}\n'
    lines = parse_json(text, name="x.json")[1]
    assert lines == {
        ("a",): 2,
        ("a", "b"): 2,
        ("a", "c"): 3,
        ("a", "c", "0"): 4,
        ("a", "c", "1"): 4,
        ("a", "c", "2"): 5,
        ("d",): 6,
    }


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ('{"a": 1,\n "b": 2,\n "a": 3}', 3, "the key a stands twice (first on line 1)"),
        ('{"z": {"a": 1, "a": 2}}', 1, "the key z.a stands twice"),
        ('{"a": 1,\n}', 2, "not valid JSON"),
        ('{\n// note\n"a": 1}', 2, "not valid JSON"),
        ("{'a': 1}", 1, "not valid JSON"),
        ('{"a": 1}\n\nx', 3, "not valid JSON: extra data"),
        ('{"a":\nNaN}', 2, "not valid JSON: the value NaN is not part of JSON"),
        ('{"a" 1}', 1, "':'"),
        ('{"a": 1 "b": 2}', 1, "','"),
        ("[1 2]", 1, "','"),
        ("", 1, "not valid JSON"),
    ],
)
def test_names_the_line_of_a_fault(text, line, message):
    """A fault is reported with file and line."""
    with pytest.raises(InputFileError) as caught:
        parse_json(text, name="x.json")
    assert caught.value.where == f"x.json:{line}"
    assert message in caught.value.error


def test_deep_nesting_is_an_error_of_ours():
    """A document nested beyond the interpreter's limit gives one line, no traceback."""
    with pytest.raises(InputFileError, match="nested too deeply"):
        parse_json("[" * 100_000, name="x.json")


def test_reads_a_file(tmp_path):
    """A file is read, and errors carry its path."""
    path = tmp_path / "a.json"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(InputFileError) as caught:
        read_json(path)
    assert caught.value.where == f"{path}:1"
