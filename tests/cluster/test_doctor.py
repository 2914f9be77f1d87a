from __future__ import annotations

import pytest
from tests.cluster.hosts import PACKAGES, gpu, make_facts

from llmtrain.cluster.checks.files import lacking_trees
from llmtrain.cluster.doctor import judge
from llmtrain.cluster.findings import refuse_failures
from llmtrain.cluster.needs import Needs
from llmtrain.errors import ExitCode, PreflightError
from llmtrain.spec.hostfile import parse_hostfile

CLUSTER = parse_hostfile("a slots=2\nb slots=2\nc slots=2\n", name="hostfile")
HERE = {"kind": "dir", "files": {"config.json": [10, "x"]}}


def _judge(changes=None, needs=None):
    facts = {name: make_facts(name, i, **(changes or {}).get(name, {})) for i, name in enumerate("abc", start=1)}
    return judge(CLUSTER, facts, needs or Needs(trees={}))


def test_healthy_hosts_yield_nothing():
    """Three equal hosts give no finding."""
    assert _judge() == []


@pytest.mark.parametrize(
    ("host", "changes", "check", "words"),
    [
        ("b", {"machine_id": "machine-1", "boot_id": "boot-1", "hostname": "a"}, "identity", "same machine"),
        ("c", {"packages": {**PACKAGES, "trl": None}}, "packages", "trl"),
        ("c", {"packages": {**PACKAGES, "torch": "2.12.0"}}, "versions", "torch 2.12.0"),
        ("b", {"python": "3.12.1"}, "versions", "python 3.12.1"),
        ("a", {"node_dir_writable": False}, "node-dir", "cannot be made"),
        ("a", {"node_dir_free_bytes": 1 << 20}, "disk", "free"),
    ],
)
def test_each_fault_names_its_host_and_a_fix(host, changes, check, words):
    """Each fault yields one failing finding with its host and a command."""
    (finding,) = _judge({host: changes})
    assert (finding.host, finding.check, finding.level) == (host, check, "fail")
    assert words in finding.saw
    assert finding.fix


def test_a_patch_release_of_python_only_warns():
    """Python 3.11.7 beside 3.11.9 is no reason to stop."""
    (finding,) = _judge({"b": {"python": "3.11.9"}})
    assert finding.level == "warn"


def test_slots_beyond_the_accelerators_fail():
    """A slot that no accelerator backs is found; hosts without any accelerator are free to choose."""
    two, one = {"accelerators": (gpu(), gpu())}, {"accelerators": (gpu(),)}
    (finding,) = _judge({"a": two, "b": one, "c": two})
    assert (finding.host, finding.check) == ("b", "slots")
    assert "b slots=1" in finding.fix


def test_other_content_at_a_path_fails_and_absence_does_not():
    """A tree that differs is refused, an equal one is fine, a missing one is left to be copied."""
    trees = {"/m": HERE}
    other = {"/m": {"kind": "dir", "files": {"config.json": [10, "y"]}}}
    missing = {"/m": {"kind": "missing", "files": {}}}
    changes = {"a": {"trees": trees}, "b": {"trees": other}, "c": {"trees": missing}}
    (finding,) = _judge(changes, Needs(trees=trees))
    assert (finding.host, finding.check) == ("b", "content")
    assert "config.json" in finding.saw
    facts = {name: make_facts(name, i, **changes[name]) for i, name in enumerate("abc", start=1)}
    assert lacking_trees(facts, {"/m": "missing"}, trees) == [("c", "/m")]


def test_a_tree_that_is_to_be_the_same_is_copied_over_what_differs_but_not_beside_what_only_the_host_has():
    """With `same` a host that differs gets a copy; one that has more is refused by name; with `never` absence fails."""
    trees = {"/m": HERE}
    extra = {"/m": {"kind": "dir", "files": {**HERE["files"], "model.safetensors": [1, "z"]}}}
    other = {"/m": {"kind": "dir", "files": {"config.json": [10, "y"]}}}
    changes = {"a": {"trees": trees}, "b": {"trees": other}, "c": {"trees": extra}}
    (finding,) = _judge(changes, Needs(trees=trees, bring={"/m": "same"}))
    assert (finding.host, finding.check) == ("c", "content")
    assert "--delete" in finding.fix
    facts = {name: make_facts(name, i, **changes[name]) for i, name in enumerate("abc", start=1)}
    assert lacking_trees(facts, {"/m": "same"}, trees) == [("b", "/m"), ("c", "/m")]
    changes["a"] = {"trees": {"/m": {"kind": "missing", "files": {}}}}
    assert [one.host for one in _judge(changes, Needs(trees=trees, bring={"/m": "never"}))] == ["a", "b", "c"]


def test_all_failures_are_told_at_once():
    """A launch that cannot start names every failing host, with exit code 4."""
    findings = _judge({"a": {"node_dir_writable": False}, "c": {"packages": {**PACKAGES, "trl": None}}})
    with pytest.raises(PreflightError) as caught:
        refuse_failures(findings)
    assert caught.value.exit_code == ExitCode.PREFLIGHT
    assert {"a", "c"} <= {word.strip(":") for word in str(caught.value).split()}
