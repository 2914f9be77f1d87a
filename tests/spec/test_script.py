from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtrain.errors import InputFileError, UsageError
from llmtrain.spec.script import PLACES, fill_args, parse_script


@pytest.fixture
def project(tmp_path):
    """A project with a script in a folder, a module and a file of settings."""
    for name in ("src/train.py", "tool/__init__.py", "my.yaml", "plain"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    return tmp_path


def parse(folder, *words, code=None):
    """The parts of a parsed program."""
    found = parse_script(words, code=code, folder=folder)
    return found.kind, found.target, found.args, found.code, found.cwd


def test_file_brings_its_folder(project):
    """A script is sent with its own folder and runs at its top when the user stands elsewhere."""
    assert parse(project, "src/train.py", "a") == ("file", "train.py", ("a",), str(project / "src"), ".")


def test_code_keeps_the_layout(project):
    """With --code the script keeps its place below it and runs in the folder the user stands in."""
    expected = ("file", "src/train.py", (), str(project), "src")
    assert parse(project / "src", "train.py", code="..") == expected
    assert parse(project, "src/train.py", code=".") == ("file", "src/train.py", (), str(project), ".")


def test_python_in_front_is_dropped(project):
    """`python train.py` means the hosts' interpreter."""
    assert parse(project, "python3.11", "src/train.py")[:2] == ("file", "train.py")
    assert parse(project, "python", "-m", "tool.run", "x")[:3] == ("module", "tool.run", ("x",))


def test_module_here_brings_this_folder(project):
    """A module that is found here, as with `python -m`, is sent; one of the environment brings nothing."""
    assert parse(project, "-m", "tool")[3] == str(project)
    assert parse(project, "-m", "pkg.of.environment") == ("module", "pkg.of.environment", (), None, ".")


def test_command_of_the_environment(project):
    """A bare word that is no file is a command of the environment's bin."""
    expected = ("console", "llamafactory-cli", ("train", "my.yaml"), str(project), ".")
    assert parse(project, "llamafactory-cli", "train", "my.yaml", code=".") == expected


@pytest.mark.parametrize("word", ["my.yaml", "--config=my.yaml"])
def test_file_that_would_be_missing(project, word):
    """A file of this folder among a command's arguments is refused as long as no code is sent."""
    with pytest.raises(UsageError, match=r"my\.yaml is a file here") as caught:
        parse(project, "llamafactory-cli", "train", word)
    assert "--code ." in caught.value.fix


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ((), UsageError),
        (("-m",), UsageError),
        (("-m", "not a module"), UsageError),
        (("absent.py",), InputFileError),
        (("torchrun", "src/train.py"), UsageError),
        (("no/such/command",), UsageError),
        (("src",), None),
    ],
)
def test_what_cannot_be_run(project, words, kind):
    """What cannot be understood is said before any host is contacted; a folder's name may be a command's."""
    if kind is None:
        assert parse(project, *words)[0] == "console"
        return
    with pytest.raises(kind) as caught:
        parse(project, *words)
    assert caught.value.fix


def test_script_outside_of_the_code(project):
    """A script that --code does not hold is refused."""
    with pytest.raises(UsageError, match="not in the code folder"):
        parse(project, "src/train.py", code="tool")


@given(st.lists(st.text()), st.text())
def test_arguments_stay(args, value):
    """Whatever an argument holds besides the places stays as it is, and values are not looked into."""
    args = [arg for arg in args if not any(f"{{{name}}}" in arg for name in PLACES)]
    places = dict.fromkeys(PLACES, value)
    assert fill_args(args, places) == tuple(args)
    assert fill_args(["a{output}b{data}"], places) == (f"a{value}b{value}",)


def test_place_that_is_not_given():
    """An argument that names the model needs a model."""
    with pytest.raises(UsageError, match=r"\{model\}") as caught:
        fill_args(["{model}"], dict.fromkeys(PLACES))
    assert "--model" in caught.value.fix
