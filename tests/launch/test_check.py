from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
from tests.lab.life import default_shares
from tests.lab.model import LabOptions
from tests.launch import faults
from tests.launch.faults import HOSTFILE, check
from tests.launch.launchlab import write_sums

NODES = [f"node{number}" for number in range(1, 7)]
RUN = "/root/run.yaml"
LISTEN = (
    "import socket, time; s = socket.socket(); s.bind(('', 23456)); s.listen(); print('up', flush=True); time.sleep(99)"
)
HALF_OPEN = (
    "import socket, time; keep = [socket.create_connection(('node3', 22)) for _ in range(20)]; "
    "print('up', flush=True); time.sleep(60)"
)


def give(lab, here, host):
    """Model and data at their place on a host."""
    home = lab.state.disk(host) / "root"
    shutil.rmtree(home / "model", ignore_errors=True)
    shutil.copytree(here / "model", home / "model")
    shutil.copy(here / "data.jsonl", home / "data.jsonl")


@pytest.fixture(scope="module")
def lab(lab_factory, tmp_path_factory):
    """Six nodes; model and data are on the head and on every node already."""
    from llmtrain.train.tinymodel import write_tiny_model

    here = tmp_path_factory.mktemp("check")
    write_tiny_model(here / "model")
    write_sums(here / "data.jsonl", 64)
    lab = lab_factory(6, LabOptions(shares=(*default_shares(), faults.SOURCE)))
    for host in lab.names:
        give(lab, here, host)
    lab.write("head", HOSTFILE, "".join(f"{node} slots=1\n" for node in NODES))
    lab.write("head", RUN, faults.RUN_FILE)
    lab.here = here
    return lab


def seen(document):
    """(host, check, level) of every finding."""
    return {(one["host"], one["check"], one["level"]) for one in document["findings"]}


def make_and_check(lab, table, *words):
    """Make all faults of a table at once, check, run the fixes, heal the rest."""
    made = []
    try:
        for fault in table:
            made.append(fault)
            fault.make(lab)
        document = check(lab, *words)
        wanted = {(fault.host, fault.check, fault.level) for fault in table if fault.check}
        assert seen(document) == wanted, document["findings"]
        assert all(one["fix"] and one["saw"] and one["wanted"] for one in document["findings"])
        fixes = {(one["host"], one["check"]): one["fix"] for one in document["findings"]}
        for fault in table:
            if fault.fix:
                lab.run("head", ["bash", "-ec", fixes[fault.host, fault.check]])
    finally:
        for fault in made:
            fault.heal(lab)
    return document


def test_a_healthy_cluster_gives_no_finding(lab):
    """A healthy cluster with a complete run gives nothing, with exit code 0."""
    document = check(lab, RUN)
    assert document["findings"] == []
    assert document["ok"] is True


def test_hosts_that_cannot_be_reached(lab):
    """Six ways not to be reached are told apart; with the fixes for host keys the next check is green."""
    document = make_and_check(lab, faults.REACH, "--hosts", HOSTFILE)
    saw = {one["host"]: one["saw"] for one in document["findings"]}
    assert "CHANGED" in saw["node2"]
    assert "unknown" in saw["node3"]
    (stranger,) = check(lab, "--hosts", HOSTFILE)["findings"]
    assert (stranger["host"], stranger["check"]) == ("node2", "host-key")
    lab.run("head", ["bash", "-ec", stranger["fix"]])
    assert check(lab, "--hosts", HOSTFILE)["findings"] == []


def test_hosts_that_cannot_be_used(lab):
    """A frozen host, a name nobody knows, bad interpreters, a bad jump host, a key that only one client offers."""
    make_and_check(lab, faults.ENTER, "--hosts", HOSTFILE, *faults.ENTER_WORDS)
    assert check(lab, "--hosts", HOSTFILE)["findings"] == []


def test_what_is_tolerated(lab):
    """Slow, chatty and busy hosts and names that lead astray stop nothing; the fixes for names work."""
    with lab.popen("head", ["/usr/bin/python3", "-c", HALF_OPEN], stdout=subprocess.PIPE) as crowd:
        document = make_and_check(lab, faults.TOLERATED, "--hosts", HOSTFILE)
        crowd.kill()
    assert document["ok"] is True
    assert check(lab, "--hosts", HOSTFILE)["findings"] == []


def test_networks_that_do_not_carry(lab):
    """A firewall, two hosts cut apart, a port in use and an odd MTU are found by the hosts themselves."""
    with lab.popen("node1", ["/usr/bin/python3", "-c", LISTEN], stdout=subprocess.PIPE) as server:
        assert server.stdout.readline() == "up\n"
        document = make_and_check(lab, faults.NETWORK, "--hosts", HOSTFILE, "--master-port", "23456")
        server.kill()
    saw = {(one["host"], one["check"]): one["saw"] for one in document["findings"]}
    assert saw["node3", "ports"].startswith("node2 cannot reach")
    assert saw["node5", "ports"].startswith("no other host reaches")
    assert check(lab, "--hosts", HOSTFILE)["findings"] == []


def test_files_and_folders(lab):
    """Content that differs and disks that cannot be used; what a fix removes is left for the launch to copy."""
    make_and_check(lab, faults.FILES, RUN)
    assert check(lab, RUN)["findings"] == []
    for host in NODES:
        give(lab, lab.here, host)


def test_contents_are_brought_where_somebody_says_yes(lab):
    """`--fix` asks about each tree that differs, brings it, and the next look finds nothing; what was there stays."""
    lab.run("node1", ["rm", faults.WEIGHTS])
    lab.run("node3", ["sed", "-i", "1s/is/was/", "/root/data.jsonl"])
    line = f"{sys.executable} -c '{faults.MAIN}' check {RUN} --fix --json >/root/fixed.json"
    typed = "echo n; sleep 1; echo y; sleep 1; echo y; until [ -s /root/fixed.json ]; do sleep 0.2; done"
    answers = ["bash", "-c", f'script -qec "{line}" /dev/null < <(exec 2>/dev/null; {typed})']
    said = lab.run("head", answers, env={"PYTHONPATH": faults.SOURCE}, timeout=120).stdout
    assert "Bring /root/model to node1" in said
    assert "Bring /root/data.jsonl to node3" in said
    assert json.loads(lab.read("head", "/root/fixed.json"))["findings"] == [], said
    assert (
        lab.run("node3", ["sh", "-c", "cat /root/.data.jsonl.llmtrain/old/*/tree | head -n 1"]).stdout.count("was") > 0
    )
    for host in ("node1", "node3"):
        lab.run(host, ["sh", "-c", "rm -rf /root/.model.llmtrain /root/.data.jsonl.llmtrain"])


def test_machines_that_lack_something(lab):
    """Inodes, shared memory, open files, compiler, ninja, headers."""
    make_and_check(lab, faults.MACHINE, RUN)


def test_software_that_differs(lab):
    """Versions that must match fail, versions that may differ warn, and the odd one out is named."""
    document = make_and_check(lab, faults.SOFTWARE, RUN)
    torch = next(one for one in document["findings"] if one["saw"].startswith("torch"))
    assert (torch["host"], torch["saw"]) == ("node1", "torch 2.6.0")
    assert check(lab, RUN)["findings"] == []


def test_one_machine_under_two_names(lab):
    """Two lines of the hostfile that lead to one machine are found by the machine's identity."""
    lab.run("head", ["sh", "-ec", "cp /etc/hosts /root/hosts; echo '10.77.0.1 twin' >>/etc/hosts"])
    known = lab.read("head", "/root/.ssh/known_hosts")
    lab.run("head", ["sed", "-i", "s/^node1,/twin,node1,/", "/root/.ssh/known_hosts"])
    lab.write("head", "/root/twins", "node1 slots=1\ntwin slots=1\n")
    document = check(lab, "--hosts", "/root/twins")
    lab.run("head", ["sh", "-c", "cat /root/hosts >/etc/hosts"])
    lab.write("head", "/root/.ssh/known_hosts", known)
    assert ("twin", "identity", "fail") in seen(document)


def test_unknown_host_keys_are_adopted_on_request_and_changed_ones_never(lab):
    """`--accept-new-host-keys` makes an unknown host known for good; a host whose key has changed stays refused."""
    known = lab.read("head", "/root/.ssh/known_hosts")
    lab.run("head", ["ssh-keygen", "-R", "node3"])
    faults.swapped_key(lab)
    document = check(lab, "--hosts", HOSTFILE, "--accept-new-host-keys")
    assert seen(document) == {("node2", "host-key", "fail")}
    assert seen(check(lab, "--hosts", HOSTFILE)) == {("node2", "host-key", "fail")}
    lab.write("head", "/root/.ssh/known_hosts", known)


def test_fixes_are_not_made_where_nobody_can_be_asked(lab):
    """`--fix` without a terminal does nothing, and says what it would have done."""
    known = lab.read("head", "/root/.ssh/known_hosts")
    lab.run("head", ["ssh-keygen", "-R", "node3"])
    assert seen(check(lab, "--hosts", HOSTFILE, "--fix")) == {("node3", "host-key", "fail")}
    lab.write("head", "/root/.ssh/known_hosts", known)


def test_links_are_measured_within_a_tenth_and_slow_and_lossy_ones_named(lab):
    """On shaped links every pair has the rate of its slower end within 10 %, and the odd hosts are findings."""
    rates = {"node1": 50, "node2": 10, "node3": 200, "node4": 200}
    for host, rate in rates.items():
        lab.rate(host, f"{rate}mbit")
    lab.loss("node4", 4)
    hosts = ("--include", "node1@node2@node3@node4")
    document = check(lab, "--hosts", HOSTFILE, "--links", "--html", "/root/links.html", *hosts)
    for pair in document["links"]:
        if "node4" not in {pair["sender"], pair["receiver"]}:
            expected = min(rates[pair["sender"]], rates[pair["receiver"]])
            assert abs(pair["mbits"] - expected) <= 0.1 * expected, pair
    saw = {one["host"]: one["saw"] for one in document["findings"]}
    assert set(saw) == {"node2", "node4"}
    assert "Mbit/s at best" in saw["node2"]
    assert "packets lost" in saw["node4"]
    assert {one["op"] for one in document["collectives"]} == {"all_reduce", "all_gather"}
    assert lab.read("head", "/root/links.html").count("<td") == 16


def test_who_names_the_ranks_of_a_run(lab):
    """A process that is a rank of a run is shown with host, user, pid and run; other processes are not."""
    rank = ["/bin/sh", "-c", "sleep 60; : python -m llmtrain.train.rank"]
    with lab.popen("node2", rank, env={"LLMTRAIN_RUN_ID": "demo-1", "RANK": "3"}) as process:
        process.inner_pid()
        argv = [sys.executable, "-c", faults.MAIN, "who", "--hosts", HOSTFILE, "--json"]
        done = lab.run("head", argv, env={"PYTHONPATH": faults.SOURCE})
        process.kill_group()
    (use,) = json.loads(done.stdout)["uses"]
    assert (use["host"], use["user"], use["run"], use["rank"]) == ("node2", "root", "demo-1", 3)
