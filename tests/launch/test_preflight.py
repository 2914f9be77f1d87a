"""Whatever is wrong on a host is found before anything is started: code 4, every host named, each with a fix."""

from __future__ import annotations

import re

import pytest
from tests.launch.launchlab import RUN_FILE

COMMAND = re.compile(r"^[^#]*")
"""The part of a fix that a shell runs."""
PER_HOST = """\
per_host:
  node2: {python: /opt/none/bin/python}
  10.77.0.1: {node_dir: /usr/llmtrain}
"""


def refuse(launch_lab, folder, *more):
    """Launch, expect code 4, and return host -> (what was seen, fix)."""
    run = launch_lab.launch(folder, "--json", *more)
    assert run.wait() == 4, run.err
    document = run.json
    first_fix, *others = document["fix"].split("\n")
    found = {document["where"]: (document["error"], first_fix)}
    for line in others[1:]:
        host, _, rest = line.strip().partition(": ")
        saw, _, fix = rest.partition("; fix: ")
        both = found.get(host, ("", ""))
        found[host] = (f"{both[0]}\n{saw}".strip(), both[1] or fix)
    assert run.err.count("error: ") == 1
    assert not list(run.disk.glob("runs/*"))
    launch_lab.wait_quiet()
    return found


def carry_out(launch_lab, fix):
    """Type a fix into a shell of the head."""
    launch_lab.lab.run("head", ["bash", "-c", COMMAND.match(fix)[0]])


def passes(launch_lab, folder):
    """Whether a launch there would start now."""
    run = launch_lab.launch(folder, "--dry-run", "--json")
    return run.wait() == 0


@pytest.fixture(scope="module")
def three(launch_lab):
    """A working folder for runs over three hosts."""
    return launch_lab.folder("/root/three", hosts="node1 node2 node3")


@pytest.fixture(scope="module")
def unreachable(launch_lab, three):
    """Refused: node1 has no power, node2 no sshd, node3 a host key that nobody knows; and node3's fix carried out."""
    lab = launch_lab.lab
    lab.run("head", ["sed", "-i", "/^node3,/d", "/root/.ssh/known_hosts"])
    lab.power_cut("node1")
    lab.sshd_stop("node2")
    found = refuse(launch_lab, three)
    lab.boot("node1")
    lab.sshd_start("node2")
    carry_out(launch_lab, found["node3"][1])
    return found, passes(launch_lab, three)


def test_host_without_power(unreachable):
    """A host that is off is named with its address and a command that shows why."""
    saw, fix = unreachable[0]["node1"]
    assert "no connection to node1 port 22" in saw
    assert "ssh -v -- node1 true" in fix


def test_stopped_sshd(unreachable):
    """A host without sshd is told from one that is off."""
    assert "Connection refused" in unreachable[0]["node2"][0]


def test_unknown_host_key_and_its_fix(unreachable):
    """An unknown host key is shown with its fingerprint and never accepted; the printed command makes it known."""
    saw, fix = unreachable[0]["node3"]
    assert "the host key is unknown: ssh-ed25519 SHA256:" in saw
    assert fix.startswith("ssh-keyscan -- node3 >> ~/.ssh/known_hosts")
    assert unreachable[1]


@pytest.fixture(scope="module")
def strangers(launch_lab, three):
    """Refused: node1 has another host key than before, node2 does not let us in; and node1's fixes carried out."""
    lab = launch_lab.lab
    known = lab.read("head", "/root/.ssh/known_hosts")
    other = lab.read("node2", "/etc/ssh/ssh_host_ed25519_key.pub").split()[1]
    lab.write(
        "head", "/root/.ssh/known_hosts", re.sub(r"^(node1\S* \S+) \S+", rf"\1 {other}", known, flags=re.MULTILINE)
    )
    keys = lab.read("node2", "/root/.ssh/authorized_keys")
    lab.write("node2", "/root/.ssh/authorized_keys", "")
    found = refuse(launch_lab, three)
    lab.write("node2", "/root/.ssh/authorized_keys", keys)
    carry_out(launch_lab, found["node1"][1])
    second = refuse(launch_lab, three)
    carry_out(launch_lab, second["node1"][1])
    fixed = passes(launch_lab, three)
    lab.write("head", "/root/.ssh/known_hosts", known)
    return found, second, fixed


def test_changed_host_key_and_its_fix(strangers):
    """A changed host key is refused with both fingerprints; after the printed commands the host is known again."""
    found, second, fixed = strangers
    saw, fix = found["node1"]
    assert re.search(r"CHANGED: known ssh-ed25519 SHA256:\S+, offered ssh-ed25519 SHA256:", saw)
    assert fix.startswith("ssh-keygen -R node1")
    assert "the host key is unknown" in second["node1"][0]
    assert fixed


def test_refused_login(strangers):
    """A host that refuses our key is named with the user and the keys that were tried."""
    saw, fix = strangers[0]["node2"]
    assert "login as root refused (tried /root/.ssh/id_ed25519" in saw
    assert fix == "ssh-copy-id -- node2"


@pytest.fixture(scope="module")
def unfit(launch_lab):
    """Refused for five reasons at once, and the fix of the one that has a command carried out."""
    lab = launch_lab.lab
    folder = launch_lab.folder(
        "/root/unfit",
        hosts="node1 node2 node3 10.77.0.1",
        run=RUN_FILE + PER_HOST,
    )
    lab.run("node3", ["rm", "-rf", "/root/model"])  # another test may have brought it
    lab.run("node3", ["mkdir", "-p", "/root/model"])
    lab.write("node3", "/root/model/config.json", '{"other": true}')
    lab.disk("node3", "/root/.llmtrain", 100)
    found = refuse(launch_lab, folder)
    lab.disk("node3", "/root/.llmtrain", None)
    third = launch_lab.folder("/root/third", hosts="node3")
    alone = refuse(launch_lab, third)
    carry_out(launch_lab, alone["node3"][1])
    return found, alone, passes(launch_lab, third)


def test_missing_interpreter(unfit):
    """An interpreter that one host lacks is named with its path."""
    assert "no interpreter /opt/none/bin/python" in unfit[0]["node2"][0]


def test_one_machine_under_two_names(unfit):
    """A machine that stands in the hostfile by name and by address is found by its identity."""
    saw, fix = unfit[0]["10.77.0.1"]
    assert "10.77.0.1 and node1 are the same machine" in saw
    assert fix == "take 10.77.0.1 out of the hostfile and add its slots to node1"


def test_working_folder_that_cannot_be_written(unfit):
    """A working folder on a read-only disk is refused before anything is written."""
    assert "/usr/llmtrain cannot be made or written" in unfit[0]["10.77.0.1"][0]


def test_too_small_disk(unfit):
    """A disk without room for the run is refused, with what is there and what is wanted."""
    assert re.search(r"0\.\d+ GiB free at /root/.llmtrain; wanted 0\.\d+ GiB", unfit[0]["node3"][0])


def test_other_content_and_its_fix(unfit):
    """A model that differs from ours is never overwritten; once removed by the printed command it will be copied."""
    _, alone, fixed = unfit
    saw, fix = alone["node3"]
    assert "/root/model is there with other content (first difference: chat_template.jinja)" in saw
    assert fix.startswith("ssh -- node3 'rm -r /root/model'")
    assert fixed
