"""Random trees through a real chain of two hosts, and what makes a tree special."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.sync.chainbox import HOSTS, describe, roll_back, sync

from llmtrain.errors import SyncError
from llmtrain.sync.manifest import SMALL, Cache, Scan, diff, root_digest

NAMES = (
    st.binary(min_size=1, max_size=12)
    .filter(lambda name: b"/" not in name and b"\0" not in name)
    .filter(lambda name: name not in {b".", b"..", b"second"})
)
ODD = st.sampled_from([b"a b", b"new\nline", b"\xff\xfe", "é".encode(), b"-rf", b"$(x)", b"'", b"tree"])
CONTENTS = st.one_of(
    st.binary(max_size=300),
    st.builds(lambda byte, size: bytes([byte]) * size, st.integers(0, 255), st.integers(0, 3 * SMALL)),
    st.builds(
        lambda seed, size: (seed * (size // 8 + 1))[:size], st.binary(min_size=8, max_size=8), st.integers(0, 2 * SMALL)
    ),
)
FILES = st.tuples(st.just("file"), CONTENTS, st.sampled_from([0o644, 0o600, 0o755, 0o444]), st.integers(0, 2**62))
LINKS = st.tuples(st.just("link"), st.sampled_from([b"a b", b"../x", b"/nowhere", b"."]))
HARD = st.tuples(st.just("hard"), st.integers(0, 20))
TREES = st.recursive(
    st.dictionaries(st.one_of(NAMES, ODD), st.one_of(FILES, LINKS, HARD), max_size=5),
    lambda inner: st.dictionaries(st.one_of(NAMES, ODD), st.one_of(FILES, LINKS, HARD, inner), max_size=5),
    max_leaves=4,
)


def write(root: Path, tree: dict, files: list[bytes]) -> None:
    """Make a drawn tree."""
    root.mkdir()
    for name, what in tree.items():
        path = os.fsencode(root) + b"/" + name
        if isinstance(what, dict):
            write(Path(os.fsdecode(path)), what, files)
        elif what[0] == "link":
            Path(os.fsdecode(path)).symlink_to(os.fsdecode(what[1]))
        elif what[0] == "hard" and files:
            os.link(files[what[1] % len(files)], path)
        elif what[0] == "file":
            Path(os.fsdecode(path)).write_bytes(what[1])
            Path(os.fsdecode(path)).chmod(what[2])
            os.utime(path, ns=(what[3], what[3]))
            files.append(path)
    # Modes and times of folders as well, drawn from their names; empty and unwritable ones among them.
    root.chmod(0o755 if root.name in {"source", "one", "two"} else (0o755, 0o700, 0o555, 0o1777)[len(root.name) % 4])
    os.utime(root, ns=(10**18, 10**18 + len(root.name)))


@given(first=TREES, second=TREES, streams=st.sampled_from([1, 3]))
@settings(max_examples=12, suppress_health_check=list(HealthCheck))
def test_any_tree_arrives_equal_in_every_attribute(first, second, streams, tmp_path_factory):
    """Two random trees, one after the other at the same path, arrive as they are; a rollback brings the first back."""
    base = tmp_path_factory.mktemp("any")
    source = base / "source"
    write(source, first, [])
    assert sync(source, base, streams=streams).ok
    one = describe(source)
    assert [describe(base / host / "tree") for host in HOSTS] == [one, one]
    shutil.rmtree(source)
    write(source, second, [])
    (source / "second").touch()
    assert sync(source, base, delete=True, streams=streams).ok
    two = describe(source)
    assert [describe(base / host / "tree") for host in HOSTS] == [two, two]
    assert roll_back(source, base).ok
    assert [describe(base / host / "tree") for host in HOSTS] == [one, one]


@given(first=TREES, second=TREES)
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
def test_a_diff_names_exactly_what_differs(first, second, tmp_path_factory):
    """Paths in no list but `same` are equal in both trees, all others differ, and every path is in one list."""
    base = tmp_path_factory.mktemp("diff")
    write(base / "one", first, [])
    write(base / "two", second, [])
    scans = [Scan(str(base / name)).run() for name in ("one", "two")]
    for scan in scans:
        scan.hash(Cache(), 1 << 40)
    want, have = ({entry.path: entry[:7] for entry in scan.entries} for scan in scans)
    found = diff(scans[0].entries, scans[1].entries)
    assert {entry.path for entry in found.added} == set(want) - set(have)
    assert {entry.path for entry in found.removed} == set(have) - set(want)
    assert {entry.path for entry in found.same} == {path for path in want if want[path] == have.get(path)}
    differ = {path for path in set(want) & set(have) if want[path] != have[path]}
    assert {entry.path for entry in [*found.changed, *found.touched]} == differ
    assert (root_digest(scans[0].entries) == root_digest(scans[1].entries)) == (want == have)


def test_only_changed_blocks_of_a_big_file_travel(tmp_path):
    """Five bytes in the middle of 3 MiB cost one block."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "big").write_bytes(os.urandom(12 * SMALL))
    os.utime(source / "big", ns=(10**18, 10**18))
    assert sync(source, tmp_path).ok
    with (source / "big").open("r+b") as stream:
        stream.seek(5 * SMALL)
        stream.write(b"hello")
    report = sync(source, tmp_path)
    assert report.ok
    assert report.total_bytes == SMALL
    assert (tmp_path / "h2/tree/big").read_bytes() == (source / "big").read_bytes()


def test_identical_files_travel_once(tmp_path):
    """Four copies of one content are sent as one."""
    source = tmp_path / "source"
    source.mkdir()
    data = os.urandom(SMALL // 2)
    for name in "abcd":
        (source / name).write_bytes(data)
    report = sync(source, tmp_path)
    assert report.ok
    assert report.total_bytes == len(data)
    assert describe(source) == describe(tmp_path / "h2/tree")


def test_an_unchanged_tree_is_not_read_again(tmp_path):
    """The second sync finds equality from names and times, and sends nothing."""
    source = tmp_path / "source"
    source.mkdir()
    for number in range(20):
        (source / str(number)).write_bytes(os.urandom(100))
        os.utime(source / str(number), ns=(10**18, 10**18))
    sync(source, tmp_path)
    report = sync(source, tmp_path)
    assert [host.note for host in report.hosts] == ["unchanged", "unchanged"]
    assert report.head_bytes_sent == 0


def test_a_sparse_file_stays_sparse(tmp_path):
    """A gigabyte with two written blocks takes and sends about two blocks."""
    source = tmp_path / "source"
    source.mkdir()
    with (source / "sparse").open("wb") as stream:
        stream.truncate(1 << 30)
        for at in (0, 700 << 20):
            stream.seek(at)
            stream.write(b"x" * 1000)
    report = sync(source, tmp_path)
    assert report.ok
    assert report.total_bytes <= 4 << 20
    copy = tmp_path / "h2/tree/sparse"
    assert copy.stat().st_size == 1 << 30
    assert copy.stat().st_blocks * 512 <= 8 << 20
    with copy.open("rb") as stream:
        stream.seek(700 << 20)
        assert stream.read(1001) == b"x" * 1000 + b"\0"


def test_one_file_can_be_the_whole_tree(tmp_path):
    """A single file is copied and replaced like a folder."""
    source = tmp_path / "data.jsonl"
    source.write_bytes(b"one")
    assert sync(source, tmp_path).ok
    source.write_bytes(b"two")
    assert sync(source, tmp_path).ok
    assert (tmp_path / "h1/tree").read_bytes() == b"two"
    assert roll_back(source, tmp_path).ok
    assert (tmp_path / "h2/tree").read_bytes() == b"one"


def test_what_only_the_destination_has_stays(tmp_path):
    """Extra files and folders survive a sync, and go with --delete, but for what --exclude names."""
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub/file").write_bytes(b"x")
    sync(source, tmp_path)
    extra = tmp_path / "h1/tree/sub/mine"
    extra.mkdir()
    (extra / "note").write_bytes(b"keep")
    (tmp_path / "h1/tree/log").write_bytes(b"log")
    assert sync(source, tmp_path).ok
    assert (extra / "note").read_bytes() == b"keep"
    assert sync(source, tmp_path, delete=True, exclude=("log",)).ok
    assert not extra.exists()
    assert (tmp_path / "h1/tree/log").exists()


def test_delete_is_refused_in_a_tree_of_somebody_else(tmp_path):
    """A folder that llmtrain did not make is not cleaned, and nothing in it changes."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_bytes(b"x")
    (tmp_path / "h1/tree").mkdir(parents=True)
    (tmp_path / "h1/tree/thesis").write_bytes(b"years")
    report = sync(source, tmp_path, delete=True)
    assert [host.ok for host in report.hosts] == [False, True]
    assert "did not make" in report.hosts[0].error
    assert [path.name for path in (tmp_path / "h1/tree").iterdir()] == ["thesis"]


def test_sockets_are_refused_by_name(tmp_path):
    """A pipe in the source stops the sync and is named."""
    source = tmp_path / "source"
    source.mkdir()
    os.mkfifo(source / "pipe")
    with pytest.raises(SyncError, match="pipe"):
        sync(source, tmp_path)


def test_links_into_a_hub_cache_are_followed(tmp_path):
    """A snapshot whose files are links to blobs outside arrives as real files."""
    blobs = tmp_path / "hub/blobs"
    snapshot = tmp_path / "hub/snapshots/abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / "1234").write_bytes(b"weights")
    (snapshot / "model.safetensors").symlink_to("../../blobs/1234")
    (snapshot / "same").symlink_to("model.safetensors")
    assert sync(snapshot, tmp_path, what="weights").ok
    copy = tmp_path / "h2/tree/model.safetensors"
    assert not copy.is_symlink()
    assert copy.read_bytes() == b"weights"


@pytest.mark.parametrize("dest", ["/", "/usr", "/root", "/proc", "/dev/shm"])
def test_system_folders_homes_and_mount_points_are_no_destination(tmp_path, dest):
    """Nothing whose replacement would break a host is ever swapped."""
    from llmtrain.sync.manifest import TreeError
    from llmtrain.sync.place import Place

    with pytest.raises(TreeError, match="refused"):
        Place(dest)


def test_hosts_with_different_states_get_exactly_what_they_lack(tmp_path):
    """One host lacks a file, the other a block of another: each receives only that."""
    source = tmp_path / "source"
    source.mkdir()
    for name in "ab":
        (source / name).write_bytes(os.urandom(8 * SMALL))
        os.utime(source / name, ns=(10**18, 10**18))
    sync(source, tmp_path)
    (tmp_path / "h1/tree/a").unlink()
    with (tmp_path / "h2/tree/b").open("r+b") as stream:
        stream.write(b"damage")
    report = sync(source, tmp_path)
    assert report.ok
    assert 8 * SMALL <= report.hosts[0].bytes_sent < 8 * SMALL + 4096
    assert SMALL <= report.hosts[1].bytes_sent < SMALL + 4096
    assert describe(source) == describe(tmp_path / "h1/tree") == describe(tmp_path / "h2/tree")
