"""The lab does what it says; each verb is shown once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.lab.model import CommandFailedError, LabError

if TYPE_CHECKING:
    from tests.lab.lab import Lab

SSH = ["ssh", "-oBatchMode=yes", "-oStrictHostKeyChecking=yes", "-oConnectTimeout=2"]
COUNT_DATAGRAMS = """
import socket
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("", 9999))
server.settimeout(10)
print("up", flush=True)
count = 0
try:
    while server.recv(9):
        count += 1
        server.settimeout(0.5)
except TimeoutError:
    print(count)
"""
SEND_DATAGRAMS = """
import socket
client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(200):
    client.sendto(b"x", ("node1", 9999))
"""
LISTEN = """
import socket, time
servers = [socket.create_server(("", port)) for port in (7000, 7105)]
print("up", flush=True)
time.sleep(60)
"""
PDSH = ["pdsh", "-R", "ssh", "-t", "2", "-w"]


def ssh(lab: Lab, host: str, *command: str, timeout: float = 20.0) -> str:
    """Run a command from the head on a node."""
    return lab.run("head", [*SSH, host, *command], timeout=timeout).stdout


def reaches(lab: Lab, source: str, target: str, timeout: float = 5.0) -> bool:
    """Whether a TCP connection to the target's sshd can be made, given time for a repeated SYN."""
    probe = f"import socket; socket.create_connection(({lab.address(target)!r}, 22), {timeout})"
    return lab.run(source, ["/usr/bin/python3", "-c", probe], check=False).returncode == 0


def is_cut_off(lab: Lab, source: str, target: str) -> bool:
    """Whether no connection can be made."""
    return not reaches(lab, source, target, timeout=0.5)


def bits_per_second(lab: Lab, argv: list[str], sent: str, size: int) -> float:
    """Throughput of a command on the head that is done when all bytes have arrived."""
    begin = time.monotonic()
    lab.run("head", argv, input=sent)
    return size * 8 / (time.monotonic() - begin)


def test_ssh_from_head_to_node_verifies_the_host_key(lab3):
    """The head reaches a node by name with strict host keys, as the node's root."""
    assert ssh(lab3, "node1", "hostname; id -u; echo $HOME") == "node1\n0\n/root\n"


def test_nodes_hold_no_client_key(lab3):
    """Only the head can log in elsewhere."""
    assert "id_ed25519" in lab3.run("head", ["ls", "/root/.ssh"]).stdout
    with pytest.raises(CommandFailedError, match="Host key verification failed"):
        lab3.run("node1", [*SSH, "node2", "true"])


def test_pdsh_reaches_all_nodes(lab3):
    """One pdsh from the head runs on three nodes."""
    out = lab3.run("head", [*PDSH, "node[1-3]", "hostname"]).stdout
    assert sorted(out.splitlines()) == ["node1: node1", "node2: node2", "node3: node3"]


def test_disks_are_private(lab3):
    """What one host writes, no other host and not this machine sees; the developer's home is hidden."""
    name = f"mark-{os.getpid()}"
    for folder in ("/root", "/home", "/tmp", "/srv", "/mnt", "/var/tmp", "/data", "/dev/shm"):
        lab3.write("node1", f"{folder}/{name}", "x")
        assert lab3.run("node2", ["test", "-e", f"{folder}/{name}"], check=False).returncode == 1
        assert not Path(folder, name).exists()
    assert lab3.read("node1", f"/data/{name}") == "x"
    assert lab3.run("node2", ["ls", "-A", "/home"]).stdout == ""


def test_programs_and_shares_are_read_only(lab3):
    """Neither /usr nor the shared checkout and environment can be changed from a host."""
    shared = str(Path(__file__).parent)
    for folder in ("/usr", sys.prefix, shared):
        refused = lab3.run("node1", ["touch", f"{folder}/mark"], check=False)
        assert "Read-only file system" in refused.stderr
    assert Path(__file__).name in lab3.run("node1", ["ls", shared]).stdout


def test_each_host_is_a_machine_of_its_own(lab3):
    """Machine id, boot id, host key and host name differ from host to host; pids start at 1."""
    assert "overlay /etc overlay" in lab3.read("node1", "/proc/mounts")
    assert "ssh_host_rsa_key" not in lab3.run("node1", ["ls", "/etc/ssh"]).stdout
    files = ["/etc/machine-id", "/proc/sys/kernel/random/boot_id", "/etc/ssh/ssh_host_ed25519_key.pub", "/etc/hostname"]
    for path in files:
        assert len({lab3.read(host, path) for host in lab3.names}) == len(lab3.names)
    assert all(process.pid < 1000 for process in lab3.processes("node1"))


def test_environment_of_commands_is_clean(lab3, monkeypatch):
    """A command on a host sees a fresh login's environment and what was asked for, nothing of this process."""
    monkeypatch.setenv("PLANTED", "secret")
    lines = lab3.run("node1", ["env"], env={"ASKED": "yes"}).stdout.splitlines()
    assert {"HOME=/root", "ASKED=yes"} <= set(lines)
    assert "secret" not in "".join(lines) + lab3.run("node1", ["cat", "/proc/1/environ"]).stdout


def test_command_that_runs_out_of_time_is_ended(lab3):
    """When time is up the command and its children are gone, and the error says so."""
    with pytest.raises(CommandFailedError, match="ran out of time"):
        lab3.run("node1", ["sh", "-c", "sleep 1234 & sleep 1234"], timeout=0.5)
    assert not any("1234" in process.argv for process in lab3.processes("node1"))


def test_processes_shows_argv_environment_and_start_time(lab3):
    """A process is found with the pid, the start time, the arguments and the environment that the host itself sees."""
    with lab3.popen("node1", ["sleep", "77"], env={"MARK": "1"}) as sleeper:
        inner = sleeper.inner_pid()
        found = next(p for p in lab3.processes("node1") if p.outer_pid == inner)
        stat = lab3.read("node1", f"/proc/{found.pid}/stat").rpartition(")")[2].split()
        assert (found.argv, found.environ["MARK"], str(found.start_time)) == (("sleep", "77"), "1", stat[19])
        lab3.signal("node1", found.pid, signal.SIGTERM)
    assert sleeper.returncode == -signal.SIGTERM


def test_signal_to_popen_reaches_the_command(lab3):
    """`terminate` on the result of popen ends the command on the host, not only its carrier."""
    with lab3.popen("node1", ["sleep", "78"]) as sleeper:
        sleeper.inner_pid()
        sleeper.terminate()
    assert not any(p.argv == ("sleep", "78") for p in lab3.processes("node1"))


def test_cut_and_heal(lab3):
    """A cut cable shows no carrier and no host beyond it; healed, all is as before."""
    lab3.cut("node1")
    assert is_cut_off(lab3, "head", "node1")
    assert lab3.read("node1", "/sys/class/net/eth0/operstate") == "down\n"
    assert reaches(lab3, "head", "node2")
    lab3.heal("node1")
    assert reaches(lab3, "head", "node1")


def test_cut_between_two_hosts(lab3):
    """Two hosts lose each other while both reach the head, and the head itself can be one of the two."""
    lab3.cut("node1", "node2")
    assert is_cut_off(lab3, "node1", "node2")
    assert reaches(lab3, "head", "node1")
    assert reaches(lab3, "node2", "head")
    lab3.heal("node2", "node1")
    assert reaches(lab3, "node1", "node2")
    lab3.cut("head", "node3")
    assert is_cut_off(lab3, "head", "node3")
    assert reaches(lab3, "node1", "node3")


def test_blackhole(lab3):
    """The link looks up and nothing arrives."""
    lab3.blackhole("node2")
    assert lab3.read("node2", "/sys/class/net/eth0/operstate") == "up\n"
    assert is_cut_off(lab3, "head", "node2")
    lab3.unblackhole("node2")
    assert reaches(lab3, "head", "node2")


def test_rate_holds_in_both_directions(lab3):
    """A cable limited to 16 Mbit/s carries less than twice that, up and down."""
    size = 1_000_000
    lab3.rate("node1", "16mbit")
    assert bits_per_second(lab3, [*SSH, "node1", "cat >/dev/null"], "x" * size, size) < 32e6
    assert bits_per_second(lab3, [*SSH, "node1", f"head -c {size} /dev/zero"], "", size) < 32e6


def test_loss(lab3):
    """With half of the frames lost, some datagrams of 200 arrive and some do not, and the sender sees no error."""
    assert reaches(lab3, "head", "node1")  # each knows the other's address now, and no ARP reply can get lost
    lab3.loss("node1", 50)
    with lab3.popen("node1", ["/usr/bin/python3", "-c", COUNT_DATAGRAMS], stdout=subprocess.PIPE) as server:
        assert server.stdout.readline() == "up\n"
        lab3.run("head", ["/usr/bin/python3", "-c", SEND_DATAGRAMS])
        received = int(server.communicate(timeout=20)[0])
    assert 20 < received < 180


def test_firewall(lab3):
    """Only the given ports are reachable; without the firewall all are."""
    with lab3.popen("node1", ["/usr/bin/python3", "-c", LISTEN], stdout=subprocess.PIPE) as server:
        assert server.stdout.readline() == "up\n"
        lab3.firewall("node1", [22, "7100-7110"])
        connect = "import socket, sys; socket.create_connection(('node1', int(sys.argv[1])), 1)"
        probe = ["/usr/bin/python3", "-c", connect]
        codes = [lab3.run("head", [*probe, port], check=False).returncode for port in ("22", "7105", "7000")]
        lab3.firewall("node1", None)
        codes.append(lab3.run("head", [*probe, "7000"], check=False).returncode)
        server.kill()
    assert codes == [0, 0, 1, 0]


def test_memory_limit_kills_a_too_large_allocation(lab3):
    """A process started over ssh is killed beyond the limit; a small one is not, and lifted, both live."""
    large = "/usr/bin/python3 -c 'b\"x\" * (300 << 20)'"
    lab3.memory("node1", 100)
    ssh(lab3, "node1", "/usr/bin/python3 -c 'b\"x\" * (20 << 20)'")
    with pytest.raises(CommandFailedError):
        ssh(lab3, "node1", large)
    killed = lab3.run("node1", ["sh", "-c", large], check=False)
    assert killed.returncode in {-signal.SIGKILL, 128 + signal.SIGKILL}
    lab3.memory("node1", None)
    ssh(lab3, "node1", large)


def test_small_disk_gets_full(lab3):
    """A folder with 5 MiB takes no 6 MiB; grown to 10 it does."""
    fill = ["dd", "if=/dev/zero", "of=/data/fill", "bs=1M", "count=6"]
    lab3.disk("node2", "/data", 5)
    full = lab3.run("node2", fill, check=False)
    assert "No space left on device" in full.stderr
    lab3.disk("node2", "/data", 10)
    lab3.run("node2", fill)
    lab3.disk("node2", "/data", None)
    assert lab3.run("node2", ["test", "-e", "/data/fill"], check=False).returncode == 1


def test_sshd_stop_and_start(lab3):
    """A stopped sshd refuses new sessions and keeps those it has."""
    with lab3.popen("head", [*SSH, "node1", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as session:
        session.stdin.write("before\n")
        session.stdin.flush()
        assert session.stdout.readline() == "before\n"
        lab3.sshd_stop("node1")
        with pytest.raises(CommandFailedError, match="Connection refused"):
            ssh(lab3, "node1", "true")
        out, _ = session.communicate("after\n", timeout=10)
    assert out == "after\n"
    lab3.sshd_start("node1")
    assert ssh(lab3, "node1", "hostname") == "node1\n"


def test_freeze_and_thaw(lab3):
    """A frozen host's kernel still takes connections but nobody answers; thawed, its programs go on."""
    with lab3.popen("node1", ["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as echo:
        echo.inner_pid()
        lab3.freeze("node1")
        assert reaches(lab3, "head", "node1")
        with pytest.raises(CommandFailedError, match="timed out"):
            ssh(lab3, "node1", "true")
        lab3.thaw("node1")
        assert echo.communicate("still here", timeout=10)[0] == "still here"
    assert ssh(lab3, "node1", "hostname") == "node1\n"


def test_power_cut_and_boot(lab3):
    """All processes of a host end at once; it boots with its disk as it was, or erased, with the same host key."""
    boot_id = lab3.read("node1", "/proc/sys/kernel/random/boot_id")
    lab3.write("node1", "/root/kept", "x")
    with lab3.popen("node1", ["sleep", "79"]) as sleeper:
        sleeper.inner_pid()
        lab3.power_cut("node1")
    assert not lab3.is_on("node1")
    assert is_cut_off(lab3, "head", "node1")
    lab3.boot("node1")
    assert ssh(lab3, "node1", "cat /root/kept") == "x"
    assert lab3.read("node1", "/proc/sys/kernel/random/boot_id") != boot_id
    lab3.power_cut("node1")
    lab3.boot("node1", erase=True)
    assert "kept" not in ssh(lab3, "node1", "ls -A /root")


def test_cut_cable_stays_cut_over_a_reboot(lab3):
    """A fault of the network is not healed by switching the host off and on."""
    lab3.cut("node1")
    lab3.power_cut("node1")
    lab3.boot("node1")
    assert is_cut_off(lab3, "head", "node1")
    lab3.heal("node1")
    assert reaches(lab3, "head", "node1")


def test_second_network_is_unnamed_and_survives_a_cut_of_the_first(lab3):
    """Hosts meet on 10.78.0.x as well, which no name leads to, and which has its own cables."""
    lab3.second_network()
    assert lab3.address("node1", "eth1") not in lab3.read("head", "/etc/hosts")
    lab3.cut("node1", nic="eth0")
    assert is_cut_off(lab3, "head", "node1")
    assert ssh(lab3, lab3.address("node1", "eth1"), "hostname") == "node1\n"
    lab3.heal("node1", nic="eth0")
    lab3.second_network(on=False)
    assert "eth1" not in lab3.run("node1", ["ls", "/sys/class/net"]).stdout


def test_docker0_and_loopback_name(lab3):
    """A host can have Docker's bridge, and can resolve its own name to 127.0.1.1 as Debian does."""
    lab3.docker0("node1")
    lab3.loopback_name("node1")
    assert "172.17.0.1/16" in lab3.run("node1", ["ip", "-4", "addr", "show", "docker0"]).stdout
    assert lab3.run("node1", ["getent", "ahostsv4", "node1"]).stdout.startswith("127.0.1.1 ")
    assert lab3.run("node2", ["getent", "ahostsv4", "node1"]).stdout.startswith(f"{lab3.address('node1')} ")


def test_reset_heals_everything(lab3):
    """After `reset` no fault is left, hosts that were off are on, and all nodes answer."""
    lab3.cut("node1")
    lab3.cut("node1", "node2")
    lab3.rate("node2", "10mbit")
    lab3.loss("node2", 30)
    lab3.firewall("node2", [])
    lab3.freeze("node2")
    lab3.disk("node1", "/data", 5)
    lab3.power_cut("node3")
    lab3.reset()
    assert lab3.faults.describe() == "none"
    assert len(lab3.run("head", [*PDSH, "node[1-3]", "hostname"]).stdout.splitlines()) == 3


def test_unknown_host_is_refused(lab3):
    """A verb for a host that does not exist names those that do."""
    with pytest.raises(LabError, match="no host 'node9'; there are head, node1"):
        lab3.cut("node9")
