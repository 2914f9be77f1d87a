"""Environments: what is refused, what is rewritten, and real ones that start on hosts that had nothing."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from tests.sync.condabox import ROOM, VERSION, copy_python, install, make_channel, write_wheel
from tests.sync.test_faults import SOURCE

from llmtrain.errors import InputFileError, UsageError
from llmtrain.sync.condaenv import prepare_environment, read_environment
from llmtrain.sync.place import users_of
from llmtrain.sync.relocate import MAX_SHEBANG, replace_binary, replace_text


def test_another_path_needs_a_word(tmp_path):
    """An environment is not copied to a path it was not made for unless that is asked for."""
    copy = tmp_path / "env"
    (copy / "bin").mkdir(parents=True)
    (copy / "bin/python").symlink_to(sys.executable)
    with pytest.raises(UsageError, match="only at the path"):
        prepare_environment(copy, "/other", relocate=False)


def test_a_package_installed_in_place_is_refused_by_name(tmp_path):
    """What lives outside the environment would be missing on the hosts."""
    folder = tmp_path / "env/lib/python3.11/site-packages/mine-1.0.dist-info"
    folder.mkdir(parents=True)
    (tmp_path / "env/bin").mkdir()
    (tmp_path / "env/bin/python").symlink_to(sys.executable)
    (folder / "direct_url.json").write_text('{"url": "file:///home/me/mine", "dir_info": {"editable": true}}')
    with pytest.raises(InputFileError, match="mine from /home/me/mine"):
        prepare_environment(tmp_path / "env", str(tmp_path / "env"), relocate=False)
    assert prepare_environment(tmp_path / "env", str(tmp_path / "env"), relocate=False, force=True)


def test_a_link_to_an_environment_is_refused_with_what_to_name(tmp_path):
    """Files of an environment name the path it was made at, so a link to it is no second environment."""
    (tmp_path / "env-3/bin").mkdir(parents=True)
    (tmp_path / "env-3/bin/python").symlink_to(sys.executable)
    (tmp_path / "current").symlink_to("env-3")
    with pytest.raises(InputFileError, match="a link to") as caught:
        prepare_environment(tmp_path / "current", str(tmp_path / "current"), relocate=False)
    assert f"name {tmp_path}/env-3" in caught.value.fix


def test_a_folder_without_an_interpreter_is_no_environment(tmp_path):
    """The error says what is missing."""
    with pytest.raises(InputFileError, match="bin/python"):
        read_environment(tmp_path)


def test_text_gets_the_new_prefix_and_a_long_first_line_goes_through_a_shell():
    """Only whole path names are replaced; a first line the kernel would cut still starts the interpreter."""
    assert replace_text(b"#!/old/bin/python\nx = '/old/lib', '/older'\n", b"/old", b"/new") == (
        b"#!/new/bin/python\nx = '/new/lib', '/older'\n"
    )
    long = b"/" + b"n" * MAX_SHEBANG
    first = replace_text(b"#!/old/bin/python\npass\n", b"/old", long).splitlines()
    assert first[0] == b"#!/bin/sh"
    assert long + b"/bin/python" in first[1]


def test_a_binary_keeps_its_length():
    """The new prefix uses the room conda left, and what does not fit is refused."""
    data = b"ELF\0/old/share" + b"\0" * 30 + b"tail"
    found = replace_binary(data, b"/old", b"/much/longer", 20, "lib.so")
    assert len(found) == len(data)
    assert b"/much/longer/share\0" in found
    assert found.endswith(b"tail")
    with pytest.raises(InputFileError, match="longer than"):
        replace_binary(data, b"/old", b"/" + b"x" * 20, 20, "lib.so")


def put(lab, folder) -> None:
    """The same folder at the same path on the head of the lab."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(folder)
    process = lab.popen("head", ["tar", "-xpf", "-", "-C", "/"], stdin=subprocess.PIPE, text=False)
    process.communicate(buffer.getvalue())
    assert process.returncode == 0


def sync_env(lab, prefix, *options: str) -> dict:
    """Run `llmtrain sync-env` on the head."""
    lab.write("head", "/root/hosts", "".join(f"{name} slots=1\n" for name in lab.nodes))
    command = [sys.executable, "-m", "llmtrain.cli", "sync-env", str(prefix), "--hosts", "/root/hosts", "--json"]
    done = lab.run("head", [*command, *options], env={"PYTHONPATH": SOURCE}, check=False, timeout=120)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def say(lab, *argv: str) -> str:
    """What a program on the last node prints."""
    return lab.run(lab.nodes[-1], list(argv)).stdout.strip()


def test_a_venv_goes_with_the_interpreter_it_was_made_from(lab3, tmp_path):
    """On hosts that had neither it starts, its script runs, a second sync sends nothing; relocated it works as well."""
    copy_python(tmp_path / "base")
    venv = tmp_path / "venv"
    subprocess.run([tmp_path / "base/bin/python", "-m", "venv", "--without-pip", venv], check=True)
    script = venv / "bin/hello"
    script.write_text(f"#!{venv}/bin/python\nimport sys\nprint(sys.prefix)\n")
    script.chmod(0o755)
    put(lab3, tmp_path)
    report = sync_env(lab3, venv)
    assert report["ok"], report
    assert say(lab3, str(script)) == str(venv)
    assert "start" in report["hosts"][0]["note"]
    again = sync_env(lab3, venv)
    assert [host["bytes_sent"] for host in again["hosts"]] == [0, 0, 0]
    assert sync_env(lab3, venv, "--dest", "/data/moved", "--relocate")["ok"]
    assert say(lab3, "/data/moved/bin/hello") == "/data/moved"


def test_a_uv_environment_goes_with_its_interpreter_by_the_name_uv_calls_it(lab3, tmp_path):
    """Uv names interpreters through a link of the minor version; the environment starts on hosts that had neither."""
    copy_python(tmp_path / f"cpython-{VERSION}.0-linux")
    base = tmp_path / f"cpython-{VERSION}-linux"
    base.symlink_to(f"cpython-{VERSION}.0-linux")
    uv = [Path(sys.executable).with_name("uv"), "--no-config", "--offline"]
    subprocess.run([*uv, "venv", "-q", "--python", base / f"bin/python{VERSION}", tmp_path / "uv"], check=True)
    wheel = write_wheel(tmp_path)
    subprocess.run([*uv, "pip", "install", "-q", "--no-index", "--python", tmp_path / "uv", wheel], check=True)
    put(lab3, tmp_path)
    report = sync_env(lab3, tmp_path / "uv")
    assert report["ok"], report
    assert say(lab3, str(tmp_path / "uv/bin/frompip")) == "from pip"
    assert say(lab3, "head", "-1", str(tmp_path / "uv/bin/frompip")) == f"#!{tmp_path}/uv/bin/python"
    assert read_environment(tmp_path / "uv").kind == "uv"


def test_a_process_of_a_venv_is_seen_although_its_program_is_a_link(tmp_path):
    """What it has mapped belongs to the interpreter the venv was made from; the name it was started under tells."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    argv = [tmp_path / "venv/bin/python", "-I", "-S", "-c", "print(1, flush=True); input()"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert [text.split()[0] for text in users_of(str(tmp_path / "venv"))] == [str(process.pid)]
        process.communicate(b"\n")
    assert users_of(str(tmp_path / "venv")) == []


def test_an_environment_in_use_is_not_swapped(lab3, tmp_path):
    """A running process of the environment stops the swap, by name; --force goes on."""
    copy_python(tmp_path / "env")
    put(lab3, tmp_path)
    assert sync_env(lab3, tmp_path / "env")["ok"]
    python = str(tmp_path / "env/bin/python")
    with lab3.popen("node2", [python, "-c", "import time; time.sleep(600)"]) as process:
        lab3.run("head", ["sh", "-c", f"echo x=1 > {tmp_path}/env/lib/python{VERSION}/site-packages/x.py"])
        report = sync_env(lab3, tmp_path / "env")
        assert [host["ok"] for host in report["hosts"]] == [True, False, True]
        assert "in use by" in report["hosts"][1]["error"]
        assert sync_env(lab3, tmp_path / "env", "--force")["ok"]
        process.kill_group()


def test_a_conda_environment_works_at_its_path_and_relocated(lab3, tmp_path):
    """Placeholders, a folder link, entry points, a pip package: the same path as is, another path rewritten."""
    prefix = tmp_path / "envs/real"
    install(make_channel(tmp_path / "build"), prefix)
    assert (prefix / "lib/python3.1").is_symlink()
    put(lab3, prefix)
    report = sync_env(lab3, prefix)
    assert report["ok"], report
    for name, answer in {"thing": f"thing in {prefix}", "hello": "hello", "frompip": "from pip"}.items():
        assert say(lab3, str(prefix / "bin" / name)) == answer
    moved = "/data/envs/" + "m" * 60
    report = sync_env(lab3, prefix, "--dest", moved, "--relocate")
    assert report["ok"], report
    for name, answer in {"thing": f"thing in {moved}", "hello": "hello", "frompip": "from pip"}.items():
        assert say(lab3, f"{moved}/bin/{name}") == answer
    assert say(lab3, "cat", f"{moved}/lib/thing.pc") == f"prefix={moved}\nlibs=-L{moved}/lib"
    assert say(lab3, "grep", "-c", f"{moved}/share/thing", f"{moved}/lib/libthing.so") == "1"
    size = say(lab3, "stat", "-c", "%s", f"{moved}/lib/libthing.so")
    assert int(size) == 5 + len(ROOM) + len("/share/thing\0") + 8 + len("tail\0")


def test_an_archive_is_unpacked_once_on_the_head(lab3, tmp_path):
    """A .tar.gz of an environment stands at its prefix on the head and on all hosts, and works there."""
    copy_python(tmp_path / "packed")
    with tarfile.open(tmp_path / "packed.tar.gz", "w:gz", compresslevel=1) as tar:
        tar.add(tmp_path / "packed", ".")
    lab3.run("head", ["mkdir", "-p", str(tmp_path)])
    put(lab3, tmp_path / "packed.tar.gz")
    report = sync_env(lab3, tmp_path / "packed.tar.gz")
    assert report["ok"], report
    assert say(lab3, str(tmp_path / "packed/bin/python"), "-c", "import sys; print(sys.prefix)") == str(
        tmp_path / "packed"
    )
    assert sync_env(lab3, tmp_path / "packed.tar.gz")["head_bytes_sent"] == 0
