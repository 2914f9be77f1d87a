"""Everything that can happen while a tree travels, in a lab: the destination is always one whole tree."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from pathlib import Path

import pytest
from tests.lab.model import LabError

SOURCE = str(Path(__file__).resolve().parents[2] / "src")
PLACE = "/data/tree"
FILES, SIZE = 4, 10 << 20
TOTAL = FILES * SIZE
RATE = "100mbit"
OLD, NEW, BROKEN = "old", "new", "broken"


class Bench:
    """A lab whose hosts have an old tree, and a head with a new one."""

    def __init__(self, lab) -> None:
        self.lab = lab

    def prepare(self) -> None:
        """Sync the old tree, make the new one, slow the links down."""
        self.lab.write("head", "/root/hosts", "".join(f"{name} slots=1\n" for name in self.lab.nodes))
        for host in self.lab.names:
            self.lab.run(host, ["sh", "-c", f"mkdir -p /data; rm -rf {PLACE} /data/.tree.llmtrain"])
        self.shell(f"mkdir {PLACE}; echo {OLD} > {PLACE}/version; touch -d @1000000000 {PLACE}/version")
        assert self.finish(self.start())["ok"]
        self.shell(
            f"for i in $(seq {FILES}); do head -c {SIZE} /dev/urandom > {PLACE}/file$i; done;"
            f"echo {NEW} > {PLACE}/version;"
            f"touch -d @1000000001 {PLACE}/*"
        )
        for host in self.lab.names:
            self.lab.rate(host, RATE)

    def shell(self, text: str) -> None:
        """Run a line on the head."""
        self.lab.run("head", ["bash", "-c", text])

    def start(self, *options: str):
        """Start a sync on the head."""
        command = [sys.executable, "-m", "llmtrain.cli", "sync", PLACE, "--hosts", "/root/hosts", "--json", *options]
        return self.lab.popen("head", command, env={"PYTHONPATH": SOURCE}, stdout=-1, stderr=-1)

    def finish(self, process) -> dict:
        """Its report; `code` is the exit code."""
        out, err = process.communicate(timeout=120)
        document = json.loads(out) if out.strip() else {"error": err}
        return {**document, "code": process.returncode}

    def received(self, host: str) -> int:
        """Bytes that came in over the host's cable since it was switched on."""
        return int(self.lab.read(host, "/sys/class/net/eth0/statistics/rx_bytes"))

    @contextlib.contextmanager
    def halfway(self, host: str, *options: str):
        """A sync of which this host has about half."""
        before = self.received(host)
        process = self.start(*options)
        while self.received(host) - before < TOTAL * 0.4:
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        try:
            yield process
        finally:
            process.kill_group()
            process.wait()
            process.stdout.close()
            process.stderr.close()

    def state(self, host: str) -> str:
        """Which whole tree stands on a host."""
        script = (
            f"cd {PLACE} || exit 1; v=$(cat version); n=$(ls | wc -l); "
            f"if [ $v = {OLD} ] && [ $n = 1 ]; then echo {OLD}; "
            f"elif [ $v = {NEW} ] && [ $n = {FILES + 1} ]; then sha256sum file*; else echo {BROKEN}; fi"
        )
        text = self.lab.run(host, ["bash", "-c", script]).stdout.strip()
        if text in {OLD, BROKEN}:
            return text
        return NEW if text == self.lab.run("head", ["bash", "-c", script]).stdout.strip() else BROKEN

    def states(self) -> list[str]:
        """The same for all hosts."""
        return [self.state(host) for host in self.lab.nodes]

    def agents(self, host: str) -> list[int]:
        """Pids of agents on a host."""
        return [process.pid for process in self.lab.processes(host) if "zlib.decompress" in " ".join(process.argv)]

    def by_host(self, report: dict) -> dict[str, dict]:
        """Reports by host."""
        return {entry["host"]: entry for entry in report["hosts"]}


@pytest.fixture
def bench(lab3):
    """Hosts with the old tree, a head with the new one, slow links."""
    found = Bench(lab3)
    found.prepare()
    return found


def test_a_killed_agent_costs_only_its_host_and_the_rest_is_brought_later(bench):
    """The others get the new tree, the failed host keeps the old one, and a rerun sends it only what it lacks."""
    with bench.halfway("node2") as process:
        for pid in bench.agents("node2"):
            with contextlib.suppress(LabError):  # one of them is the shell that waits for the other
                bench.lab.signal("node2", pid, signal.SIGKILL)
        report = bench.finish(process)
    assert report["code"] == 7
    assert not bench.by_host(report)["node2"]["ok"]
    assert bench.states() == [NEW, OLD, NEW]
    again = bench.finish(bench.start())
    assert again["ok"], again
    assert 0 < again["head_bytes_sent"] < 0.8 * TOTAL
    assert bench.states() == [NEW] * 3
    assert bench.by_host(again)["node1"]["note"] == "unchanged"


def test_a_killed_head_leaves_all_hosts_as_they_were(bench):
    """No agent outlives the head, every host has the whole old tree, and a rerun sends only the rest."""
    with bench.halfway("node3") as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    deadline = time.monotonic() + 30
    while any(bench.agents(host) for host in bench.lab.names) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not any(bench.agents(host) for host in bench.lab.names)
    assert bench.states() == [OLD] * 3
    again = bench.finish(bench.start())
    assert again["ok"], again
    assert 0 < again["head_bytes_sent"] < 0.8 * TOTAL
    assert bench.states() == [NEW] * 3


def test_a_power_cut_at_half_leaves_the_old_tree_and_the_others_finish(bench):
    """A host that goes dark drops out of the chain; switched on again it goes on where it stopped."""
    with bench.halfway("node1") as process:
        bench.lab.power_cut("node1")
        report = bench.finish(process)
    assert report["code"] == 7
    bench.lab.boot("node1")
    assert bench.states() == [OLD, NEW, NEW]
    again = bench.finish(bench.start())
    assert again["ok"], again
    assert 0 < again["head_bytes_sent"] < 0.8 * TOTAL
    assert bench.states() == [NEW] * 3


def test_a_link_that_is_cut_and_heals_costs_nobody_the_sync(bench):
    """Successors pull past the silent host, which goes on when its cable is back."""
    with bench.halfway("node2") as process:
        bench.lab.cut("node2")
        time.sleep(4)
        bench.lab.heal("node2")
        report = bench.finish(process)
    assert report["ok"], report
    assert bench.states() == [NEW] * 3


def test_a_full_disk_fails_one_host_by_name_before_bytes_move_there(bench):
    """The host without room is told apart, keeps what it had, and the others get the tree."""
    bench.lab.run("node2", ["sh", "-c", f"mkdir -p /data; rm -rf {PLACE} /data/.tree.llmtrain"])
    bench.lab.disk("node2", "/data", 20)
    report = bench.finish(bench.start())
    assert report["code"] == 7
    assert "disk full" in bench.by_host(report)["node2"]["error"]
    assert [bench.state("node1"), bench.state("node3")] == [NEW, NEW]
    assert bench.lab.run("node2", ["ls", "/data"]).stdout.strip() == ""


def test_a_source_that_changes_under_the_copy_replaces_nothing(bench):
    """The changed file is named, exit 7, and every host keeps the old tree."""
    with bench.halfway("node1") as process:
        bench.shell(f"echo more >> {PLACE}/file4")
        report = bench.finish(process)
    assert report["code"] == 7
    assert "changed while it was copied" in report["error"]
    assert "file4" in report["error"] + report["where"]
    assert bench.states() == [OLD] * 3


def test_two_syncs_at_once_do_not_mix(bench):
    """The second is told that the first is at work, and the first finishes."""
    with bench.halfway("node1") as process:
        for host in bench.lab.nodes:
            bench.lab.rate(host, "5mbit")
        second = bench.finish(bench.start())
        for host in bench.lab.nodes:
            bench.lab.rate(host, RATE)
        first = bench.finish(process)
    assert second["code"] == 7
    assert "another sync" in second["hosts"][0]["error"]
    assert first["ok"], first
    assert bench.states() == [NEW] * 3


def test_a_frozen_host_is_passed_by(bench):
    """A host that stops answering without closing anything holds up nobody else."""
    with bench.halfway("node1") as process:
        bench.lab.freeze("node1")
        report = bench.finish(process)
    bench.lab.thaw("node1")
    assert report["code"] == 7
    assert [bench.state("node2"), bench.state("node3")] == [NEW, NEW]
    assert bench.state("node1") == OLD


def test_a_slow_host_moves_to_the_tail(bench):
    """The first host of the chain, on a link of a tenth, is moved so that it delays only itself."""
    bench.lab.rate("node1", "10mbit")
    report = bench.finish(bench.start())
    assert report["ok"], report
    assert report["slow"] == ["node1"]
    assert bench.states() == [NEW] * 3


def test_hosts_with_only_sshd_open_are_fed_through_it(bench):
    """One copy leaves the head, host to host through sshd; the key for it is gone afterwards, `star` sends one each."""
    for host in ("head", "node1", "node2"):
        bench.lab.firewall(host, [22])
    for host in bench.lab.nodes:
        bench.lab.rate(host, None)
    keys = [bench.lab.read(host, "/root/.ssh/authorized_keys") for host in bench.lab.nodes]
    report = bench.finish(bench.start())
    assert report["ok"], report
    assert "node2, node3 receive through the sshd of the host before" in " ".join(report["warnings"])
    assert report["head_bytes_sent"] < 1.1 * TOTAL
    assert bench.states() == [NEW] * 3
    assert [bench.lab.read(host, "/root/.ssh/authorized_keys") for host in bench.lab.nodes] == keys
    for host in bench.lab.nodes:
        bench.lab.run(host, ["sh", "-c", f"rm -rf {PLACE} /data/.tree.llmtrain"])
    star = bench.finish(bench.start("--transport", "star"))
    assert star["ok"], star
    assert star["head_bytes_sent"] > 2.9 * TOTAL
    assert bench.states() == [NEW] * 3


def test_a_host_that_dies_between_ssh_hops_is_passed_by(bench):
    """Its successor goes on through the sshd of the one before, and if nobody is before it through the head."""
    for host in bench.lab.names:
        bench.lab.firewall(host, [22])
    with bench.halfway("node2", "--transport", "ssh-hop") as process:
        bench.lab.power_cut("node1")
        report = bench.finish(process)
    bench.lab.boot("node1")
    assert report["code"] == 7
    assert bench.states() == [OLD, NEW, NEW]
