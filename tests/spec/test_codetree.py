from __future__ import annotations

import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.errors import InputFileError, UsageError
from llmtrain.spec import codetree
from llmtrain.spec.codetree import read_code

FILES = (
    "a.py", "b.log", "build/x.o", "build/deep/y.o", "src/a.py", "src/b.log", "src/build/z", "docs/[x].md", "!odd",
    "#odd", "data/one.csv", "data/keep.csv", "sp ace.txt", "src/data/two.csv",
)  # fmt: skip


def fill(folder, rules, inner=""):
    """A tree with rules at its top and in a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / ".gitignore").write_text(rules)
    if inner:
        (folder / "src/.gitignore").write_text(inner)


def git_says(folder):
    """The files git would take."""
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    command = ["git", "-c", "core.excludesFile=/dev/null", "ls-files", "-coz", "--exclude-standard"]
    listed = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    return sorted(filter(None, listed.split("\0")))


LINES = st.sampled_from(
    ["*.log", "!b.log", "build", "build/", "/build", "/a.py", "src/*.log", "**/data", "data/*", "!data/keep.csv",
     "d*/**", "**/z", "src/**/z", "?dd",
     "\\#odd", "\\!odd", "# note", "", "docs/[[]x].md", "*.[ch]sv", "sp ace.txt  ", "one.csv",
     "[!a]*.py", "!/a.py", "*", "!src", "!src/a.py"]
)  # fmt: skip


@settings(max_examples=60)
@given(st.lists(LINES, max_size=4), st.lists(LINES, max_size=2))
def test_the_same_files_as_git(tmp_path_factory, rules, inner):
    """What is sent is what git would take, for rules at the top and in a folder below."""
    folder = tmp_path_factory.getbasetemp() / "ignored"
    fill(folder, "\n".join(rules), "\n".join(inner))
    assert list(read_code(str(folder)).files) == git_says(folder)


def test_no_caches_and_no_repository(tmp_path):
    """The repository itself, environments and caches are never sent."""
    for name in (".git/config", "__pycache__/a.pyc", ".venv/bin/python", "pkg/__pycache__/b.pyc", "pkg/c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("12345")
    tree = read_code(str(tmp_path))
    assert tree.files == ("pkg/c.py",)
    assert str(tree) == f"1 files, 0.0 KiB, of {tmp_path}"


def test_far_more_than_code(tmp_path, monkeypatch):
    """A folder with weights in it is refused, with the way out."""
    monkeypatch.setattr(codetree, "MAX_BYTES", 10)
    (tmp_path / "weights").write_bytes(b"x" * 11)
    with pytest.raises(UsageError, match="holds more than") as caught:
        read_code(str(tmp_path))
    assert ".gitignore" in caught.value.fix


def test_not_a_folder(tmp_path):
    """A code folder that is not there is an error."""
    with pytest.raises(InputFileError):
        read_code(str(tmp_path / "absent"))
