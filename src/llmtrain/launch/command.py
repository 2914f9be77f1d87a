"""The command that starts the ranks: DeepSpeed's runner through pdsh, or its launcher on each host. Pure."""

from __future__ import annotations

import base64
import json
import sys
from typing import TYPE_CHECKING, Literal

from llmtrain.errors import PreflightError
from llmtrain.spec.choice import Choice
from llmtrain.spec.hostfile import render_include

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmtrain.launch.job import Job
    from llmtrain.launch.rundir import HostDir

Launcher = Literal["pdsh", "ssh"]

NODE_RANK = "{node_rank}"
"""Stands for a host's number in the command of the ssh launcher."""
RUNNER_ENV = ("HOME", "USER", "LOGNAME", "PATH", "LANG", "SSH_AUTH_SOCK", "KRB5CCNAME", "XDG_RUNTIME_DIR")
"""What DeepSpeed's runner, pdsh and ssh keep of our environment."""


def choose_launcher(asked: str, *, local: bool, missing: Sequence[str]) -> Choice:
    """How the ranks are started.

    Args:
        asked: ``auto``, ``pdsh`` or ``ssh``.
        local: the only host is this machine, so that pdsh is not needed.
        missing: which of deepspeed, torch and pdsh this machine lacks.

    Raises:
        PreflightError: pdsh is asked for and something it needs is missing.
    """
    lacking = [name for name in missing if name != "pdsh" or not local]
    if asked == "ssh":
        return Choice(key="launcher", value="ssh", reason="as asked: DeepSpeed's launcher on each host, without pdsh")
    if not lacking:
        reason = "DeepSpeed's runner starts the ranks" + ("" if local else " through pdsh")
        return Choice(key="launcher", value="pdsh", reason=f"as asked: {reason}" if asked == "pdsh" else reason)
    listed = ", ".join(lacking)
    if asked == "auto":
        reason = f"no {listed} on this machine: DeepSpeed's launcher on each host, over our own connections"
        return Choice(key="launcher", value="ssh", reason=reason)
    packages = [name for name in lacking if name != "pdsh"]
    install = f"{sys.executable} -m pip install 'llmtrain[train]'" if packages else "apt-get install pdsh"
    raise PreflightError(f"no {listed} on this machine", where="head", fix=f"{install}, or use --launcher ssh")


def render_command(job: Job, run_dir: HostDir, *, address: str, port: int, launcher: str) -> tuple[str, ...]:
    """The command of one launcher; with ``ssh`` it is started on each host with its number."""
    ends = (run_dir / "code/llmtrain/train/entry.py", run_dir / "run.json")
    if launcher == "ssh":
        slots = {host.name: list(host.slots) for host in job.cluster.hosts}
        world = base64.urlsafe_b64encode(json.dumps(slots).encode()).decode()
        return (
            run_dir / "bin/python",
            "-u",
            "-m",
            "deepspeed.launcher.launch",
            f"--world_info={world}",
            f"--node_rank={NODE_RANK}",
            f"--master_addr={address}",
            f"--master_port={port}",
            "--no_local_rank",
            *ends,
        )
    force = () if job.local else ("--force_multi",)
    return (
        sys.executable,
        "-m",
        "llmtrain.train.runner",
        run_dir / "bin/python",
        "--hostfile",
        "{run}/hostfile",
        "--include",
        render_include(job.cluster),
        "--launcher",
        "pdsh",
        *force,
        "--no_ssh_check",
        "--no_local_rank",
        "--master_addr",
        address,
        "--master_port",
        str(port),
        *ends,
    )


def runner_env(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of DeepSpeed's runner."""
    return {
        **{name: environ[name] for name in RUNNER_ENV if name in environ},
        "PDSH_RCMD_TYPE": "ssh",
        # pdsh splits this at spaces and replaces %h, and the user's folder may be called anything.
        "PDSH_SSH_ARGS_APPEND": "-F {link}/ssh_config",
        "DS_ENV_FILE": "{run}/ds_env",
        # The runner itself computes nothing; without this it would look for accelerators on the head.
        "DS_ACCELERATOR": "cpu",
    }
