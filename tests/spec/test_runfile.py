from __future__ import annotations

import pytest

from llmtrain.errors import ExitCode, InputFileError, UsageError
from llmtrain.spec.runfile import read_env_file, read_run


def _write(tmp_path, text, name="llmtrain.yaml"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


FAULTS = [
    ("naem: x\n", 1, "unknown key naem", "name"),
    ("name: x\nbatch:\n  mirco: 2\n", 3, "unknown key batch.mirco", "batch.micro"),
    ("batch:\n  global: 2.5\n", 2, "batch.global", None),
    ("batch: {micro: 0}\n", 1, "batch.micro", None),
    ("batch: {micro: true}\n", 1, "batch.micro", None),
    ("training:\n  learning_rate: fast\n", 2, "training.learning_rate", None),
    ("training:\n  learning_rate: 3\n", 2, "training.learning_rate", None),
    ("training:\n  schedule: cosin\n", 2, "training.schedule", None),
    ("model:\n  dtype: bfloat16\n", 2, "model.dtype", None),
    ("model: /models/x\n", 1, "model", None),
    ("name: a\nname: b\n", 2, "stands twice", None),
    ("name: [a\n", 2, "not valid YAML", None),
    ("name: !!python/object:os.system {}\n", 1, "not valid YAML", None),
    ("- a\n", 1, "not a mapping", None),
    ("1: a\n", 1, "not text", None),
    ("name: 'has space'\n", 1, "name", None),
    ("network: 10.0.0.0/99\n", 1, "network", None),
    ("network: eth0;id\n", 1, "network", None),
    ("ports: 80-90\n", 1, "ports", None),
    ("ports: 3000-2000\n", 1, "ports", None),
    ("node_dir: '/scratch/$(id)'\n", 1, "node_dir", None),
    ("node_dir: scratch\n", 1, "node_dir", None),
    ("env:\n  '1X': y\n", 2, "env", None),
    ("env:\n  RANK: '0'\n", 2, "RANK", None),
    ("env:\n  FLAG: true\n", 2, "env.FLAG", None),
    ("python: /a/python\nenvironment: /b\n", None, "both given", None),
    ("per_host:\n  gpu004: {pyhton: /x}\n", 2, "pyhton", "python"),
    ("data:\n  eval: 1.5\n", 2, "data.eval", None),
    ("data:\n  max_length: -1\n", 2, "data.max_length", None),
    ("setup: 3\n", 1, "setup", None),
]


@pytest.mark.parametrize(("text", "line", "words", "near"), FAULTS, ids=[fault[0][:24] for fault in FAULTS])
def test_bad_run_files_name_the_line(tmp_path, text, line, words, near):
    """Each fault of a run file is refused with exit code 3, its line, and the nearest valid key where there is one."""
    path = _write(tmp_path, text)
    with pytest.raises(InputFileError) as caught:
        read_run(str(path))
    assert words in caught.value.error
    assert caught.value.where == (f"{path}:{line}" if line else str(path))
    assert caught.value.exit_code == ExitCode.INPUT
    if near:
        assert near in caught.value.fix


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("batch.mirco=1", "unknown key"),
        ("batch.micro=x", "batch.micro"),
        ("nothing", "NAME=VALUE"),
        ("a..b=1", "empty part"),
        ("name=[", "not valid YAML"),
    ],
)
def test_bad_set_is_a_usage_error(tmp_path, text, words):
    """A fault in --set is a usage error that quotes the option."""
    with pytest.raises(UsageError) as caught:
        read_run(None, sets=[text], folder=tmp_path)
    assert words in caught.value.error
    assert "--set" in caught.value.where


def test_options_win_over_the_file(tmp_path):
    """Flags win over the file and --set wins over flags, key by key."""
    path = _write(tmp_path, "name: a\nbatch: {micro: 1, accumulation: 3}\nconfig: zero3\n")
    spec = read_run(
        str(path), options={"config": ("--config", "zero2"), "name": ("--name", None)}, sets=["batch.micro=4"]
    )
    assert (spec.name, spec.config, spec.batch.micro, spec.batch.accumulation) == ("a", "zero2", 4, 3)


def test_paths_belong_to_their_origin(tmp_path):
    """Relative paths of the file refer to its folder, those of options to the current folder, HOST:DIR stays."""
    (tmp_path / "sub").mkdir()
    path = _write(tmp_path / "sub", "model: {path: m}\ndata: {path: ../d.jsonl}\nconfig: my.json\nhosts: hf\n")
    spec = read_run(str(path), options={"output": ("--output", "out")}, folder=tmp_path)
    assert spec.model.path == str(tmp_path / "sub" / "m")
    assert spec.data.path == str(tmp_path / "d.jsonl")
    assert spec.config == str(tmp_path / "sub" / "my.json")
    assert spec.output == str(tmp_path / "out")
    assert read_run(str(path), sets=["output=gpu004:/x/y"]).output == "gpu004:/x/y"


def test_default_run_file_is_found(tmp_path):
    """llmtrain.yaml of the current folder is read when no run file is named; without one everything is default."""
    assert read_run(None, folder=tmp_path).name == "run"
    _write(tmp_path, "name: found\n")
    assert read_run(None, folder=tmp_path).name == "found"


def test_named_run_file_must_exist(tmp_path):
    """A run file that is named but missing is an input error."""
    with pytest.raises(InputFileError, match="no such run file"):
        read_run(str(tmp_path / "absent.yaml"))


def test_exponent_numbers_are_numbers(tmp_path):
    """1e-5 is a number although YAML 1.1 reads it as text."""
    assert read_run(None, sets=["training.learning_rate=1e-5"], folder=tmp_path).training.learning_rate == 1e-5


def test_env_layers_and_values_survive(tmp_path):
    """--env wins over env:, which wins over env_file, and values keep every character."""
    _write(tmp_path, "A='from file'\n# note\n\nB=$(touch x) `y` \"z\" %h=1\n", "secrets.env")
    _write(tmp_path, "env_file: secrets.env\nenv: {C: 1, A: two}\n")
    spec = read_run(None, envs=["D=a=b\nc", "C=3"], folder=tmp_path)
    assert spec.env == {"A": "two", "B": '$(touch x) `y` "z" %h=1', "C": "3", "D": "a=b\nc"}


@pytest.mark.parametrize(
    ("line", "words"), [("no equals", "without '='"), ("export A=hush", "not the name"), ("RANK=hush", "RANK")]
)
def test_bad_env_file_never_shows_values(tmp_path, line, words):
    """A bad line of an environment file is named by number, and its value is not repeated."""
    path = _write(tmp_path, f"OK=1\n{line}\n", "e.env")
    with pytest.raises(InputFileError) as caught:
        read_env_file(str(path))
    assert caught.value.where == f"{path}:2"
    assert words in caught.value.error
    assert "hush" not in str(caught.value)


def test_set_reaches_every_key(tmp_path):
    """--set reaches nested, free and list keys."""
    spec = read_run(
        None,
        sets=["deepspeed.zero_optimization.stage=2", "env.X=y", "setup=[module load cuda]", "per_host.a.python=/p"],
        folder=tmp_path,
    )
    assert spec.deepspeed == {"zero_optimization": {"stage": 2}}
    assert spec.env == {"X": "y"}
    assert spec.setup == ("module load cuda",)
    assert spec.per_host["a"].python == "/p"


def test_the_sync_block_takes_paths_of_its_folder_and_refuses_what_is_no_rate(tmp_path):
    """Relative paths refer to the file's folder, in --set to the current one; a bad value is placed by line."""
    file = tmp_path / "conf/run.yaml"
    file.parent.mkdir()
    file.write_text("sync: {environment: same, paths: [lib, /abs], rate: 800mbit}\n")
    spec = read_run(str(file), folder=tmp_path)
    assert spec.sync.paths == (str(tmp_path / "conf/lib"), "/abs")
    assert (spec.sync.model, spec.sync.environment) == ("missing", "same")
    again = read_run(str(file), folder=tmp_path, sets=("sync.paths=[other]",))
    assert again.sync.paths == (str(tmp_path / "other"),)
    file.write_text("name: x\nsync:\n  rate: fast\n")
    with pytest.raises(InputFileError, match="not a rate") as caught:
        read_run(str(file), folder=tmp_path)
    assert caught.value.where == f"{file}:3"
