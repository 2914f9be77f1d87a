"""A lab's life, and every fault it can inject."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from tests.lab import net
from tests.lab.disk import install, render_hosts, write_key
from tests.lab.hosts import Hosts, existing_shares
from tests.lab.life import remove_dead_labs, require_root_and_tools, start_pid1, tear_down
from tests.lab.model import HEAD, LabError, LabOptions, host_names
from tests.lab.proc import Identity, end_host, outer_pids
from tests.lab.state import LabState, list_states

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterable

SETTLE_S = 10.0
NETWORK_FAULTS = ("cut", "pair", "blackhole", "rate", "loss")
HOST_FAULTS = ("firewall", "disk", "sshd_stopped", "frozen")
"""Faults that a reboot ends."""


class Lab(Hosts):
    """Several hosts on one machine. Use as a context manager, or call `down` yourself."""

    def __init__(self, state: LabState) -> None:
        super().__init__(state)
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    @classmethod
    def create(cls, nodes: int = 3, options: LabOptions | None = None, *, detached: bool = False) -> Lab:
        """Head and nodes, up and reachable. A detached lab outlives this process."""
        require_root_and_tools()
        remove_dead_labs()
        host_names(nodes)
        options = options or LabOptions()
        shares, own = existing_shares(options.shares), existing_shares(options.head_shares)
        options = replace(options, shares=tuple(shares), head_shares=tuple(own))
        lab = cls(LabState.new(nodes, options))
        try:
            lab._up()
            if detached:
                lab.state.write(nodes, options, None)
        except BaseException:
            lab.down()
            raise
        return lab

    @classmethod
    def attach(cls, name: str | None = None) -> Lab:
        """A lab that is up: by the name of its directory, or the only detached one there is."""
        states = [state for state in list_states() if not state.is_dead()]
        if name is None:
            states = [state for state in states if state.owner() is None]
        else:
            states = [state for state in states if state.root.name == name]
        if len(states) != 1:
            found = ", ".join(state.root.name for state in states) or "none"
            raise LabError(f"name one lab with --lab: found {found}")
        return cls(states[0])

    def __enter__(self) -> Lab:  # noqa: PYI034 - typing has Self only since Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def down(self) -> None:
        """Remove the lab: every process, mount, link, cgroup and file of it."""
        if self.state.root.exists():
            tear_down(self.state)
        for child in self._children.values():
            child.wait(SETTLE_S)
        self._children.clear()

    def _up(self) -> None:
        switch, identity = net.start_switch(self.options.ttl_s)
        self._children["switch"] = switch
        identity.write(self.state.switch)
        if self.options.second_network:
            net.ip(identity.pid, "link add br1 type bridge", "link set br1 up")
        keys = ["client", *(f"host-{name}" for name in self.names)]
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 2) as pool:
            list(pool.map(lambda key: write_key(self.state.keys / key, key), keys))
            list(pool.map(self._install, self.names))
            list(pool.map(self._start, self.names))

    def _install(self, host: str) -> None:
        self.state.host(host).mkdir(parents=True, exist_ok=True)
        install(self.state.disk(host), host, self.state.keys, self.node_count, self.options)

    @property
    def wires(self) -> net.Wires:
        """The switch and its cables."""
        switch = Identity.read(self.state.switch)
        if switch is None or not switch.alive():
            raise LabError("the lab's switch is off")
        return net.Wires(switch.pid, self.options, self.faults)

    def _start(self, host: str) -> None:
        """Boot PID 1 and connect it; its record is written by itself, first of all."""
        config = {
            "name": host,
            "identity": str(self.state.identity_path(host)),
            "disk": str(self.state.disk(host)),
            "shares": [*self.options.shares, *(self.options.head_shares if host == HEAD else ())],
            "shm_mb": self.options.shm_mb,
            "ttl_s": self.options.ttl_s,
        }
        path = self.state.host(host) / "node.json"
        path.write_text(json.dumps(config))
        with (self.state.host(host) / "boot.log").open("wb") as log:
            self._children[host] = start_pid1(path, log.fileno())
        pid = self.identity(host).pid
        if self.faults.has("memory", host):
            self.memory_group(host).enrol([pid, *outer_pids(pid)])
        for nic in self.wires.nics:
            self.wires.plug(host, pid, nic)
        if self.options.docker0 or self.faults.has("docker0", host):
            net.set_docker0(pid, on=True)

    # --- power

    def power_cut(self, host: str) -> None:
        """Everything on the host ends at once and nobody is told."""
        identity = self.identity(host)
        self.wires.unplug(host)
        end_host(identity)
        if child := self._children.pop(host, None):
            child.wait(SETTLE_S)

    def boot(self, host: str, *, erase: bool = False) -> None:
        """Switch a host on again with its disk as it was left, or as it first was; cables stay as they are."""
        if self.is_on(host):
            raise LabError(f"{host} is on")
        for kind in HOST_FAULTS:
            self._forget(kind, host)
        if erase:
            shutil.rmtree(self.state.disk(host))
            shutil.rmtree(self.state.host(host) / "etc-work")
            self._install(host)
        self.wires.discard(host)
        self._start(host)
        if any(self.faults.of(kind) for kind in NETWORK_FAULTS):
            self._rewire([host])

    def freeze(self, host: str) -> None:
        """Stop every process of the host; its kernel still answers."""
        init = self.identity(host).pid
        stopped: set[int] = set()
        while fresh := set(outer_pids(init)) - stopped:
            for pid in fresh:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            stopped |= fresh
        self.faults.set("frozen", host)

    def thaw(self, host: str) -> None:
        """Continue what was frozen, and the nsenter processes that had stopped along with it."""
        init = self.identity(host).pid
        for pid in {*outer_pids(init), *outer_pids(init, "mnt")}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self.faults.clear("frozen", host)

    # --- cables

    def cut(self, host: str, other: str | None = None, *, nic: str | None = None) -> None:
        """Pull a host's cable (of one nic, or all), or stop all frames between two hosts."""
        self._set_link("cut", host, other, nic, on=True)

    def heal(self, host: str, other: str | None = None, *, nic: str | None = None) -> None:
        """Undo `cut` with the same arguments."""
        self._set_link("cut", host, other, nic, on=False)

    def blackhole(self, host: str, *, nic: str | None = None) -> None:
        """The link stays up, every frame is lost."""
        self._set_link("blackhole", host, None, nic, on=True)

    def unblackhole(self, host: str, *, nic: str | None = None) -> None:
        """Undo `blackhole`."""
        self._set_link("blackhole", host, None, nic, on=False)

    def rate(self, host: str, rate: str | None, *, nic: str = "eth0") -> None:
        """Limit a cable in both directions, e.g. `"50mbit"`; None for no limit."""
        self._change("rate", f"{self._known(host)}/{nic}", rate)
        self._rewire([host])

    def loss(self, host: str, percent: int | None) -> None:
        """Lose that many percent of the frames from and to a host, at random."""
        self._change("loss", self._known(host), percent or None)
        self._rewire([])

    def second_network(self, *, on: bool = True) -> None:
        """Give every host an eth1 on a network that /etc/hosts does not name, or take it away."""
        if self.options.second_network or on == self.faults.has("second_network", "lab"):
            return
        pids = {host: self.identity(host).pid for host in self.names}
        if on:
            self.wires.add_second(pids)
            self.faults.set("second_network", "lab")
        else:
            self.wires.remove_second(pids)
            self.faults.clear("second_network", "lab")

    def _set_link(self, kind: str, host: str, other: str | None, nic: str | None, *, on: bool) -> None:
        if other is None:
            key = f"{self._known(host)}/{nic or '*'}"
        else:
            kind, key = "pair", "/".join(sorted((self._known(host), self._known(other))))
        self._change(kind, key, on or None)
        self._rewire([] if other else [host])

    def _rewire(self, hosts: Iterable[str]) -> None:
        """Make these hosts' cables and the switch's rules what the faults say."""
        wires = self.wires
        on = [host for host in self.names if self.is_on(host)]
        for host in hosts:
            if host in on:
                wires.repair(host, self.identity(host).pid)
        wires.filter(on)

    def _change(self, kind: str, key: str, value: object) -> None:
        if value is None:
            self.faults.clear(kind, key)
        else:
            self.faults.set(kind, key, value)

    def _forget(self, kind: str, host: str) -> None:
        for key in self.faults.of(kind):
            if key.partition("/")[0] == host:
                self.faults.clear(kind, key)

    # --- the host's own limits

    def firewall(self, host: str, ports: Iterable[int | str] | None) -> None:
        """Accept inbound only these TCP ports (numbers or `"20000-20100"`), replies and ping; None takes it away."""
        chosen = None if ports is None else list(ports)
        net.set_firewall(self.identity(host).pid, chosen)
        self._change("firewall", host, chosen)

    def memory(self, host: str, mb: int | None) -> None:
        """Limit what the host's processes may use together, in MiB; None lifts it."""
        pid = self.identity(host).pid
        group = self.memory_group(host)
        if mb is not None or group.path.exists():
            (self.state.host(host) / "cgroup").touch()  # so that `down` removes it after any crash
            group.limit(mb)
            group.enrol([pid, *outer_pids(pid)])
        self._change("memory", host, mb)

    def disk(self, host: str, path: str, mb: int | None) -> None:
        """Put a file system of that many MiB over a folder (its content is hidden meanwhile); None takes it away.

        It is a tmpfs: empty, and gone after a power cut.
        """
        key = f"{self._known(host)}{path}"
        if self.faults.has("disk", key):
            argv = ["umount", "-l", path] if mb is None else ["mount", "-o", f"remount,size={mb}m", path]
        elif mb is None:
            return
        else:
            self.run(host, ["mkdir", "-p", path])
            mode = self.run(host, ["stat", "-c", "%a", path]).stdout.strip()
            argv = ["mount", "-t", "tmpfs", "-o", f"size={mb}m,mode={mode}", "tmpfs", path]
        self.run(host, argv)
        self._change("disk", key, mb)

    def sshd_stop(self, host: str) -> None:
        """End the listening sshd; sessions go on."""
        pid = int(self.read(host, "/run/sshd.pid"))
        listener = next(process for process in self.processes(host) if process.pid == pid)
        Identity.of(listener.outer_pid).end(signal.SIGTERM)
        self.faults.set("sshd_stopped", host)

    def sshd_start(self, host: str) -> None:
        """Start sshd again; it listens when this returns."""
        self.run(host, ["/usr/sbin/sshd", "-E", "/var/log/sshd.log"])
        deadline = time.monotonic() + SETTLE_S
        while self.run(host, ["test", "-s", "/run/sshd.pid"], check=False).returncode:
            if time.monotonic() > deadline:
                raise LabError(f"{host}: sshd does not listen: {self.read(host, '/var/log/sshd.log')[-2000:]}")
        self.faults.clear("sshd_stopped", host)

    def docker0(self, host: str, *, on: bool = True) -> None:
        """Add or remove the bridge docker0 with 172.17.0.1."""
        if on == (self.options.docker0 or self.faults.has("docker0", host)):
            return
        net.set_docker0(self.identity(host).pid, on=on)
        self._change("docker0", host, on or None)

    def loopback_name(self, host: str, *, on: bool = True) -> None:
        """Map the host's own name to 127.0.1.1 in its /etc/hosts, or to its address."""
        self.write(host, "/etc/hosts", render_hosts(self.options, self.names, host, loopback_name=on))
        self._change("loopback_name", host, on or None)

    def end_processes(self, host: str) -> None:
        """SIGKILL everything on a host but PID 1 and its listening sshd."""
        listener = self.run(host, ["cat", "/run/sshd.pid"], check=False).stdout.strip()
        for process in self.processes(host):
            if str(process.pid) != listener:
                with contextlib.suppress(LabError):
                    Identity.of(process.outer_pid).end()

    def reset(self) -> None:
        """Make every host healthy again: power, cables, limits, daemons. Files and processes stay."""
        for host in self.names:
            if not self.is_on(host):
                self.boot(host)
        if not self.faults.any():
            return
        shaped = {key.partition("/")[0] for kind in ("cut", "blackhole", "rate") for key in self.faults.of(kind)}
        for kind in NETWORK_FAULTS:
            self.faults.clear_kind(kind)
        self._rewire(shaped)
        self._reset_hosts()
        self.second_network(on=False)

    def _reset_hosts(self) -> None:
        undo = {
            "frozen": self.thaw,
            "firewall": lambda host: self.firewall(host, None),
            "memory": lambda host: self.memory(host, None),
            "sshd_stopped": self.sshd_start,
            "docker0": lambda host: self.docker0(host, on=False),
            "loopback_name": lambda host: self.loopback_name(host, on=self.options.loopback_name),
        }
        for kind, heal in undo.items():
            for host in self.faults.of(kind):
                heal(host)
        for key in self.faults.of("disk"):
            host, _, path = key.partition("/")
            self.disk(host, f"/{path}", None)
