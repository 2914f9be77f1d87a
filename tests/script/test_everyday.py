"""Commands on all hosts of the lab."""

from __future__ import annotations

import json

from tests.documented import read_example

from llmtrain.spec.hostfile import read_hostfile


def test_exec_shows_equal_output_once(script_lab):
    """Hosts that answer alike stand together; the exit code is the worst one."""
    folder = script_lab.folder("/root/exec", {})
    done = script_lab.llmtrain(folder, "exec", "--hosts", "hostfile", "--", "echo same; test $(hostname) = node1")
    assert done.out.splitlines() == read_example("exec", "llmtrain exec --hosts")
    assert done.out == "node1:\n  same\nnode2: (exit code 1)\n  same\n"
    assert done.code == 1
    done = script_lab.llmtrain(folder, "exec", "--", "echo same", env={"LLMTRAIN_HOSTS": "hostfile"})
    assert (done.out, done.code) == ("node1,node2:\n  same\n", 0)


def test_exec_passes_words_as_they_are(script_lab):
    """Several words reach the program untouched by any shell."""
    folder = script_lab.folder("/root/words", {})
    words = ["a b", "$HOME", "'\"", ";touch /tmp/no", "*", "--json", "--"]
    show = "import json, sys; print(json.dumps(sys.argv[1:]))"
    done = script_lab.llmtrain(folder, "exec", "--hosts", "hostfile", "--", "python3", "-c", show, *words)
    assert json.loads(done.out.splitlines()[1]) == words


def test_exec_names_hosts_that_cannot_be_reached(script_lab):
    """A host out of reach is an answer among others, and the exit code says it."""
    folder = script_lab.folder("/root/gone", {"hostfile": "node1 slots=1\nnowhere slots=1\n"})
    done = script_lab.llmtrain(folder, "exec", "--hosts", "hostfile", "--", "echo here")
    assert done.out.startswith("node1:\n  here\nnowhere: (exit code 6)\n  error: the name does not resolve")
    assert done.code == 6


def test_hosts_writes_a_hostfile(script_lab):
    """What it prints is accepted as a hostfile, with addresses found and hosts that did not answer as comments."""
    folder = script_lab.folder("/root/hosts", {})
    done = script_lab.llmtrain(folder, "hosts", "node[1-2],nowhere", "--probe")
    (done.folder / "found").write_text(done.out)
    assert read_hostfile(done.folder / "found").names == ("node1", "node2")
    assert script_lab.lab.address("node1") in done.out
    assert "# nowhere: the name does not resolve" in done.out
    assert done.code == 6
