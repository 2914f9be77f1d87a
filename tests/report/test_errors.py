from __future__ import annotations

from dataclasses import replace

import pytest

from llmtrain.cluster.findings import Finding, refuse_failures
from llmtrain.errors import ExitCode, InputFileError, LlmtrainError, PreflightError
from llmtrain.report import errors


@pytest.mark.parametrize("text", ["\x1b]0;owned\x07", "a\x1b[2Jb", "x\rlies", "\x9b31m", "\x00"])
def test_control_characters_of_hosts_never_reach_the_terminal(text):
    """Escape sequences, carriage returns and other control characters are taken out; lines and tabs stay."""
    shown = errors.clean(f"a\tb\n{text}c")
    assert all(char in "\n\t" or char.isprintable() for char in shown)
    assert shown.startswith("a\tb\n")


def test_an_error_is_three_lines(capsys):
    """An error says what, where and how to fix it, on standard error."""
    errors.show_error(InputFileError("bad", where="hostfile:3", fix="write it anew"))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "error: bad\nwhere: hostfile:3\nfix: write it anew\n"


def test_the_json_twin_has_the_same_words():
    """--json gives an error's fields and its exit code; its reason is where a launch that ran has its own."""
    twin = errors.error_json(InputFileError("bad", where="hostfile:3", fix="write it anew"))
    words = {"reason": "bad", "error": "bad", "where": "hostfile:3", "fix": "write it anew"}
    assert twin == {"ok": False, "exit_code": 3, **words}


def test_the_json_twin_of_a_preflight_has_every_finding():
    """A launch that checks refuse gives all findings, worst first, as `check --json` does."""
    one = Finding(host="a", check="shm", level="warn", saw="16 MiB", wanted="more", fix="mount")
    two = replace(one, host="b", check="disk", level="fail")
    with pytest.raises(PreflightError) as refused:
        refuse_failures([one, two])
    found = errors.error_json(refused.value)["findings"]
    assert [(item["host"], item["check"], item["level"]) for item in found] == [
        ("b", "disk", "fail"),
        ("a", "shm", "warn"),
    ]


def test_every_error_has_an_exit_code_of_its_own():
    """No error of a user's ends with the code of a bug."""
    kinds = LlmtrainError.__subclasses__()
    assert kinds
    assert all(kind.exit_code not in {ExitCode.OK, ExitCode.BUG} for kind in kinds)


def test_a_bug_leaves_a_file_and_says_where(capsys, tmp_path, monkeypatch):
    """A fault of ours is one error with the path of a debug file, and exit code 1."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(KeyError) as caught:
        {}["inner"]
    code = errors.show_bug(caught.value)
    assert code == ExitCode.BUG
    (path,) = tmp_path.iterdir()
    assert "KeyError" in path.read_text()
    assert str(path) in capsys.readouterr().err
