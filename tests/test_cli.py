"""Bad input of every kind ends in one `error:`, one `where:`, one `fix:` and a documented code, and changes nothing."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from dataclasses import dataclass, field

import pytest

from llmtrain import cli
from llmtrain.cli_groups import GROUPS, OTHERS

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 32,
    "max_position_embeddings": 64,
}
CHAT = json.dumps({"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]}) + "\n"
GOOD = {
    "hostfile": "a slots=2\nb slots=2\n",
    "data.jsonl": CHAT * 4,
    "llmtrain.yaml": "model: {path: model}\ndata: {path: data.jsonl}\n",
}
LAUNCH = ("launch", "--hosts", "hostfile", "--config", "zero3-offload")


@dataclass(frozen=True)
class Bad:
    """One way to be wrong."""

    name: str
    code: int
    error: str
    where: str
    argv: tuple[str, ...] = LAUNCH
    files: dict[str, str | None] = field(default_factory=dict)

    def __str__(self):
        return self.name


def hostfile(name, text, error, line=1):
    """A hostfile that is refused."""
    return Bad(name, 3, error, f"hostfile:{line}", files={"hostfile": text})


def run_file(name, text, error, line=1):
    """A run file that is refused."""
    return Bad(name, 3, error, f"llmtrain.yaml:{line}", files={"llmtrain.yaml": text})


def option(name, error, where, *more):
    """Options that are refused."""
    return Bad(name, 2, error, where, argv=(*LAUNCH, *more))


CASES = [
    hostfile("hostfile-option", "-oProxyCommand=touch${IFS}canary slots=1\n", "not a host name"),
    hostfile("hostfile-file", "^hosts slots=1\n", "not a host name"),
    hostfile("hostfile-module", "exec:a slots=1\n", "not a host name"),
    hostfile("hostfile-shell", "a;touch${IFS}canary slots=1\n", "not a host name"),
    hostfile("hostfile-substitution", "$(touch${IFS}canary) slots=1\n", "not a host name"),
    hostfile("hostfile-user", "root@a slots=1\n", "a user in the host name"),
    hostfile("hostfile-port", "a:2222 slots=1\n", "a port in the host name"),
    hostfile("hostfile-range", "a slots=1\nb[1-3] slots=1\n", "a range", line=2),
    hostfile("hostfile-no-slots", "a\n", "no slots for host a"),
    hostfile("hostfile-zero", "a slots=0\n", "not between 1 and"),
    hostfile("hostfile-twice", "a slots=1\nA slots=1\n", "duplicate host", line=2),
    hostfile("hostfile-unicode", "g\u200bpu slots=1\n", "an unusual character"),
    hostfile("hostfile-long", f"{'a' * 300} slots=1\n", "not a host name"),
    hostfile("hostfile-ipv6", "fe80::1 slots=1\n", "an IPv6 address"),
    hostfile("hostfile-loopback", "a slots=1\nlocalhost slots=1\n", "localhost among several hosts", line=2),
    Bad("hostfile-empty", 3, "no hosts in the hostfile", "hostfile", files={"hostfile": "# nothing\n"}),
    Bad("hostfile-missing", 3, "no such hostfile", "hostfile", files={"hostfile": None}),
    run_file("run-unknown-key", "model: {path: model, dtyp: bf16}\n", "unknown key model.dtyp"),
    run_file("run-wrong-type", "batch:\n  micro: many\n", "batch.micro", line=2),
    run_file("run-key-twice", "name: a\nname: b\n", "stands twice", line=2),
    run_file("run-tag", "name: !!python/object/apply:os.system ['touch canary']\n", "tag"),
    run_file("run-list", "- a\n", "not a mapping"),
    run_file("run-broken-yaml", "name: [a\n", "", line=2),
    run_file("run-node-dir", "node_dir: '/tmp/$(touch canary)'\n", "node_dir: must be an absolute path"),
    run_file("run-reserved-variable", "env: {MASTER_ADDR: 10.0.0.1}\n", "MASTER_ADDR is set by the launcher"),
    Bad(
        "run-two-interpreters",
        3,
        "python and environment",
        "llmtrain.yaml",
        files={"llmtrain.yaml": "python: /a\nenvironment: /b\n"},
    ),
    Bad(
        "run-alien-host",
        3,
        "c, which is not in the hostfile",
        "hostfile",
        files={"llmtrain.yaml": GOOD["llmtrain.yaml"] + "per_host: {c: {python: /x}}\n"},
    ),
    Bad("run-missing", 3, "no such run file", "other.yaml", argv=(*LAUNCH, "other.yaml")),
    Bad("config-missing", 3, "", "none", argv=("launch", "--hosts", "hostfile", "--config", "none")),
    Bad(
        "config-broken-json",
        3,
        "",
        "ds.json:",
        argv=("launch", "--hosts", "hostfile", "--config", "ds.json"),
        files={"ds.json": '{"zero_optimization": {"stage": 3,}}'},
    ),
    Bad(
        "config-unknown-key",
        3,
        "zero_optimisation",
        "ds.json",
        argv=("launch", "--hosts", "hostfile", "--config", "ds.json"),
        files={"ds.json": '{"zero_optimisation": {"stage": 3}}'},
    ),
    Bad("model-hub-name", 3, "never downloads", "--model", argv=(*LAUNCH, "--model", "org/name")),
    Bad("model-missing", 3, "no such model directory", "elsewhere", argv=(*LAUNCH, "--model", "./elsewhere")),
    Bad("model-is-file", 3, "a file, not a directory", "data.jsonl", argv=(*LAUNCH, "--model", "data.jsonl")),
    Bad("model-no-config", 3, "no config.json", "model", files={"model/config.json": None}),
    Bad("model-no-weights", 3, "", "model", files={"model/model.safetensors": None}),
    Bad("model-damaged", 3, "", "model.safetensors", files={"model/model.safetensors": "not weights"}),
    Bad("data-missing", 3, "No such file", "gone.jsonl", argv=(*LAUNCH, "--data", "gone.jsonl")),
    Bad("data-empty", 3, "", "data.jsonl", files={"data.jsonl": ""}),
    Bad("data-broken-line", 3, "", "data.jsonl:2", files={"data.jsonl": CHAT + '{"messages": [\n'}),
    Bad("data-bad-role", 3, "role", "data.jsonl:1", files={"data.jsonl": CHAT.replace("user", "usr")}),
    Bad("data-mixed", 3, "", "data.jsonl:2", files={"data.jsonl": CHAT + '{"text": "plain"}\n'}),
    Bad("no-hosts", 2, "--hosts HOSTFILE is missing", "command line", argv=("launch", "--config", "zero3")),
    Bad("no-config", 2, "--config PRESET_OR_FILE is missing", "command line", argv=("launch", "--hosts", "hostfile")),
    Bad("no-model", 2, "--model DIR is missing", "command line", files={"llmtrain.yaml": None}),
    option("both-selections", "cannot go together", "--include", "--include", "a", "--exclude", "b"),
    option("include-alien", "no host c", "--include", "--include", "c"),
    option("include-slot", "has no slot 9", "--include", "--include", "a:9"),
    option("too-many-hosts", "not between 1 and 2", "--num-hosts", "--num-hosts", "3"),
    option("port-word", "--master-port", "command line", "--master-port", "http"),
    option("unknown-option", "no such option", "command line", "--gpus", "8"),
    option("set-unknown-key", "unknown key batch.micr", "--set batch.micr=1", "--set", "batch.micr=1"),
    option("set-no-value", "needs NAME=VALUE", "--set", "--set", "batch.micro"),
    option("env-reserved", "RANK is set by the launcher", "--env RANK", "--env", "RANK=0"),
    option("env-bad-name", "not the name of an environment variable", "--env", "--env", "A-B=1"),
    option("set-env-reserved", "RANK is set by the launcher", "--set env.RANK", "--set", "env.RANK=0"),
    option("output-exists", "the output exists", "model", "--output", "model"),
    option("output-in-file", "cannot be made there", "data.jsonl", "--output", "data.jsonl/model"),
    option("output-host", "neither a folder here nor", "output", "--output", "c:/model"),
    Bad(
        "env-file-line",
        3,
        "without '='",
        "secrets:2",
        argv=(*LAUNCH, "--env-file", "secrets"),
        files={"secrets": "A=1\nexport B\n"},
    ),
    Bad("unknown-command", 2, "no such command", "command line", argv=("lunch",)),
]


def weights():
    """A safetensors file with one small tensor."""
    header = {"model.embed_tokens.weight": {"dtype": "BF16", "shape": [32, 8], "data_offsets": [0, 512]}}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(512)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder where a launch would get as far as contacting hosts a and b."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model/tokenizer.json").write_text("{}")
    (tmp_path / "model/model.safetensors").write_bytes(weights())
    for name, text in GOOD.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def listing(folder):
    """Every path below a folder, with its time of change."""
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize("bad", CASES, ids=str)
def test_bad_input(bad, folder, monkeypatch, capsys):
    """One error with place and fix, the documented code, the same as JSON, no traceback, and nothing written."""
    for name, text in bad.files.items():
        (folder / name).unlink() if text is None else (folder / name).write_text(text)
    before = listing(folder)
    monkeypatch.setattr(sys, "argv", ["llmtrain", *bad.argv, "--json"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    shown = capsys.readouterr()
    assert ended.value.code == bad.code, shown.err
    assert [line.partition(": ")[0] for line in shown.err.splitlines()][:3] == ["error", "where", "fix"], shown.err
    assert all(shown.err.count(f"{word}: ") == 1 for word in ("error", "where"))
    assert "Traceback" not in shown.err
    document = json.loads(shown.out)
    assert (document["ok"], document["exit_code"]) == (False, bad.code)
    assert bad.error in document["error"]
    assert bad.where in document["where"]
    assert document["fix"]
    assert listing(folder) == before


def test_table_is_long_enough():
    """At least thirty kinds of bad input are held."""
    assert len(CASES) >= 30


def test_the_good_folder_gets_as_far_as_the_hosts(folder, monkeypatch, capsys):
    """Nothing but the planted fault stops the cases above: unchanged, the folder's launch contacts its hosts."""
    (folder / "hostfile").write_text("a.invalid slots=2\nb.invalid slots=2\n")
    monkeypatch.setattr(sys, "argv", ["llmtrain", *LAUNCH])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    shown = capsys.readouterr()
    assert ended.value.code == 4
    assert "contacting 2 hosts: a.invalid, b.invalid" in shown.err
    assert "error: the name does not resolve" in shown.err
    assert "also (1):\n  b.invalid: the name does not resolve" in shown.err


def test_a_secret_in_an_option_is_not_shown(folder, monkeypatch, capsys):
    """The value of a bad --env is never printed."""
    monkeypatch.setattr(sys, "argv", ["llmtrain", *LAUNCH, "--env", "MASTER_PORT=s3cret", "--json"])
    with pytest.raises(SystemExit):
        cli.main()
    shown = capsys.readouterr()
    assert "s3cret" not in shown.out + shown.err


def test_a_bug_is_exit_code_1_with_a_debug_file(folder, monkeypatch, capsys):
    """A fault of ours is no traceback on the terminal but a file, and exit code 1."""
    monkeypatch.setattr(cli, "_read", lambda *_: 1 / 0)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(sys, "argv", ["llmtrain", *LAUNCH])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    shown = capsys.readouterr()
    (report,) = folder.glob("llmtrain-bug-*.txt")
    assert ended.value.code == 1
    assert str(report) in shown.err
    assert "Traceback" not in shown.err
    assert "ZeroDivisionError" in report.read_text()


@pytest.mark.parametrize("argv", [("--help",), ("--version",), ("launch", "--help"), ("smoke", "-h")])
def test_help_and_version_succeed(argv):
    """Help and version are answered on standard output with code 0."""
    done = subprocess.run([sys.executable, "-m", "llmtrain.cli", *argv], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_render_prints_the_json_alone(folder):
    """`render` prints DeepSpeed's JSON on standard output and its reasons on standard error."""
    argv = [sys.executable, "-m", "llmtrain.cli", "render", "--config", "zero3", "--hosts", "hostfile"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "80"})
    assert json.loads(done.stdout)["zero_optimization"]["stage"] == 3
    assert "train_batch_size" in done.stderr


def test_the_help_has_a_whole_line_for_each_command():
    """At 80 columns no command's line is cut, all commands are there, and no command at all shows the same (code 2)."""
    run = [sys.executable, "-m", "llmtrain.cli"]
    wide = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run([*run, "--help"], capture_output=True, text=True, check=True, env=wide)
    listed = [line for line in done.stdout.splitlines()[1:] if line.startswith("  ")]
    assert not [line for line in listed if line.endswith("...")]
    names = {command.name or command.callback.__name__ for command in cli.app.registered_commands}
    assert names <= {line.split()[0] for line in listed}
    bare = subprocess.run(run, capture_output=True, text=True, check=False, env=wide)
    assert (bare.returncode, bare.stdout.strip()) == (2, done.stdout.strip())


def test_every_command_has_a_heading():
    """The help groups all commands under named headings, in the order of a run's life."""
    headings = [command.rich_help_panel for command in cli.app.registered_commands]
    assert OTHERS not in headings
    assert list(dict.fromkeys(headings)) == [heading for heading in GROUPS if heading in headings]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [("llmtrain laun", ["launch"]), ("llmtrain launch --config zero2", ["zero2", "zero2-offload"])],
)
def test_a_shell_completes(words, wanted, monkeypatch, capsys):
    """Bash is told commands, and presets behind --config."""
    monkeypatch.setenv("_LLMTRAIN_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    monkeypatch.setattr(sys, "argv", ["llmtrain"])
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().out.split() == wanted
