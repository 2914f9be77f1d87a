"""From the words of a command to a sync: what is chosen where nothing is said, and every form on real hosts."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

import pytest
from tests.documented import stale_lines
from tests.sync.condabox import copy_python
from tests.sync.test_condaenv import put
from tests.sync.test_faults import SOURCE

from llmtrain.errors import UsageError
from llmtrain.spec.hostfile import read_hostfile
from llmtrain.spec.runfile import read_run
from llmtrain.sync import envlook
from llmtrain.sync.order import SyncOptions, choose_source, make_request, node_dirs
from llmtrain.sync.request import DEFAULT_PORTS

RUN = """\
hosts: hosts
model: {path: /models/m}
environment: /envs/e
network: 10.0.0.0/24
ports: 21000-21999
node_dir: /scratch/work
per_host: {a: {node_dir: /fast/work}}
"""


@pytest.fixture
def spec(tmp_path):
    """A run file and a hostfile of four hosts."""
    (tmp_path / "hosts").write_text("".join(f"{name} slots=1\n" for name in "abcd"))
    (tmp_path / "llmtrain.yaml").write_text(RUN)
    return read_run(None, folder=tmp_path)


def request(spec, *words, what="files", **options):
    """What these words ask for."""
    return make_request(what, words, SyncOptions(**options), spec, read_hostfile(spec.hosts))


def test_a_bare_command_takes_what_the_run_file_names(spec):
    """Model, environment, hosts, network and ports come from the run file."""
    assert request(spec, what="weights").path == "/models/m"
    found = request(spec, what="environment")
    assert (found.path, found.dest, found.hosts) == ("/envs/e", "/envs/e", ("a", "b", "c", "d"))
    assert (found.network, found.ports) == ("10.0.0.0/24", (21000, 21999))
    assert choose_source("weights", spec)[1] == "model.path of the run file"
    assert node_dirs(spec, found.hosts) == {
        "": "/scratch/work",
        "a": "/fast/work",
        **dict.fromkeys("bcd", "/scratch/work"),
    }


def test_a_bare_command_without_a_run_file_takes_the_active_environment(tmp_path, monkeypatch):
    """VIRTUAL_ENV, else CONDA_PREFIX; with neither the error says what to write."""
    (tmp_path / "hosts").write_text("a slots=1\n")
    spec = read_run(None, options={"hosts": ("--hosts", str(tmp_path / "hosts"))}, folder=tmp_path)
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.setenv("CONDA_PREFIX", "/opt/conda/envs/x")
    found = request(spec, what="environment")
    assert (found.path, found.ports) == ("/opt/conda/envs/x", DEFAULT_PORTS)
    monkeypatch.setenv("VIRTUAL_ENV", "/home/me/.venv")
    assert request(spec, what="environment").path == "/home/me/.venv"
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name)
    with pytest.raises(UsageError, match="no source is given") as caught:
        request(spec, what="environment")
    assert "environment into llmtrain.yaml" in caught.value.fix


def test_the_form_of_older_scripts(spec):
    """SOURCE DEST FIRST_HOST LAST_HOST means the hosts from the first to the last of the hostfile."""
    found = request(spec, "/data/x", "/data/y", "b", "c")
    assert (found.path, found.dest, found.hosts) == ("/data/x", "/data/y", ("b", "c"))
    with pytest.raises(UsageError, match="e is not in the hostfile"):
        request(spec, "/data/x", "/data/y", "b", "e")
    with pytest.raises(UsageError, match="b stands before c"):
        request(spec, "/data/x", "/data/y", "c", "b")


def test_a_source_on_a_host_is_an_absolute_path(spec):
    """HOST:/PATH is split; a path with a colon in it is a path."""
    found = request(spec, "gpu008:/data/x")
    assert (found.source_host, found.path, found.dest) == ("gpu008", "/data/x", "/data/x")
    assert request(spec, "/data/a:b").source_host is None
    with pytest.raises(UsageError, match="absolute"):
        request(spec, "gpu008:data")


def test_rates_are_bytes_or_bits(spec):
    """100M is bytes, 800mbit is bits; anything else is refused with an example."""
    assert request(spec, "/x", rate="100M").rate == 1e8
    assert request(spec, "/x", rate="800mbit").rate == 1e8
    with pytest.raises(UsageError, match="not a rate"):
        request(spec, "/x", rate="fast")


class Commands:
    """`llmtrain sync...` on the head of a lab, in a folder with a run file."""

    def __init__(self, lab) -> None:
        self.lab = lab
        self.err = ""

    def run(self, *argv: str, env: dict | None = None, cwd: str = "/root/order") -> dict:
        """Its JSON document; what it told is in `err`."""
        command = [sys.executable, "-m", "llmtrain.cli", *argv, "--json"]
        done = self.lab.run("head", command, cwd=cwd, env={"PYTHONPATH": SOURCE, **(env or {})}, check=False)
        self.err = done.stderr
        return {**json.loads(done.stdout), "code": done.returncode}

    def say(self, host: str, script: str) -> str:
        """What a shell line prints on a host."""
        return self.lab.run(host, ["sh", "-c", script], check=False).stdout.strip()


@pytest.fixture
def commands(lab3, tmp_path):
    """A folder on the head with a run file, and an environment."""
    found = Commands(lab3)
    copy_python(tmp_path / "env")
    put(lab3, tmp_path / "env")
    lab3.write("head", "/root/order/hosts", "".join(f"{name} slots=1\n" for name in lab3.nodes))
    lab3.write("head", "/root/order/llmtrain.yaml", f"hosts: hosts\nenvironment: {tmp_path}/env\nports: 21000-21009\n")
    return found


def test_bare_sync_env_and_its_archives(commands, tmp_path):
    """Without words the run file's environment goes to the run file's hosts and that is said; so does an archive of it.

    A .tar and a .tar.zst are unpacked once, and again only when they are newer.
    """
    report = commands.run("sync-env")
    assert report["ok"], report
    told = re.sub(r"; Python [\d.]+ start", "", commands.err)
    # A transfer of less than half a second is compared with nothing.
    assert [one for one in stale_lines("sync", "llmtrain sync", told) if "left the source" not in one] == [], told
    assert f"{tmp_path}/env: environment of the run file" in commands.err
    assert "node1, node2, node3 (/root/order/hosts)" in commands.err
    fields = {"host", "ok", "bytes_sent", "bytes_reused", "seconds", "error"}
    assert fields <= set(report["hosts"][0])
    assert {"hosts", "head_bytes_sent", "transfer_seconds", "seconds"} <= set(report)
    active = commands.run(
        "sync-env", env={"VIRTUAL_ENV": f"{tmp_path}/env", "LLMTRAIN_HOSTS": "order/hosts"}, cwd="/root"
    )
    assert [host["bytes_sent"] for host in active["hosts"]] == [0, 0, 0]
    assert "VIRTUAL_ENV" in commands.err
    for name, pack in {"plain.tar": "tar -cf", "packed.tar.zst": "tar --zstd -cf"}.items():
        commands.say("head", f"mkdir -p /data; cd /data && {pack} {name} -C {tmp_path} env")
        prefix = f"/data/{name.partition('.')[0]}"
        assert commands.run("sync-env", f"/data/{name}")["ok"], commands.err
        assert commands.say("node3", f"{prefix}/bin/python -c 'import sys; print(sys.prefix)'") == prefix
    commands.say("head", f"echo y = 1 > {tmp_path}/env/y.py; cd /data && tar -cf plain.tar -C {tmp_path} env")
    again = commands.run("sync-env", "/data/plain.tar")
    assert again["ok"], again
    assert 0 < again["hosts"][0]["bytes_sent"] < 10_000
    assert commands.say("node2", "cat /data/plain/y.py") == "y = 1"


def test_a_tree_of_a_host_to_some_hosts_without_what_is_excluded(commands):
    """The source is a host, the last two hosts get it, and a pattern leaves files out; generations come and go."""
    commands.say(
        "node1",
        "mkdir -p /data/few/logs; echo 1 > /data/few/v; echo x > /data/few/logs/a.log; echo p > /data/few/p",
    )
    words = ("sync", "node1:/data/few", "/data/few", "node2", "node3")
    report = commands.run(*words, "--exclude", "*.log", "--exclude", "p")
    assert [host["host"] for host in report["hosts"]] == ["node2", "node3"]
    assert report["ok"], report
    assert commands.say("node3", "cd /data/few; find . | sort | tr '\\n' ' '") == ". ./logs ./v"
    whole = commands.run("sync", "node1:/data/few")
    assert whole["ok"], whole
    assert whole["hosts"][0]["note"] == "is the source"
    for value in "23":
        commands.say("node1", f"echo {value} > /data/few/v")
        assert commands.run(*words, "--keep", "2")["ok"]
    dry = commands.run(*words, "--rollback", "--dry-run")
    assert dry["ok"]
    assert commands.run(*words, "--rollback")["ok"]
    assert [commands.say(host, "cat /data/few/v") for host in ("node2", "node3")] == ["2", "2"]
    commands.say("node1", "echo 4 > /data/few/v")
    commands.lab.sshd_stop("node3")
    alone = commands.run(*words, "--rollback")
    assert "left as it is, because node3 cannot be reached" in alone["hosts"][0]["error"]
    commands.lab.sshd_start("node3")
    assert commands.run(*words, "--keep", "0")["ok"]
    none = commands.run(*words, "--rollback")
    assert none["code"] == 7
    assert "no older tree" in none["hosts"][0]["error"]
    assert commands.say("node2", "cat /data/few/v") == "4"


def test_an_environment_of_a_host_is_looked_at_there(commands, tmp_path):
    """A venv on a host goes to the others with its interpreter; one with a package installed in place is refused."""
    commands.run("sync", f"{tmp_path}/env", f"{tmp_path}/env", "node1", "node1")
    commands.say("node1", f"{tmp_path}/env/bin/python -m venv --without-pip {tmp_path}/venv")
    words = (f"node1:{tmp_path}/venv", f"{tmp_path}/venv", "node2", "node3")
    report = commands.run("sync-env", *words)
    assert report["ok"], (report, commands.err)
    assert f"its interpreter in {tmp_path}/env goes along" in commands.err
    assert commands.say("node3", f"{tmp_path}/venv/bin/python -c 'import sys; print(sys.prefix)'") == f"{tmp_path}/venv"
    site = f"{tmp_path}/venv/lib/python3.{sys.version_info[1]}/site-packages/mine-1.dist-info"
    document = '{"url": "file:///home/me/mine", "dir_info": {"editable": true}}'
    commands.say("node1", f"mkdir {site}; echo '{document}' > {site}/direct_url.json")
    refused = commands.run("sync-env", *words)
    assert refused["code"] == 3
    assert "mine from /home/me/mine" in refused["error"]
    assert refused["where"].startswith("node1:")


def test_what_looks_at_environments_is_read_by_an_old_python():
    """It runs on a host whose python3 may be of 2016."""
    ast.parse(Path(envlook.__file__).read_text(encoding="utf-8"), feature_version=(3, 6))
