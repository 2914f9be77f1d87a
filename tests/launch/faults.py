"""Faults for ``llmtrain check``: how each is made on a lab, and the finding it must give."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llmtrain

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.lab.lab import Lab

    Step = Callable[[Lab], object]

MAIN = "from llmtrain.cli import main; main()"
SOURCE = str(Path(llmtrain.__file__).parents[1])
HOSTFILE = "/root/hostfile"
RUN_FILE = f"""\
hosts: {HOSTFILE}
config: zero3-offload
model: {{path: /root/model, dtype: fp32}}
data: {{path: /root/data.jsonl, max_length: 64}}
batch: {{micro: 1, accumulation: 1}}
training: {{max_steps: 3}}
"""
PYTHON = f"python3.{sys.version_info.minor}"
SITE = Path(sys.prefix) / f"lib/{PYTHON}/site-packages"
HEADERS = f"{sys.base_prefix}/include/{PYTHON}"
NINJAS = (f"{sys.prefix}/bin/ninja", "/usr/bin/ninja")
NODE_DIR = "/root/.llmtrain"
WEIGHTS = "/root/model/model.safetensors"


def nothing(_lab: Lab) -> None:
    """Nothing to do."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that is wrong on one host."""

    name: str
    host: str
    check: str | None
    """The check whose finding it gives; None if it is tolerated without a word."""
    level: str = "fail"
    make: Step = nothing
    heal: Step = nothing
    fix: bool = False
    """Whether the fix can be run as it is, and heals."""


def check(lab: Lab, *words: str) -> dict[str, Any]:
    """``llmtrain check --json`` on the head."""
    argv = [sys.executable, "-c", MAIN, "check", "--json", *words]
    done = lab.run("head", argv, env={"PYTHONPATH": SOURCE}, check=False, timeout=120)
    assert done.returncode in {0, 4}, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    assert document["exit_code"] == done.returncode
    return document


def sh(host: str, script: str) -> Step:
    """A shell script run on a host."""
    return lambda lab: lab.run(host, ["sh", "-ec", script])


def calls(*steps: Step) -> Step:
    """Several steps."""
    return lambda lab: [step(lab) for step in steps]


def hide(host: str, *paths: str) -> Step:
    """Programs that are there but cannot be used."""
    return sh(host, "\n".join(f"if [ -e {path} ]; then mount --bind /dev/null {path}; fi" for path in paths))


def show(host: str, *paths: str) -> Step:
    """Undo `hide`."""
    return sh(host, "\n".join(f"umount {path} || true" for path in paths))


def metadata(package: str) -> Path:
    """What a package says about itself."""
    return next(SITE.glob(f"{package}-*.dist-info")) / "METADATA"


def other_version(host: str, package: str, version: str) -> dict[str, Step]:
    """A package that says it has another version."""
    path, copy = metadata(package), f"/tmp/{package}"
    make = f"sed 's/^Version: .*/Version: {version}/' {path} >{copy}; mount --bind {copy} {path}"
    return {"make": sh(host, make), "heal": sh(host, f"umount {path}")}


def mounted(host: str, path: str, options: str) -> dict[str, Step]:
    """A file system of its own at a path."""
    make = f"mkdir -p {path} || true; mount -t tmpfs -o size=900m,{options} tmpfs {path}"
    return {"make": sh(host, make), "heal": sh(host, f"umount {path}")}


def edited(host: str, path: str, script: str) -> dict[str, Step]:
    """A file written anew by a script that reads it."""
    make = f"cp -p {path} {path}.whole; ({script}) <{path}.whole >{path}"
    return {"make": sh(host, make), "heal": sh(host, f"cat {path}.whole >{path}; rm {path}.whole")}


def first_line(host: str, path: str, line: str) -> dict[str, Step]:
    """A file with one line more at its top."""
    return edited(host, path, f"echo '{line}'; cat")


def swapped_key(lab: Lab) -> None:
    """The head knows another key for node2 than it has."""
    key = lab.read("node1", "/etc/ssh/ssh_host_ed25519_key.pub").split()[1]
    lines = [line.split() for line in lab.read("head", "/root/.ssh/known_hosts").splitlines()]
    mine = [[*words[:2], key] if words[0].split(",")[0] == "node2" else words for words in lines]
    lab.write("head", "/root/.ssh/known_hosts", "".join(" ".join(words) + "\n" for words in mine))


def sshd(host: str, script: str) -> Step:
    """A change of sshd's configuration, and a new sshd."""
    return calls(
        lambda lab: lab.sshd_stop(host), sh(host, f"{script} /etc/ssh/sshd_config"), lambda lab: lab.sshd_start(host)
    )


REACH = [
    Fault(name="no authorized key", host="node1", check="login", **edited("node1", "/root/.ssh/authorized_keys", ":")),
    Fault(name="changed host key", host="node2", check="host-key", make=swapped_key, fix=True),
    Fault(name="unknown host key", host="node3", check="host-key", make=sh("head", "ssh-keygen -R node3"), fix=True),
    Fault(
        name="sshd stopped",
        host="node4",
        check="connect",
        make=lambda lab: lab.sshd_stop("node4"),
        heal=lambda lab: lab.sshd_start("node4"),
    ),
    Fault(
        name="host off",
        host="node5",
        check="connect",
        make=lambda lab: lab.power_cut("node5"),
        heal=lambda lab: lab.boot("node5"),
    ),
    Fault(
        name="black hole",
        host="node6",
        check="connect",
        make=lambda lab: lab.blackhole("node6"),
        heal=lambda lab: lab.unblackhole("node6"),
    ),
]
ENTER = [
    Fault(
        name="frozen host",
        host="node1",
        check="ssh",
        make=lambda lab: lab.freeze("node1"),
        heal=lambda lab: lab.thaw("node1"),
    ),
    Fault(name="name unknown here", host="node2", check="dns", **edited("head", "/etc/hosts", "sed '/ node2$/d'")),
    Fault(name="interpreter missing", host="node3", check="interpreter"),
    Fault(
        name="interpreter broken",
        host="node4",
        check="interpreter",
        make=sh("node4", "printf '#!/bin/sh\\necho no such library >&2\\nexit 3\\n' >/root/py; chmod +x /root/py"),
    ),
    Fault(
        name="jump host that is not there",
        host="node5",
        check="ssh",
        make=sh("head", "printf 'Host node5\\n ProxyJump nowhere\\n' >>/root/.ssh/config"),
        heal=sh("head", "rm -f /root/.ssh/config"),
    ),
    Fault(
        name="OpenSSH refuses the key that paramiko offers",
        host="node6",
        check="ssh-agree",
        make=sh("head", "printf 'Host node6\\n PubkeyAcceptedAlgorithms rsa-sha2-512\\n' >>/root/.ssh/config"),
    ),
]
ENTER_WORDS = ("--set", "per_host.node3.python=/root/none", "--set", "per_host.node4.python=/root/py")
TOLERATED = [
    Fault(
        name="chatty shell",
        host="node1",
        check="noisy-shell",
        level="warn",
        **first_line("node1", "/root/.bashrc", "echo WELCOME to node1"),
    ),
    Fault(
        name="host that takes 8 s",
        host="node2",
        check=None,
        **first_line("node2", "/root/.bashrc", "if mkdir /run/slow 2>/dev/null; then sleep 8; fi"),
    ),
    Fault(
        name="MaxStartups 3:50:5",
        host="node3",
        check=None,
        make=sshd("node3", "sed -i '$ a MaxStartups 3:50:5'"),
        heal=sshd("node3", "sed -i /MaxStartups/d"),
    ),
    Fault(
        name="own name on loopback",
        host="node4",
        check="names",
        level="warn",
        make=sh("node4", "sed 's/.* node4$/127.0.1.1 node4/' /etc/hosts >/tmp/h; cat /tmp/h >/etc/hosts"),
        fix=True,
    ),
    Fault(
        name="host that cannot resolve another",
        host="node5",
        check="names",
        level="warn",
        make=sh("node5", "sed '/ node1$/d' /etc/hosts >/tmp/h; cat /tmp/h >/etc/hosts"),
        fix=True,
    ),
    Fault(
        name="name that leads to another machine",
        host="node6",
        check="names",
        level="warn",
        make=sh("node6", "sed 's/.* node1$/10.77.0.2 node1/' /etc/hosts >/tmp/h; cat /tmp/h >/etc/hosts"),
        fix=True,
    ),
    Fault(
        name="docker0 alike everywhere", host="node1", check=None, make=lambda lab: [lab.docker0(h) for h in lab.nodes]
    ),
]
NETWORK = [
    Fault(
        name="firewall that lets only ssh through",
        host="node5",
        check="ports",
        make=lambda lab: lab.firewall("node5", [22]),
        heal=lambda lab: lab.firewall("node5", None),
    ),
    Fault(
        name="hosts cut apart, seen from one",
        host="node2",
        check="ports",
        make=lambda lab: lab.cut("node2", "node3"),
        heal=lambda lab: lab.heal("node2", "node3"),
    ),
    Fault(name="hosts cut apart, seen from the other", host="node3", check="ports"),
    Fault(name="master port in use", host="node1", check="master-port"),
    Fault(
        name="smaller MTU",
        host="node4",
        check="mtu",
        level="warn",
        make=sh("node4", "ip link set eth0 mtu 1400"),
        fix=True,
    ),
]
FILES = [
    Fault(name="missing shard", host="node1", check="content", make=sh("node1", f"rm {WEIGHTS}"), fix=True),
    Fault(
        name="truncated shard", host="node2", check="content", make=sh("node2", f"truncate -s -9 {WEIGHTS}"), fix=True
    ),
    Fault(
        name="other data",
        host="node3",
        check="content",
        make=sh("node3", "sed -i 1s/is/was/ /root/data.jsonl"),
        fix=True,
    ),
    Fault(
        name="full disk",
        host="node4",
        check="disk",
        make=lambda lab: lab.disk("node4", NODE_DIR, 5),
        heal=lambda lab: lab.disk("node4", NODE_DIR, None),
    ),
    Fault(name="working folder read-only", host="node5", check="node-dir", **mounted("node5", NODE_DIR, "ro")),
    Fault(name="working folder noexec", host="node6", check="node-dir", **mounted("node6", NODE_DIR, "noexec")),
]
MACHINE = [
    Fault(name="no room for more files", host="node1", check="disk", **mounted("node1", NODE_DIR, "nr_inodes=100")),
    Fault(
        name="tiny /dev/shm",
        host="node2",
        check="shm",
        level="warn",
        make=sh("node2", "mount -o remount,size=16m /dev/shm"),
        fix=True,
    ),
    Fault(
        name="few open files",
        host="node3",
        check="limits",
        level="warn",
        **first_line("node3", "/root/.bashrc", "ulimit -n 200"),
    ),
    Fault(
        name="no compiler",
        host="node4",
        check="build",
        make=hide("node4", "/usr/bin/g++", "/usr/bin/g++-12"),
        heal=show("node4", "/usr/bin/g++", "/usr/bin/g++-12"),
    ),
    Fault(name="no ninja", host="node5", check="build", make=hide("node5", *NINJAS), heal=show("node5", *NINJAS)),
    Fault(name="no Python.h", host="node6", check="build", **mounted("node6", HEADERS, "ro")),
]
SOFTWARE = [
    Fault(name="other torch", host="node1", check="versions", **other_version("node1", "torch", "2.6.0")),
    Fault(name="other deepspeed", host="node2", check="versions", **other_version("node2", "deepspeed", "0.16.0")),
    Fault(
        name="other transformers", host="node3", check="versions", **other_version("node3", "transformers", "4.56.0")
    ),
    Fault(name="no trl", host="node4", check="packages", **mounted("node4", str(metadata("trl").parent), "ro")),
    Fault(
        name="other accelerate",
        host="node5",
        check="versions",
        level="warn",
        **other_version("node5", "accelerate", "1.8.0"),
    ),
    Fault(
        name="little memory",
        host="node6",
        check="memory",
        level="warn",
        make=calls(
            sh("node6", "sed 's/^MemAvailable.*/MemAvailable: 700000 kB/' /proc/meminfo >/tmp/meminfo"),
            sh("node6", "mount --bind /tmp/meminfo /proc/meminfo"),
        ),
        heal=sh("node6", "umount /proc/meminfo"),
    ),
]
