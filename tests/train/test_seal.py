from __future__ import annotations

import pytest

from llmtrain.errors import InputFileError
from llmtrain.train.seal import choose_intact, examine_candidates, examine_seal, write_manifest, write_through


@pytest.fixture
def sealed(tmp_path):
    """A checkpoint of one host with two files, sealed."""
    folder = tmp_path / "step-000002"
    (folder / "part").mkdir(parents=True)
    (folder / "part" / "a.pt").write_bytes(b"aaaa")
    (folder / "b.json").write_text("{}")
    write_manifest(folder, 2, [{"host": "h1", "first_rank": 0, "files": write_through(folder)}])
    return folder


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: None, None),
        (lambda folder: (folder / "part/a.pt").write_bytes(b"aa"), "part/a.pt has 2 of 4 bytes"),
        (lambda folder: (folder / "part/a.pt").write_bytes(b"aaab"), "part/a.pt is not what was written"),
        (lambda folder: (folder / "b.json").unlink(), "b.json is missing"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json is broken"),
        (
            lambda folder: (folder / "manifest.json").write_text('{"hosts": []}'),
            "no host that begins with rank 0 wrote it",
        ),
    ],
)
def test_damage_is_named(sealed, damage, said):
    """Whatever a file of a checkpoint lost or had changed is found and named; an untouched one is intact."""
    damage(sealed)
    assert examine_seal(sealed, 0) == said


def test_newest_intact_on_every_host(tmp_path):
    """The newest checkpoint that every host has intact is chosen, and what is wrong with newer ones is told."""
    named = tmp_path / "step-000006"
    seen = {
        "h1": {"step-000006": None, "step-000004": "a.pt is missing", "step-000002": None},
        "h2": {"step-000004": None, "step-000002": None},
    }
    chosen, problems = choose_intact(named, seen)
    assert chosen.name == "step-000002"
    assert problems == ["step-000006 on h2: it is missing", "step-000004 on h1: a.pt is missing"]


def test_none_intact(tmp_path):
    """Where no checkpoint is intact on every host, the resume ends with every reason."""
    with pytest.raises(InputFileError, match="step-000006 on h1: it is missing"):
        choose_intact(tmp_path / "step-000006", {"h1": examine_candidates(tmp_path / "step-000006", 0)})


def test_newer_ones_are_no_candidates(sealed):
    """A checkpoint after the one that was asked for is never chosen."""
    sealed.with_name("step-000004").mkdir()
    assert examine_candidates(sealed, 0) == {"step-000002": None}
