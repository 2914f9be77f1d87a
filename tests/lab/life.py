"""Before a lab is up and after it is down: what it needs, how a host starts, how everything ends."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.lab.memory import MemoryGroup
from tests.lab.model import LabError
from tests.lab.proc import Identity, end_host
from tests.lab.state import LabState, claim, list_states

TOOLS = ("cp", "ip", "nft", "nsenter", "pdsh", "ssh", "ssh-keygen", "sshd", "tc", "unshare")
INSTALL = "apt-get install -y iproute2 nftables openssh-client openssh-server pdsh util-linux"
NAMESPACES = ("--net", "--mount", "--uts", "--ipc", "--pid")
CHECKOUT = Path(__file__).resolve().parents[2]
NODE_PROGRAM = Path(__file__).with_name("node.py")
BOOT_S = 30.0
SBIN = "/usr/local/sbin:/usr/sbin:/sbin"


def default_shares() -> tuple[str, ...]:
    """This checkout, the environment that runs, and the Python under it.

    More in LLMTRAIN_LAB_SHARE, colon-separated.
    """
    more = [path for path in os.environ.get("LLMTRAIN_LAB_SHARE", "").split(":") if path]
    return (str(CHECKOUT), sys.prefix, sys.base_prefix, *more)


def require_root_and_tools() -> None:
    """A lab that cannot be built is an error, never a skipped test."""
    if os.geteuid() != 0:
        raise LabError("the lab needs root (network and mount namespaces): run it with sudo")
    if SBIN not in os.environ.get("PATH", ""):
        os.environ["PATH"] = f"{os.environ.get('PATH', '')}:{SBIN}"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        raise LabError(f"the lab needs {', '.join(missing)}: {INSTALL}")


def remove_dead_labs() -> list[str]:
    """Take down every lab whose owner is gone; returns their names."""
    removed = []
    for state in list_states():
        lock = claim(state)
        if lock is None:
            continue
        try:
            if state.is_dead():
                tear_down(state)
                removed.append(state.root.name)
        finally:
            os.close(lock)
    return removed


def tear_down(state: LabState) -> None:
    """End everything that was recorded, whatever state it is in, and delete the directory."""
    recorded = map(Identity.read, state.root.glob("hosts/*/pid1.json"))
    with ThreadPoolExecutor(max_workers=16) as pool:
        list(pool.map(end_host, filter(None, recorded)))
    if switch := Identity.read(state.switch):
        switch.end()
    for group in state.root.glob("hosts/*/cgroup"):
        MemoryGroup(state.group_name(group.parent.name)).remove()
    state.remove()


def start_pid1(config: Path, log: int) -> subprocess.Popen[bytes]:
    """Boot a host; returns when it says it is ready."""
    ready, ready_child = os.pipe()
    argv = [shutil.which("unshare") or "unshare", *NAMESPACES, "--fork", "--kill-child", "--propagation", "private"]
    # By its real name: on the host it must not look like a process of the environment that these tests run in.
    argv += [os.path.realpath(sys.executable), "-I", "-S", str(NODE_PROGRAM), str(config), str(ready_child)]
    streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
    try:
        # not the caller's environment: programs on the host could read it in /proc/1
        child = subprocess.Popen(argv, **streams, pass_fds=[ready_child], env={}, start_new_session=True)
    finally:
        os.close(ready_child)
    with os.fdopen(ready, "rb") as pipe:
        if not select.select([pipe], [], [], BOOT_S)[0] or pipe.readline() != b"ready\n":
            child.kill()
            child.wait()
            raise LabError(f"{config.parent.name} did not boot:\n{(config.parent / 'boot.log').read_text()[-4000:]}")
    return child
