"""Hosts without Python: tar there, looked at with find and sha256sum."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from tests.sync.chainbox import describe

from llmtrain.cluster.local import LocalTransport
from llmtrain.sync.manifest import Scan
from llmtrain.sync.plain import PlainError, compare, push_plain
from llmtrain.sync.request import SyncRequest

SOURCE = str(Path(__file__).resolve().parents[2] / "src")
HIDE = "for p in $(which -a python3 python; ls /usr/bin/python3.*[0-9] /usr/local/bin/python3.*[0-9] 2>/dev/null); do "
HIDE += "p=$(readlink -f $p); mountpoint -q $p || mount --bind /dev/null $p; echo $p; done"


def make_tree(root: Path) -> None:
    """Everything a tree may have."""
    (root / "empty").mkdir(parents=True)
    (root / "a b\nc").write_bytes(b"x" * 3_000_000)
    Path(os.fsdecode(os.fsencode(root) + b"/\xff\xfe")).write_bytes(b"raw name")
    (root / ("n" * 200)).write_bytes(b"")
    os.link(root / "a b\nc", root / "second name")
    (root / "dangling").symlink_to("/nowhere/at all")
    (root / "run").write_bytes(b"#!/bin/sh\n")
    (root / "run").chmod(0o751)
    os.utime(root / "run", ns=(1, 1_234_567_890_123_456_789))
    (root / "empty").chmod(0o555)
    os.utime(root, ns=(1, 987_654_321_000_000_001))


def ask(source: Path, dest: Path, **options) -> SyncRequest:
    """To one host, which is this machine."""
    return SyncRequest(path=str(source), dest=str(dest), hosts=("h",), **options)


def push(source: Path, dest: Path, **options):
    """Carry it out."""
    return push_plain(ask(source, dest, **options), LocalTransport("h"), lambda count: None)


def test_a_tree_goes_by_tar_and_arrives_equal_in_every_attribute(tmp_path):
    """Names of any bytes, links, modes and times to the nanosecond; nothing else is left beside it."""
    make_tree(tmp_path / "source")
    sent = push(tmp_path / "source", tmp_path / "there/tree")
    assert sent.bytes > 3_000_000
    assert describe(tmp_path / "there/tree") == describe(tmp_path / "source")
    assert list((tmp_path / "there").iterdir()) == [tmp_path / "there/tree"]


def test_what_stands_there_is_never_replaced_and_an_equal_tree_is_left(tmp_path):
    """The same tree again sends nothing; another one is refused, and neither tree is touched."""
    make_tree(tmp_path / "source")
    push(tmp_path / "source", tmp_path / "tree")
    assert push(tmp_path / "source", tmp_path / "tree").bytes == 0
    before = describe(tmp_path / "tree")
    (tmp_path / "source/run").write_bytes(b"#!/bin/zsh\n")
    with pytest.raises(PlainError, match="nothing is replaced, and 'tree/run' has another"):
        push(tmp_path / "source", tmp_path / "tree")
    assert describe(tmp_path / "tree") == before


@pytest.mark.parametrize("spoil", ["mode", "time", "content", "link", "besides", "missing"])
def test_every_difference_is_seen(tmp_path, spoil):
    """A copy that differs in one attribute is not taken for the tree, and the difference is named."""
    make_tree(tmp_path / "source")
    sent = push(tmp_path / "source", tmp_path / "tree")
    run = tmp_path / "tree/run"
    info = run.stat()
    if spoil == "mode":
        run.chmod(0o750)
    elif spoil == "time":
        os.utime(run, ns=(1, info.st_mtime_ns + 1))
    elif spoil == "content":
        run.write_bytes(b"#!/bin/xx\n")
        os.utime(run, ns=(1, info.st_mtime_ns))
    elif spoil == "link":
        (tmp_path / "tree/second name").unlink()
        (tmp_path / "tree/second name").write_bytes(b"x" * 3_000_000)
    elif spoil == "besides":
        (tmp_path / "tree/more").write_bytes(b"")
    else:
        run.unlink()
    root = tmp_path / "source"
    os.utime(tmp_path / "tree", ns=(1, root.stat().st_mtime_ns))
    from llmtrain.sync import plain

    seen = plain._look(LocalTransport("h"), str(tmp_path), "tree")
    entries = Scan(str(root)).run().entries
    said = {"link": "inode", "besides": "besides", "missing": "missing"}.get(spoil, spoil)
    assert said in compare(entries, sent.digests, seen, "tree")


@pytest.mark.parametrize("dest", ["/", "/opt", "/root", "/proc"])
def test_system_folders_are_refused(tmp_path, dest):
    """The rules for destinations hold without an agent too."""
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(PlainError, match="refused"):
        push(tmp_path / "file", Path(dest))


def test_a_host_without_python_gets_the_tree_among_others(lab3):
    """One of three hosts has no python3: it gets the tree by tar, says so, and keeps its tree when that changes."""
    hidden = lab3.run("node2", ["bash", "-c", HIDE]).stdout.split()
    try:
        lab3.write("head", "/root/hosts", "".join(f"{name} slots=1\n" for name in lab3.nodes))
        lab3.run(
            "head",
            [
                "sh",
                "-c",
                "mkdir -p /data/pythonless/sub; seq 100000 >/data/pythonless/sub/one; touch /data/pythonless/two",
            ],
        )
        first = _sync(lab3)
        assert (first["exit_code"], [host["ok"] for host in first["hosts"]]) == (0, [True] * 3), first["hosts"][1][
            "error"
        ]
        assert "by tar; no python3" in first["hosts"][1]["note"]
        digest = "cd /data/pythonless && find . -type f | sort | xargs sha256sum"
        assert len({lab3.run(name, ["sh", "-c", digest]).stdout for name in lab3.names}) == 1
        assert "unchanged" in _sync(lab3)["hosts"][1]["note"]
        lab3.run("head", ["sh", "-c", "echo more >>/data/pythonless/two"])
        third = _sync(lab3)
        assert (third["exit_code"], [host["ok"] for host in third["hosts"]]) == (7, [True, False, True])
        assert "nothing is replaced" in third["hosts"][1]["error"]
        assert lab3.run("node2", ["cat", "/data/pythonless/two"]).stdout == ""
    finally:
        for path in hidden:
            lab3.run("node2", ["umount", path], check=False)


def _sync(lab) -> dict:
    command = [sys.executable, "-m", "llmtrain.cli", "sync", "/data/pythonless", "--hosts", "/root/hosts", "--json"]
    return json.loads(lab.run("head", command, env={"PYTHONPATH": SOURCE}, check=False, timeout=120).stdout)
