"""`python -m tests.lab`: a lab by hand. `up` first; every other command acts on that lab, or on --lab NAME."""

# ruff: noqa: T201 - it prints

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

from tests.lab.hosts import ENVIRON
from tests.lab.lab import Lab
from tests.lab.life import default_shares, remove_dead_labs, require_root_and_tools
from tests.lab.model import LabError, LabOptions
from tests.lab.state import list_states

Handler = Callable[[Lab, argparse.Namespace], None]


def up(arguments: argparse.Namespace) -> None:
    """Build a lab that outlives this command."""
    copies = [tuple(item.split(":")) for item in arguments.copy]
    if wrong := [item for item in copies if len(item) != 2]:
        raise LabError(f"--copy wants SOURCE:TARGET, not {':'.join(wrong[0])}")
    options = LabOptions(
        second_network=arguments.second_network,
        docker0=arguments.docker0,
        loopback_name=arguments.loopback_name,
        shares=(*default_shares(), *arguments.share),
        private_copies=tuple(copies),
        shm_mb=arguments.shm_mb,
        ttl_s=arguments.ttl,
    )
    lab = Lab.create(arguments.nodes, options, detached=True)
    print(f"{lab.state.root.name}: {', '.join(f'{host} {lab.address(host)}' for host in lab.names)}")


def down(arguments: argparse.Namespace) -> None:
    """Remove a lab, or all those that nobody will remove."""
    if arguments.all_dead:
        print("\n".join(remove_dead_labs()) or "no dead labs")
    else:
        Lab.attach(arguments.lab).down()


def status(arguments: argparse.Namespace) -> None:
    """All labs of this machine."""
    for state in list_states():
        if not (state.root / "lab.json").exists():
            continue
        lab, owner = Lab(state), state.owner()
        kind = "dead" if state.is_dead() else f"owner {owner.pid}" if owner else "detached"
        print(f"{state.root.name} ({kind}), faults: {state.faults.describe()}")
        for host in lab.names:
            identity = state.identity(host)
            print(f"  {host:8} {lab.address(host):12} {f'pid {identity.pid}' if identity else 'off'}")


def execute(lab: Lab, arguments: argparse.Namespace) -> None:
    """Become the command."""
    command = [*lab.carrier(arguments.host), *(arguments.argv or ["bash", "-l"])]
    os.execve(command[0], command, {**ENVIRON, "TERM": os.environ.get("TERM", "dumb")})


def off(word: str) -> str | None:
    """`off` clears a limit."""
    return None if word == "off" else word


def number(word: str) -> int | None:
    """A number, or `off`."""
    return None if word == "off" else int(word)


def add_verb(parsers: argparse._SubParsersAction, name: str, handler: Handler, *words: str | tuple[str, dict]) -> None:
    """A subcommand whose words are positional arguments."""
    parser = parsers.add_parser(name)
    for word in words:
        flag, options = (word, {}) if isinstance(word, str) else word
        parser.add_argument(flag, **options)
    parser.set_defaults(handler=handler)


def add_faults(parsers: argparse._SubParsersAction) -> None:
    """One subcommand for each verb of `Lab`."""
    other = ("other", {"nargs": "?"})
    nic = ("--nic", {"choices": ["eth0", "eth1"]})
    size = {"type": number, "help": "MiB, or off"}
    switch = ("state", {"choices": ["on", "off"]})
    add_verb(parsers, "cut", lambda lab, a: lab.cut(a.host, a.other, nic=a.nic), "host", other, nic)
    add_verb(parsers, "heal", lambda lab, a: lab.heal(a.host, a.other, nic=a.nic), "host", other, nic)
    add_verb(parsers, "blackhole", lambda lab, a: lab.blackhole(a.host, nic=a.nic), "host", nic)
    add_verb(parsers, "unblackhole", lambda lab, a: lab.unblackhole(a.host, nic=a.nic), "host", nic)
    rate = ("rate", {"type": off, "help": "e.g. 50mbit, or off"})
    add_verb(parsers, "rate", lambda lab, a: lab.rate(a.host, a.rate, nic=a.nic or "eth0"), "host", rate, nic)
    add_verb(parsers, "loss", lambda lab, a: lab.loss(a.host, a.percent), "host", ("percent", {"type": number}))
    ports = ("ports", {"nargs": "*", "help": "TCP ports or ranges; `off` takes the firewall away"})
    add_verb(
        parsers, "firewall", lambda lab, a: lab.firewall(a.host, None if a.ports == ["off"] else a.ports), "host", ports
    )
    add_verb(parsers, "memory", lambda lab, a: lab.memory(a.host, a.mb), "host", ("mb", size))
    add_verb(parsers, "disk", lambda lab, a: lab.disk(a.host, a.path, a.mb), "host", "path", ("mb", size))
    add_verb(parsers, "sshd-stop", lambda lab, a: lab.sshd_stop(a.host), "host")
    add_verb(parsers, "sshd-start", lambda lab, a: lab.sshd_start(a.host), "host")
    add_verb(parsers, "freeze", lambda lab, a: lab.freeze(a.host), "host")
    add_verb(parsers, "thaw", lambda lab, a: lab.thaw(a.host), "host")
    add_verb(parsers, "power-cut", lambda lab, a: lab.power_cut(a.host), "host")
    erase = ("--erase", {"action": "store_true", "help": "with its disk as it first was"})
    add_verb(parsers, "boot", lambda lab, a: lab.boot(a.host, erase=a.erase), "host", erase)
    add_verb(parsers, "second-network", lambda lab, a: lab.second_network(on=a.state == "on"), switch)
    add_verb(parsers, "docker0", lambda lab, a: lab.docker0(a.host, on=a.state == "on"), "host", switch)
    add_verb(parsers, "loopback-name", lambda lab, a: lab.loopback_name(a.host, on=a.state == "on"), "host", switch)
    add_verb(parsers, "reset", lambda lab, _: lab.reset())


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab", description=__doc__)
    parser.add_argument("--lab", help="name of the lab, as `status` shows it")
    parsers = parser.add_subparsers(required=True, metavar="COMMAND")
    start = parsers.add_parser("up", help="build a lab")
    start.add_argument("nodes", type=int, nargs="?", default=3)
    start.add_argument("--share", action="append", default=[], metavar="PATH", help="bound read-only in each host")
    start.add_argument(
        "--copy", action="append", default=[], metavar="SOURCE:TARGET", help="a writable copy in each host"
    )
    for name in ("second-network", "docker0", "loopback-name"):
        start.add_argument(f"--{name}", action="store_true")
    start.add_argument("--shm-mb", type=int, default=LabOptions.shm_mb)
    start.add_argument("--ttl", type=int, default=LabOptions.ttl_s, metavar="SECONDS")
    start.set_defaults(run=up)
    stop = parsers.add_parser("down", help="remove a lab")
    stop.add_argument("--all-dead", action="store_true", help="remove the labs whose owner is gone")
    stop.set_defaults(run=down)
    parsers.add_parser("status", help="list labs, hosts and faults").set_defaults(run=status)
    add_verb(parsers, "exec", execute, "host", ("argv", {"nargs": argparse.REMAINDER}))
    add_faults(parsers)
    return parser


def main() -> int:
    """Errors of the lab are one line on stderr, exit 1."""
    arguments = build_parser().parse_args()
    try:
        require_root_and_tools()
        if "run" in arguments:
            arguments.run(arguments)
        else:
            arguments.handler(Lab.attach(arguments.lab), arguments)
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
