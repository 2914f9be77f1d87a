"""Plan a launch: from what is known to every file's text and one command. Pure.

A dry run prints a :class:`LaunchPlan` and a real run executes it, so that what is shown is what happens.
"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from llmtrain.cluster.doctor import missing_trees
from llmtrain.cluster.sshconfig import render_ssh_config
from llmtrain.errors import PreflightError
from llmtrain.launch.choices import KEPT_ENV, choose_cores, rank_env
from llmtrain.launch.render import assume
from llmtrain.launch.rundir import HostDir, RunDir
from llmtrain.spec.choice import Choice
from llmtrain.spec.dsconfig import Rendered, render_deepspeed
from llmtrain.spec.hostfile import render_hostfile, render_include
from llmtrain.spec.presets import overrides_layer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmtrain.launch.contact import Contact
    from llmtrain.launch.job import Job
    from llmtrain.spec.hostfile import Host

RUNNER_ENV = ("HOME", "USER", "LOGNAME", "PATH", "LANG", "SSH_AUTH_SOCK", "KRB5CCNAME", "XDG_RUNTIME_DIR")
"""What DeepSpeed's runner, pdsh and ssh keep of our environment."""
GRACE_S = 3.0


@dataclass(frozen=True, kw_only=True)
class HostFile:
    """A file to be written into the run folder of a host."""

    path: str
    """Relative to the run folder."""
    text: str
    """Its content."""
    mode: int = 0o600
    """Permission bits."""


@dataclass(frozen=True, kw_only=True)
class HostPlan:
    """What one host is given."""

    name: str
    """Its name in the hostfile."""
    slots: tuple[int, ...]
    """Accelerators in use."""
    ranks: tuple[int, ...]
    """Global ranks on it."""
    python: str
    """The ranks' interpreter."""
    interface: str
    """Network interface of the ranks."""
    address: str
    """Its IPv4 address."""
    own_dir: str
    """The run folder's real path on this host."""
    files: tuple[HostFile, ...]
    """Files to write there; the rank code comes beside them."""
    env: Mapping[str, str]
    """What the ranks' environment is given."""


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """A launch, ready to be carried out."""

    run_id: str
    """Name of the run."""
    world_size: int
    """Number of ranks."""
    hosts: tuple[HostPlan, ...]
    """In rank order."""
    copies: tuple[tuple[str, str], ...]
    """(host, path) of the model and data files that are missing there and are copied from here first."""
    run_dir: HostDir
    """The run folder's path that is valid on every host."""
    local: bool
    """This machine only: DeepSpeed starts the ranks here without pdsh."""
    master_addr: str
    """Where ranks meet."""
    master_port: int
    """The port they meet on, free on host 0."""
    deepspeed: Rendered
    """DeepSpeed's configuration."""
    head_files: Mapping[str, str]
    """Name -> text of the files in the run folder on the head that the launcher reads."""
    runner_argv: tuple[str, ...]
    """The command; ``{run}`` stands for the run folder on the head until it exists, ``{link}`` for the link to it."""
    runner_env: Mapping[str, str]
    """Environment of that command."""
    choices: tuple[Choice, ...]
    """Everything that was chosen, with reasons."""
    run: Mapping[str, Any]
    """The resolved run as the ranks read it, without what differs between hosts."""
    scratch: tuple[str, ...]
    """Folders on the hosts that hold swap files of this run and are removed at its end."""
    private_env: frozenset[str]
    """Names of the variables whose values the user gave; nobody is shown them."""

    def argv(self, run_dir: RunDir) -> list[str]:
        """The command with the head's run folder filled in."""
        return [_fill(part, {"{run}": str(run_dir.path)}) for part in self.runner_argv]

    def env(self, run_dir: RunDir) -> dict[str, str]:
        """The command's environment with the head's run folder filled in."""
        places = {"{run}": str(run_dir.path), "{link}": str(run_dir.link)}
        return {key: _fill(value, places) for key, value in self.runner_env.items()}


def _fill(text: str, places: Mapping[str, str]) -> str:
    for mark, place in places.items():
        text = text.replace(mark, place)
    return text


def plan_launch(job: Job, contact: Contact, run_id: str, environ: Mapping[str, str]) -> LaunchPlan:
    """Everything a launch will write and run.

    Args:
        job: what the head knows.
        contact: what the hosts said.
        run_id: name of the run.
        environ: our own environment.

    Raises:
        InputFileError: DeepSpeed's configuration does not fit the run.
        PreflightError: no port is free on host 0.
    """
    rendered = _render(job, contact, run_id)
    run_dir, own_dirs = _folders(job, contact, run_id)
    address, port, meeting = _meeting_point(job, contact)
    run = _run(job, contact, rendered, run_id, run_dir)
    hosts = tuple(_plan_host(job, contact, host, run, run_dir, own_dirs[host.name]) for host in job.cluster.hosts)
    return LaunchPlan(
        run_id=run_id,
        world_size=job.cluster.world_size,
        hosts=hosts,
        copies=() if job.local else tuple(missing_trees(contact.facts, job.trees)),
        run_dir=run_dir,
        local=job.local,
        master_addr=address,
        master_port=port,
        deepspeed=rendered,
        head_files={
            "hostfile": render_hostfile(job.cluster),
            "ssh_config": render_ssh_config(),
            "ds_env": "",
            "ds_config.json": json.dumps(rendered.config, indent=2) + "\n",
        },
        runner_argv=_runner_argv(job, run_dir, address, port),
        runner_env=_runner_env(environ),
        choices=(*contact.choices, *meeting, *_general_choices(job, contact, run), *rendered.choices),
        run=run,
        scratch=_scratch(rendered),
        private_env=frozenset(job.spec.env),
    )


def _render(job: Job, contact: Contact, run_id: str) -> Rendered:
    wanted = replace(
        assume(job.spec, job.cluster.world_size),
        dtype=contact.hardware.dtype,
        accelerator=contact.hardware.accelerator,
        checkpoint_local_storage=len(job.cluster.hosts) > 1,
        nvme_subfolder=run_id,
    )
    return render_deepspeed(job.preset, overrides_layer(job.spec.deepspeed), model=job.model, wanted=wanted)


def _scratch(rendered: Rendered) -> tuple[str, ...]:
    """DeepSpeed leaves its swap files behind."""
    zero = rendered.config.get("zero_optimization", {})
    blocks = [zero.get(key) or {} for key in ("offload_optimizer", "offload_param")]
    return tuple(sorted({block["nvme_path"] for block in blocks if block.get("device") == "nvme"}))


def _folders(job: Job, contact: Contact, run_id: str) -> tuple[HostDir, dict[str, str]]:
    """One path for all hosts; where their working folders differ it is a link that each host resolves its own way."""
    own = {name: str(PurePosixPath(contact.facts[name].node_dir) / "runs" / run_id) for name in job.cluster.names}
    paths = set(own.values())
    common = paths.pop() if len(paths) == 1 else f"/tmp/.llmtrain-{run_id}"  # noqa: S108  made by us, refused if there
    return HostDir(path=PurePosixPath(common)), own


def _meeting_point(job: Job, contact: Contact) -> tuple[str, int, tuple[Choice, ...]]:
    first = job.cluster.names[0]
    address = job.selection.master_addr or contact.network.links[first].address
    port = job.selection.master_port
    free = contact.facts[first].free_ports
    if port is None and not free:
        raise PreflightError("no free port for the ranks to meet on", where=first, fix="set ports: to another range")
    return (
        address,
        port or free[0],
        (
            Choice(key="network", value=contact.network.links[first].interface, reason=contact.network.reason),
            Choice(
                key="master",
                value=f"{address}:{port or free[0]}",
                reason="as asked" if port else f"a port nobody listens on, on host 0 ({first})",
            ),
        ),
    )


def _run(job: Job, contact: Contact, rendered: Rendered, run_id: str, run_dir: HostDir) -> dict[str, Any]:
    spec = job.spec
    training = spec.training.model_dump()
    if training["max_steps"] is None and training["epochs"] is None:
        training["epochs"] = 1.0
    return {
        "schema": 1,
        "run_id": run_id,
        "run_dir": str(run_dir),
        "world_size": job.cluster.world_size,
        "task": "finetune",
        "model": {
            "path": str(job.model.path),
            "dtype": contact.hardware.dtype,
            "attention": contact.hardware.attention,
            "trust_remote_code": spec.model.trust_remote_code,
        },
        "data": {
            "path": job.data.path,
            "format": job.data.format,
            "max_length": min(spec.data.max_length, job.model.max_position or spec.data.max_length),
            "packing": False,
            "eval": spec.data.eval,
            "chat_template": run_dir / "template.jinja" if job.template_text is not None else spec.data.chat_template,
        },
        "batch": {
            "global": rendered.batch.global_,
            "micro": rendered.batch.micro,
            "accumulation": rendered.batch.accumulation,
        },
        "training": training,
        "deepspeed": rendered.config,
        "output": run_dir / "output",
        "checkpoints": run_dir / "checkpoints",
        "grace_s": GRACE_S,
    }


def _plan_host(
    job: Job, contact: Contact, host: Host, run: Mapping[str, Any], run_dir: HostDir, own_dir: str
) -> HostPlan:
    facts = contact.facts[host.name]
    link = contact.network.links[host.name]
    python = job.python_on(host.name)
    threads, cores = choose_cores(facts.cpus, len(host.slots))
    env = rank_env(
        job.spec,
        facts,
        interface=link.interface,
        threads=threads,
        hardware=contact.hardware,
        run_id=str(run["run_id"]),
    )
    ranks = job.cluster.ranks_of(host.name)
    own_run = {
        **run,
        "host": host.name,
        "ranks": list(ranks),
        "threads": int(env["OMP_NUM_THREADS"]) if env["OMP_NUM_THREADS"].isdigit() else threads,
        "cores": {str(local): list(ids) for local, ids in cores.items()},
    }
    files = [
        HostFile(path="run.json", text=json.dumps(own_run, indent=2) + "\n"),
        HostFile(path="env.json", text=json.dumps(_env_request(env, python))),
        HostFile(path="bin/python", text=render_stand_in(run_dir, python, job.spec.setup), mode=0o700),
    ]
    if job.template_text is not None:
        files.append(HostFile(path="template.jinja", text=job.template_text))
    return HostPlan(
        name=host.name,
        slots=host.slots,
        ranks=ranks,
        python=python,
        interface=link.interface,
        address=link.address,
        own_dir=own_dir,
        files=tuple(files),
        env=env,
    )


def _env_request(env: Mapping[str, str], python: str) -> dict[str, Any]:
    return {"keep": list(KEPT_ENV), "set": dict(env), "path": [str(PurePosixPath(python).parent)]}


def render_stand_in(run_dir: HostDir, python: str, setup: tuple[str, ...]) -> str:
    """The shell script that stands in for the interpreter in DeepSpeed's command line.

    One path on all hosts, although interpreters, setup lines and environments differ; and DeepSpeed's own
    ``pkill -f`` pattern, made of this path, can match no process of another run.
    """
    folder = shlex.quote(str(run_dir))
    # In UTF-8 mode, since values must arrive byte for byte whatever the host's locale.
    start = shlex.join([python, "-I", "-X", "utf8", run_dir / "code/llmtrain/train/bootstrap.py", str(run_dir), python])
    lines = ["#!/bin/bash" if setup else "#!/bin/sh", f"cd {folder} || exit 97"]
    if setup:
        lines += ["export LLMTRAIN_BEFORE_SETUP=$(env -0 | base64 -w0)", "set -e", *setup, "set +e"]
    return "\n".join([*lines, f'exec {start} "$@"', ""])


def _runner_argv(job: Job, run_dir: HostDir, address: str, port: int) -> tuple[str, ...]:
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
        run_dir / "code/llmtrain/train/entry.py",
        run_dir / "run.json",
    )


def _runner_env(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        **{name: environ[name] for name in RUNNER_ENV if name in environ},
        "PDSH_RCMD_TYPE": "ssh",
        # pdsh splits this at spaces and replaces %h, and the user's folder may be called anything.
        "PDSH_SSH_ARGS_APPEND": "-F {link}/ssh_config",
        "DS_ENV_FILE": "{run}/ds_env",
        # The runner itself computes nothing; without this it would look for accelerators on the head.
        "DS_ACCELERATOR": "cpu",
    }


def _general_choices(job: Job, contact: Contact, run: Mapping[str, Any]) -> tuple[Choice, ...]:
    host = job.cluster.hosts[0]
    threads, cores = choose_cores(contact.facts[host.name].cpus, len(host.slots))
    cpus = len(contact.facts[host.name].cpus)
    bound = "each rank bound to its share" if cores else "more ranks than processors, so none is bound"
    chosen = [
        Choice(key="threads", value=threads, reason=f"{cpus} processors for {len(host.slots)} ranks; {bound}"),
        Choice(key="data.format", value=run["data"]["format"], reason=f"{job.data.examples} examples recognised"),
    ]
    if run["data"]["max_length"] != job.spec.data.max_length:
        reason = "the longest the model was made for"
        chosen.append(Choice(key="data.max_length", value=run["data"]["max_length"], reason=reason))
    if job.spec.training.max_steps is not None and job.spec.training.epochs is not None:
        reason = "max_steps wins over epochs"
        chosen.append(Choice(key="training.max_steps", value=job.spec.training.max_steps, reason=reason))
    return tuple(chosen)
