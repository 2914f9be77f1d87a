"""Copies to and from a host, with this machine as the host."""

from __future__ import annotations

import subprocess

import pytest

from llmtrain.cluster.fleet import Fleet
from llmtrain.cluster.local import LocalTransport
from llmtrain.cluster.probes import read_tree
from llmtrain.errors import DiskError, SyncError
from llmtrain.launch.stage import fetch_tree, send_tree

HOSTILE = "mod,el $(touch canary) 'q' [a]* %h\\n"


@pytest.fixture
def fleet():
    """This machine as a host."""
    return Fleet({"here": LocalTransport("here")})


@pytest.fixture
def model(tmp_path):
    """A folder whose name and files need quoting, with a link as hubs make them."""
    folder = tmp_path / "from" / HOSTILE
    (folder / "sub folder").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "sub folder" / f"{HOSTILE}.bin").write_bytes(bytes(range(256)) * 5000)
    blob = tmp_path / "blob"
    blob.write_bytes(b"weights")
    (folder / "model.safetensors").symlink_to(blob)
    return folder


def send(model, fleet, target):
    """Send without looking at the progress."""
    send_tree(str(model), fleet, "here", str(target), lambda _: None)


def names(folder):
    """What lies in a folder, hidden files included."""
    return sorted(path.name for path in folder.iterdir())


def test_tree_arrives_whole_under_its_final_name(model, fleet, tmp_path):
    """A folder arrives with all files, links as the files they lead to, and nothing beside it."""
    target = tmp_path / "to" / HOSTILE
    send(model, fleet, target)
    assert read_tree(str(target)) == read_tree(str(model))
    assert not (target / "model.safetensors").is_symlink()
    assert names(tmp_path / "to") == [HOSTILE]


def test_single_file_arrives(model, fleet, tmp_path):
    """A file is copied like a folder."""
    target = tmp_path / "to" / "data $(id).jsonl"
    send(model / "config.json", fleet, target)
    assert target.read_text() == "{}"
    assert names(tmp_path / "to") == [target.name]


def test_what_another_launch_put_there_meanwhile_is_good_if_equal(model, fleet, tmp_path):
    """A copy that finds an equal tree in its place has succeeded."""
    send(model, fleet, tmp_path / "to/model")
    send(model, fleet, tmp_path / "to/model")
    assert names(tmp_path / "to") == ["model"]


def test_what_is_there_is_never_touched(model, fleet, tmp_path):
    """A copy that finds other content in its place fails and leaves that content."""
    (tmp_path / "to/model").mkdir(parents=True)
    (tmp_path / "to/model/mine").write_text("precious")
    with pytest.raises(SyncError, match="did not arrive"):
        send(model, fleet, tmp_path / "to/model")
    assert names(tmp_path / "to/model") == ["mine"]
    assert names(tmp_path / "to") == ["model"]


def test_stream_cut_between_two_files_leaves_nothing(model, fleet, tmp_path, monkeypatch):
    """Tar takes a stream that ends between two files for a whole one; here it does not get the final name."""
    packed = tmp_path / "packed.tar"
    subprocess.run(["tar", "-chf", packed, "--transform=s,^from,x,", "-C", tmp_path, "from"], check=True)
    popen = subprocess.Popen

    def cut(argv, **options):
        return popen(["head", "-c", "1024", packed] if argv[0] == "tar" else argv, **options)

    monkeypatch.setattr("llmtrain.launch.stage.subprocess.Popen", cut)
    monkeypatch.setattr("llmtrain.launch.stage._whole", lambda: b"")
    with pytest.raises(SyncError):
        send(model, fleet, tmp_path / "to/model")
    assert names(tmp_path / "to") == []


def test_source_that_cannot_be_read_leaves_nothing(fleet, tmp_path):
    """When the source vanishes the error says so, and the host has no part of it."""
    with pytest.raises(SyncError, match="source changed or could not be read"):
        send(tmp_path / "gone", fleet, tmp_path / "to/model")
    assert names(tmp_path / "to") == []


def test_fetched_folder_appears_whole(model, fleet, tmp_path):
    """A folder of a host comes here complete, into folders that are made for it."""
    target = tmp_path / "deep" / "down" / HOSTILE
    source = model.rename(tmp_path / "output")
    fetch_tree(fleet, "here", str(source), target, lambda _: None)
    assert read_tree(str(target)) == read_tree(str(source))
    assert names(target.parent) == [HOSTILE]


def test_fetch_of_nothing_leaves_nothing(fleet, tmp_path):
    """A folder that is not there is an error, and no empty folder appears."""
    (tmp_path / "to").mkdir()
    with pytest.raises(SyncError):
        fetch_tree(fleet, "here", str(tmp_path / "gone"), tmp_path / "to/model", lambda _: None)
    assert names(tmp_path / "to") == []


def test_fetch_to_where_nothing_can_be_written(model, fleet, tmp_path):
    """A target that cannot be made is an error of the disk, with its path."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError) as caught:
        fetch_tree(fleet, "here", str(model), tmp_path / "file/model", lambda _: None)
    assert str(tmp_path / "file/model") in str(caught.value)
