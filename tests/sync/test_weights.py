"""Models before they travel: whole, without duplicates where that is asked for, from a hub's cache as from a folder."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.sync.chainbox import describe, sync

from llmtrain.errors import InputFileError
from llmtrain.sync.weights import LEAN, check_weights

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def write_shards(folder, **names):
    """A model of two shards; names of shards may lead elsewhere."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {"a": SHARDS[0], "b": SHARDS[1]}
    for tensor, name in weights.items():
        save_file({tensor: np.ones((64, 64), np.float32)}, names.get(name, folder / name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    return folder


def write_cache(hub):
    """The cache of one model as the hub's client lays it out: blobs, and a snapshot of relative links to them."""
    snapshot, blobs = hub / "snapshots/abc", hub / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (hub / "refs").mkdir()
    (hub / "refs/main").write_text("abc")
    write_shards(snapshot, **{name: blobs / f"b{number}" for number, name in enumerate(SHARDS)})
    for number, name in enumerate(SHARDS):
        (snapshot / name).symlink_to(f"../../blobs/b{number}")
    return hub


def test_a_whole_model_is_said_to_be_whole(tmp_path):
    """The index and every header are read."""
    assert "2 weight files are whole" in check_weights(write_shards(tmp_path / "m"))[0]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "which is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "truncated"),
        (lambda path: path.write_text("version https://git-lfs.github.com/spec/v1"), "git-lfs pointer"),
        (lambda path: path.write_bytes(bytes([255]) * 100), "not a safetensors file"),
    ],
)
def test_a_damaged_shard_is_an_error_before_anything_travels(tmp_path, damage, message):
    """Missing, cut, a pointer, something else: named here instead of a crash on some rank; in a hub's cache as well."""
    damage(write_shards(tmp_path / "m") / SHARDS[1])
    with pytest.raises(InputFileError, match=message):
        check_weights(tmp_path / "m")
    hub = write_cache(tmp_path / "models--org--name")
    damage(hub / "blobs/b1")
    with pytest.raises(InputFileError, match=message):
        check_weights(hub)


def test_the_lean_profile_leaves_out_what_training_never_reads(tmp_path):
    """Pickles that double the weights are pointed out, and stay here with optimizer files, .git and half downloads."""
    source = write_shards(tmp_path / "m")
    for name in ("pytorch_model.bin", "optimizer.pt", "scheduler.pt", "rng_state_0.pth", "x.incomplete"):
        (source / name).write_bytes(bytes(100))
    for name in (".git/lfs", "global_step10", "original"):
        (source / name).mkdir(parents=True)
        (source / name / "big").write_bytes(bytes(100))
    (source / "tokenizer.json").write_text("{}")
    assert "1 *.bin files" in check_weights(source)[1]
    assert len(check_weights(source, LEAN)) == 1
    assert sync(source, tmp_path, what="weights", exclude=LEAN).ok
    there = {path.name for path in (tmp_path / "h2/tree").iterdir()}
    assert there == {*SHARDS, "model.safetensors.index.json", "tokenizer.json"}


def test_a_whole_cache_keeps_its_links_and_a_snapshot_becomes_files(tmp_path):
    """Of a model's cache every blob travels once and links stay; of a snapshot alone the links are followed."""
    hub = write_cache(tmp_path / "hub/models--org--name")
    report = sync(hub, tmp_path / "one", what="weights")
    assert report.ok
    assert describe(hub) == describe(tmp_path / "one/h2/tree")
    assert sync(hub / "snapshots/abc", tmp_path / "two", what="weights").ok
    copy = tmp_path / "two/h1/tree" / SHARDS[0]
    assert not copy.is_symlink()
    assert copy.read_bytes() == (hub / "blobs/b0").read_bytes()


def test_a_link_as_the_root_stands_for_what_it_leads_to(tmp_path):
    """`current -> v3` brings the content of v3."""
    write_shards(tmp_path / "v3")
    (tmp_path / "current").symlink_to("v3")
    assert sync(tmp_path / "current", tmp_path).ok
    assert describe(tmp_path / "h1/tree") == describe(tmp_path / "v3")
