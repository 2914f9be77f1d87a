from __future__ import annotations

import json
import socket
import sys
from dataclasses import replace

import pytest

from llmtrain.cluster import hostfacts
from llmtrain.cluster.fleet import Fleet, HostFailuresError, Result, run_on_all
from llmtrain.cluster.local import LocalTransport
from llmtrain.cluster.probes import FactsRequest, examine, parse_facts, read_tree, same_machine
from llmtrain.errors import HostError


def _ask(tmp_path, **request):
    results = examine(
        Fleet({"here": LocalTransport("here")}),
        {"here": FactsRequest(python=sys.executable, node_dir=str(tmp_path), **request)},
    )
    return results.all_good()["here"]


def test_this_machine_answers(tmp_path):
    """The real probe, run by the real interpreter, yields facts of this machine."""
    facts = _ask(tmp_path, ports=(21000, 21999))
    assert facts.cpus
    assert facts.packages["torch"]
    assert facts.memory_total_bytes > 1 << 28
    assert any(one.loopback and one.ipv4 == "127.0.0.1/8" for one in facts.interfaces)
    assert all(21000 <= port <= 21999 for port in facts.free_ports)
    assert facts.node_dir_writable
    assert facts.noise == ""


def test_trees_are_compared_by_content(tmp_path):
    """Equal trees have equal digests, and one changed byte is seen, also in the middle of a large file."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "weights").write_bytes(b"\0" * (4 << 20))
    before = read_tree(str(model))
    assert _ask(tmp_path, trees=(str(model), "/absent")).trees == {
        str(model): before,
        "/absent": {"kind": "missing", "files": {}},
    }
    with (model / "weights").open("r+b") as stream:
        stream.seek(2 << 20)
        stream.write(b"x")
    assert read_tree(str(model)) != before


def test_a_busy_port_is_not_offered():
    """A port somebody listens on is never among the free ones."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert hostfacts.free_ports(port, port, 4) == []


@pytest.mark.parametrize("noise", [b"WELCOME to gpu004\n", b"\x1b[2J", "motd é\n".encode()])
def test_noise_around_the_answer_is_no_part_of_it(noise, tmp_path):
    """What start-up files print before and after is kept apart from the answer."""
    answer = hostfacts.facts({"node_dir": str(tmp_path)})
    mark = hostfacts.MARK
    text = noise + f"\n{mark}{json.dumps(answer)}{mark}\n".encode() + noise
    facts = parse_facts("gpu004", Result(code=0, stdout=text, stderr=b""), python="python")
    assert facts.hostname == answer["hostname"]
    assert facts.noise


@pytest.mark.parametrize(("code", "words"), [(127, "no interpreter"), (126, "no interpreter"), (1, "failed")])
def test_no_answer_names_host_and_interpreter(code, words):
    """A host without the interpreter, or with a broken one, is named with it."""
    with pytest.raises(HostError, match=words) as caught:
        parse_facts("gpu004", Result(code=code, stdout=b"", stderr=b"boom"), python="/opt/x/bin/python")
    assert caught.value.where == "gpu004"
    assert "/opt/x/bin/python" in caught.value.error


def test_one_machine_under_two_names_is_seen(tmp_path):
    """Two names that answer with one boot id and machine id are one machine."""
    facts = _ask(tmp_path)
    assert same_machine([facts, replace(facts, host="again")]) == [("here", "again")]
    assert same_machine([facts, replace(facts, host="clone", boot_id="another")]) == []


def test_no_success_is_lost_when_a_host_fails():
    """Failures are collected beside the answers, and raised together only when asked."""

    def task(name):
        if name == "b":
            raise HostError("gone", where=name, fix="ping b")
        return name.upper()

    results = run_on_all(["a", "b", "c"], task)
    assert results.good == {"a": "A", "c": "C"}
    assert list(results.failed) == ["b"]
    with pytest.raises(HostFailuresError) as caught:
        results.all_good()
    assert caught.value.where == "b"


def test_a_bug_is_not_a_failed_host():
    """An exception that is no error of a host's is raised, not collected."""
    with pytest.raises(ZeroDivisionError):
        run_on_all(["a"], lambda name: 1 / 0)
