"""Files that cannot be data are named before they are read, and files that can become records one by one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtrain.errors import ExitCode, InputFileError
from llmtrain.spec.dataset import iter_examples, read_dataset

if TYPE_CHECKING:
    from pathlib import Path

GOOD = json.dumps({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]})


def refused(path: Path, **limits: int) -> InputFileError:
    """The error for a file that must not be accepted: one line each, exit code 3."""
    with pytest.raises(InputFileError) as caught:
        read_dataset(path, **limits)
    for part in (caught.value.error, caught.value.fix or ""):
        assert "\n" not in part
    assert caught.value.exit_code == ExitCode.INPUT == 3
    return caught.value


def test_a_txt_file_is_one_document_per_paragraph(tmp_path):
    """Blank lines divide documents; indentation and inner line breaks stay, line ends become newlines."""
    path = tmp_path / "book.txt"
    path.write_text("\n\nOne\r\n  two\r\n \t \r\nthree\n\n\n{four} ", newline="")
    assert list(iter_examples(path)) == [{"text": "One\n  two"}, {"text": "three"}, {"text": "{four} "}]
    report = read_dataset(path)
    assert (report.container, report.format, report.examples) == ("txt", "text", 3)


@pytest.mark.parametrize("suffix", [".jsonl", ".txt"])
@pytest.mark.parametrize(
    ("raw", "line", "error", "fix"),
    [
        (b"\xef\xbb\xbf" + GOOD.encode(), 1, "byte order mark", "tail -c +4"),
        (GOOD.encode("utf-16"), 1, "this is UTF-16 text", "iconv -f UTF-16"),
        (b"\xfe\xff" + GOOD.encode("utf-16-be"), 1, "this is UTF-16 text", "iconv -f UTF-16"),
        (GOOD.encode("utf-32"), 1, "this is UTF-32 text", "iconv -f UTF-32"),
        (GOOD.encode("utf-16-le"), 1, "NUL byte at byte 2", "iconv"),
        (b"\n\nab\0c\n", 3, "NUL byte at byte 3", "iconv"),
        (b'\n{"text": "caf\xe9"}\n', 2, "not UTF-8: byte 0xe9 at byte 14", "iconv -f LATIN1"),
        (b"\x1f\x8b\x08\0", 1, "this is gzip data", "gunzip"),
        (b"\x28\xb5\x2f\xfd\x04", 1, "this is zstd data", "zstd -dc"),
        (b"PK\x03\x04", 1, "this is a zip archive", "unpack"),
        (b"PAR1\x15", 1, "this is a parquet file", "parquet"),
    ],
)
def test_bytes_that_are_not_plain_utf8_are_named(tmp_path, suffix, raw, line, error, fix):
    """Encodings and formats that hide behind a wrong name are recognised by their bytes."""
    path = tmp_path / f"data{suffix}"
    path.write_bytes(raw)
    fault = refused(path)
    assert fault.where == f"{path}:{line}"
    assert error in fault.error
    assert fix in (fault.fix or "")


@pytest.mark.parametrize("name", ["data.jsonl", "data.txt"])
@pytest.mark.parametrize("raw", ["", "\n\r\n  \n"])
def test_a_file_without_an_example_is_refused(tmp_path, name, raw):
    """An empty file and one of blank lines hold nothing to train on."""
    path = tmp_path / name
    path.write_text(raw, newline="")
    fault = refused(path)
    assert (fault.error, fault.where) == ("the data file holds no example", str(path))


def test_json_lines_named_txt_are_not_trained_on_as_prose(tmp_path):
    """A .txt file that holds JSON objects is refused with its right name."""
    path = tmp_path / "data.txt"
    path.write_text("\n" + GOOD + "\n")
    fault = refused(path)
    assert (fault.where, fault.fix) == (f"{path}:2", "name it data.jsonl")


def test_a_json_document_over_many_lines_is_recognised(tmp_path):
    """Pretty-printed JSON under a .jsonl name is told from a broken line."""
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps([json.loads(GOOD)], indent=1))
    assert "over many lines" in refused(path).fix


def test_a_file_that_was_cut_off_says_so(tmp_path):
    """A broken last line without a line end points at an incomplete copy."""
    path = tmp_path / "data.jsonl"
    path.write_text(f"{GOOD}\n{GOOD[:20]}")
    fault = refused(path)
    assert fault.where == f"{path}:2"
    assert "cut off" in fault.fix


@pytest.mark.parametrize(("name", "line"), [("data.jsonl", 2), ("data.txt", 3)])
def test_an_example_past_the_limit_is_refused(tmp_path, name, line):
    """The size limit holds for a line and for a paragraph, so memory stays bounded."""
    path = tmp_path / name
    short = {"data.jsonl": '{"text": "a"}', "data.txt": "a\n"}[name]
    path.write_text(f"{short}\n" + 10 * f"{'x' * 9}\n" if name == "data.txt" else f"{short}\n" + "x" * 51)
    fault = refused(path, max_example_bytes=50)
    assert (fault.where, fault.error) == (f"{path}:{line}", "an example of more than 50 bytes")
    path.write_text(f"{short}\n")
    assert read_dataset(path, max_example_bytes=50).examples == 1


def test_a_missing_file_is_answered_with_the_nearest_name(tmp_path):
    """A typing error in the path shows the file that was meant."""
    (tmp_path / "train.jsonl").write_text(GOOD)
    fault = refused(tmp_path / "trian.jsonl")
    assert fault.error == "cannot open the data: No such file or directory"
    assert fault.fix == f"did you mean {tmp_path / 'train.jsonl'}?"


@pytest.mark.parametrize("path", ["HuggingFaceH4/ultrachat_200k", "/nowhere/at/all.jsonl"])
def test_a_name_that_is_no_file_says_that_data_is_local(path):
    """A data set's name on a hub is not a path."""
    assert refused(path).fix == "data is a local file, not a name on a hub"


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("x" * 300 + ".jsonl", "cannot open the data: File name too long"),
        ("a\0b.jsonl", "cannot open the data: embedded null byte"),
        ("/dev/null", "the data path is not a regular file"),
        ("/", "the data path is a directory"),
    ],
)
def test_a_path_that_cannot_be_a_data_file_is_refused(path, error):
    """Directories, devices and impossible names are refused before anything is read."""
    assert refused(path).error == error


def test_a_file_that_cannot_be_read_is_an_input_error(tmp_path):
    """An error of the operating system while reading carries its reason and the path."""
    path = tmp_path / "data.jsonl"
    path.symlink_to("/proc/self/mem")
    fault = refused(path)
    assert (fault.error, fault.where) == ("cannot read the data: Input/output error", str(path))


@pytest.mark.parametrize("name", ["data.jsonl.gz", "data", "data.arrow"])
def test_an_unknown_ending_names_those_that_are_read(tmp_path, name):
    """The container goes by the file's ending, so a file without a known one is refused."""
    path = tmp_path / name
    path.write_text(GOOD)
    assert ".jsonl (one JSON object a line), .txt" in refused(path).fix


plain = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r\0\ufeff{"), min_size=1).filter(
    str.strip
)


@given(documents=st.lists(st.lists(plain, min_size=1), min_size=1), end=st.sampled_from(["\n", "\r\n"]))
def test_every_text_file_comes_back_paragraph_by_paragraph(tmp_path_factory, documents, end):
    """Documents of a .txt file are exact, line breaks inside them included."""
    path = tmp_path_factory.mktemp("text") / "data.txt"
    path.write_bytes((2 * end).join(end.join(lines) for lines in documents).encode())
    assert [example["text"] for example in iter_examples(path)] == ["\n".join(lines) for lines in documents]
