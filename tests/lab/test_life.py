"""How a lab begins and ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.lab.life import remove_dead_labs
from tests.lab.memory import MemoryGroup
from tests.lab.model import LabOptions
from tests.lab.node import copy_missing
from tests.lab.proc import Identity
from tests.lab.state import PARENT, LabState

CHECKOUT = Path(__file__).parents[2]


def test_private_copy_is_writable_and_shares_nothing(tmp_path, lab_factory):
    """Each host has its own copy of a folder; options can ask for the second network, docker0 and 127.0.1.1 at once."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/file").write_text("original")
    copies = ((str(tmp_path / "cache"), "/var/cache/ops"),)
    options = LabOptions(private_copies=copies, second_network=True, docker0=True, loopback_name=True)
    with lab_factory(1, options) as lab:
        lab.write("node1", "/var/cache/ops/file", "changed")
        assert lab.read("head", "/var/cache/ops/file") == "original"
        seen = lab.run("head", ["ssh", lab.address("node1", "eth1"), "ls /sys/class/net; hostname -i"]).stdout
        assert seen == "docker0\neth0\neth1\nlo\n127.0.1.1\n"
    assert (tmp_path / "cache/file").read_text() == "original"


def test_etc_is_copied_where_overlays_do_not_work(tmp_path):
    """The fallback for containers adds what is missing and leaves the host's own files alone."""
    own = {"ssh": "own", "hosts": "own"}
    for name, text in own.items():
        (tmp_path / name).write_text(text)
    copy_missing(Path("/etc"), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in Path("/etc").iterdir()} | set(own)
    assert {name: (tmp_path / name).read_text() for name in own} == own


def test_pid_1_ends_when_its_time_is_over():
    """A host's PID 1 reaps what dies and returns at its deadline, which ends the host."""
    life = "import os, time; from tests.lab.node import reap_until; os.fork() or os._exit(0); t = time.monotonic();"
    argv = [sys.executable, "-c", f"{life} reap_until(t + 0.3); print(time.monotonic() - t > 0.29)"]
    ended = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60, cwd=CHECKOUT)
    assert ended.stdout == "True\n"


def lab_leftovers(state: LabState, pids: list[int], group: Path) -> list[str]:
    """Whatever of a lab is still on this machine."""
    places = [*map("/proc/{}".format, pids), str(state.root), str(group)]
    left = [place for place in places if Path(place).exists()]
    return left + [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if state.root.name in line]


def test_down_leaves_nothing(lab_factory):
    """No process, no mount, no cgroup and no file of a lab is left, frozen hosts and running commands included."""
    lab = lab_factory(1)
    lab.memory("node1", 500)
    sleeper = lab.popen("node1", ["setsid", "sleep", "1000"])
    sleeper.inner_pid()
    lab.freeze("node1")
    pids = [p.outer_pid for host in lab.names for p in lab.processes(host)]
    pids += [lab.identity(host).pid for host in lab.names] + [Identity.read(lab.state.switch).pid]
    lab.down()
    sleeper.wait(10)
    assert len(pids) >= 6
    assert lab_leftovers(lab.state, pids, lab.memory_group("node1").path) == []
    assert not list(Path("/run").glob("netns/*"))


ORPHAN = """
import sys, time
from tests.lab import Lab
lab = Lab.create(1)
lab.memory("node1", 500)
print(lab.state.root.name, *(lab.identity(host).pid for host in lab.names), flush=True)
time.sleep(300)
"""


def test_lab_of_a_killed_owner_is_removed_by_the_next():
    """A lab whose owner got SIGKILL leaves nothing once another lab has cleaned up."""
    with subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True, cwd=CHECKOUT) as owner:
        name, *pids = owner.stdout.readline().split()
        state = LabState(PARENT / name)
        assert not state.is_dead()
        owner.kill()
    assert name in remove_dead_labs()
    assert lab_leftovers(state, [int(pid) for pid in pids], MemoryGroup(state.group_name("node1")).path) == []


def test_command_line_builds_breaks_and_removes_a_lab():
    """`python -m tests.lab` keeps a lab between commands and takes it down."""

    def command(*words: str) -> str:
        argv = [sys.executable, "-m", "tests.lab", *words]
        done = subprocess.run(argv, capture_output=True, text=True, cwd=CHECKOUT, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    name = command("up", "1").partition(":")[0]
    try:
        assert command("--lab", name, "exec", "node1", "hostname") == "node1\n"
        command("--lab", name, "cut", "node1")
        assert "faults: cut node1/*" in command("status")
    finally:
        command("--lab", name, "down")
    assert name not in command("status")
