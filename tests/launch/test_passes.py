"""What a launch may take from a launch minutes ago, and what it looks at again."""

from __future__ import annotations

import pytest
from tests.cluster.hosts import make_facts

from llmtrain.cluster.findings import Finding
from llmtrain.launch import between
from llmtrain.launch.passes import KEPT_S, cluster_key, read_pass, write_pass

TWO = {"a": make_facts("a", 1), "b": make_facts("b", 2)}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A user without any past."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    (tmp_path / ".ssh").mkdir()
    return tmp_path


def finding(check):
    """A failure of one check."""
    return Finding(host="b", check=check, level="fail", saw="nothing", wanted="something", fix="true")


def look(monkeypatch, ports=(), agreement=()):
    """One launch's look between hosts: what was found, and which hosts were asked for a login by plain ssh."""
    asked = []
    monkeypatch.setattr(between, "_look", lambda _fleet, _hosts: [finding(name) for name in ports])
    monkeypatch.setattr(
        between, "check_agreement", lambda names: asked.extend(names) or [finding(name) for name in agreement]
    )
    hosts = between.Between(facts=TWO, links={}, pythons={})
    found = between.examine_between(None, hosts, frozenset({"ports", "ssh-agree"}), use_passes=True)
    return [one.check for one in found], asked


def test_pass_ends():
    """A pass counts for its minutes, not longer, and not from the future."""
    write_pass("key", passed=True, now=1000.0)
    assert [read_pass("key", now=now) for now in (999.0, 1000.0, 1000.0 + KEPT_S, 1001.0 + KEPT_S)] == [
        False,
        True,
        True,
        False,
    ]


def test_finding_forgets_pass():
    """What failed since is forgotten."""
    write_pass("key", passed=True)
    write_pass("key", passed=False)
    assert not read_pass("key")


@pytest.mark.parametrize("content", ["", "[]", '{"key": "soon"}', "\x00"])
def test_damaged_cache(home, content):
    """A cache that cannot be read is none, and is written anew."""
    path = home / ".cache/llmtrain/passes.json"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert not read_pass("key")
    write_pass("key", passed=True)
    assert read_pass("key")


def test_key_knows_reboots_hosts_and_settings(home):
    """A reboot, another host and new ssh settings are other clusters; the same again is the same."""
    keys = [cluster_key(TWO), cluster_key({"a": TWO["a"]})]
    keys.append(cluster_key({**TWO, "b": make_facts("b", 2, boot_id="later")}))
    (home / ".ssh/known_hosts").write_text("a ssh-ed25519 AAAA\n")
    keys.append(cluster_key(TWO))
    assert len(set(keys)) == len(keys)
    assert cluster_key(TWO) == keys[-1]


def test_firewall_raised_after_a_pass(monkeypatch):
    """Ports are looked at on every launch; only the login by plain ssh is taken from the launch before."""
    assert look(monkeypatch) == ([], ["a", "b"])
    assert look(monkeypatch, ports=["ports"]) == (["ports"], [])


def test_disagreement_is_asked_again(monkeypatch):
    """A login that failed is not remembered as passed."""
    assert look(monkeypatch, agreement=["ssh-agree"]) == (["ssh-agree"], ["a", "b"])
    assert look(monkeypatch) == ([], ["a", "b"])
