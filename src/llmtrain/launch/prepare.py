"""Plan a launch: from what is known to every file's text and one command. Pure.

A dry run prints a :class:`LaunchPlan` and a real run executes it, so that what is shown is what happens.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from llmtrain.cluster.checks.files import is_missing, lacking_trees
from llmtrain.cluster.sshconfig import render_ssh_config
from llmtrain.errors import PreflightError
from llmtrain.launch.asking import DEFAULT_PORTS
from llmtrain.launch.choices import KEPT_ENV, choose_copies, choose_cores, general_choices, rank_env
from llmtrain.launch.command import NODE_RANK, choose_launcher, render_command, runner_env
from llmtrain.launch.document import make_document
from llmtrain.launch.render import assume
from llmtrain.launch.rundir import HostDir, RunDir
from llmtrain.launch.verdict import SETUP_FAILED
from llmtrain.spec.choice import Choice
from llmtrain.spec.dsconfig import Rendered, render_deepspeed
from llmtrain.spec.hostfile import render_hostfile
from llmtrain.spec.presets import overrides_layer
from llmtrain.spec.runspec import parse_ports, parse_rate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmtrain.cluster.probes import Facts
    from llmtrain.launch.contact import Contact
    from llmtrain.launch.job import Job
    from llmtrain.spec.codetree import CodeTree
    from llmtrain.spec.hostfile import Host
    from llmtrain.spec.runspec import StallPart


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
    locks: tuple[str, ...] = ()
    """Accelerators that only one run at a time may use; processors are shared."""


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
    """(host, path) of the model and data files that are missing there, or differ, and are copied from here first."""
    replaced: tuple[tuple[str, str], ...]
    """Those of them that replace something, which asks first."""
    ports: tuple[int, int]
    """Range in which hosts listen while they get copies."""
    rate: float | None
    """Bytes per second that leave here for copies; None for no limit."""
    copy_rate: float | None
    """Bytes per second that leave each host for the copy of its checkpoints on the next host; None for no copies."""
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
    launcher: str
    """``pdsh``, or ``ssh`` for DeepSpeed's launcher on each host over our own connections."""
    runner_argv: tuple[str, ...]
    """The command; ``{run}`` stands for the run folder on the head until it exists, ``{link}`` for the link to it.
    With ``ssh`` it runs on each host, with the host's number for ``{node_rank}``."""
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
    lease_s: float
    """Seconds a host goes on without a sign from the head."""
    save_deadline_s: float
    """Seconds that a save before a stop may take."""
    stall: StallPart
    """When a run counts as standing still."""
    code: CodeTree | None = None
    """The user's code that is sent along."""

    @property
    def own_script(self) -> bool:
        """Whether a program of the user's runs instead of our fine-tune."""
        return bool(self.run["task"] == "script")

    def node_argv(self, number: int) -> tuple[str, ...]:
        """The command of the ssh launcher on one host."""
        return tuple(part.replace(NODE_RANK, str(number)) for part in self.runner_argv)

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


def plan_launch(
    job: Job, contact: Contact, run_id: str, environ: Mapping[str, str], *, missing: Sequence[str] = ()
) -> LaunchPlan:
    """Everything a launch will write and run.

    Args:
        job: what the head knows.
        contact: what the hosts said.
        run_id: name of the run.
        environ: our own environment.
        missing: which of deepspeed, torch and pdsh this machine lacks.

    Raises:
        InputFileError: DeepSpeed's configuration does not fit the run.
        PreflightError: no port is free on host 0, or the launcher asked for cannot work here.
        UsageError: an argument of the user's program names something that is not given.
    """
    rendered = _render(job, contact, run_id)
    run_dir, own_dirs = _folders(job, contact, run_id)
    address, port, meeting = _meeting_point(job, contact)
    launcher = choose_launcher(job.spec.launcher, local=job.local, missing=missing)
    copy_rate, copying = choose_copies(job, contact)
    run = make_document(job, contact, rendered, run_id, run_dir)
    shared = _shared_files(job, rendered)
    copies = () if job.local else tuple(lacking_trees(contact.facts, job.bring, contact.trees))
    hosts = tuple(
        _plan_host(job, contact, host, run, run_dir, own_dirs[host.name], shared) for host in job.cluster.hosts
    )
    return LaunchPlan(
        run_id=run_id,
        world_size=job.cluster.world_size,
        hosts=hosts,
        copies=copies,
        replaced=tuple((host, path) for host, path in copies if not is_missing(contact.facts[host], path)),
        ports=parse_ports(job.spec.ports) if job.spec.ports else DEFAULT_PORTS,
        rate=parse_rate(job.spec.sync.rate) if job.spec.sync.rate else None,
        copy_rate=copy_rate,
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
        launcher=launcher.value,
        runner_argv=render_command(job, run_dir, address=address, port=port, launcher=launcher.value),
        runner_env=runner_env(environ),
        choices=(
            launcher,
            *contact.choices,
            *meeting,
            *general_choices(job, contact, run),
            *filter(None, (copying,)),
            *rendered.choices,
        ),
        run=run,
        scratch=_scratch(rendered),
        private_env=frozenset(job.spec.env),
        lease_s=job.spec.lease,
        save_deadline_s=job.spec.save_deadline,
        stall=job.spec.stall,
        code=job.code,
    )


def _render(job: Job, contact: Contact, run_id: str) -> Rendered:
    wanted = replace(
        assume(job.spec, job.cluster.world_size, job.script),
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


def _shared_files(job: Job, rendered: Rendered) -> list[HostFile]:
    """Files that are the same on every host."""
    files = []
    if job.template_text is not None:
        files.append(HostFile(path="template.jinja", text=job.template_text))
    if job.script is not None:
        texts = {"ds_config.json": rendered.template, "ds_config_resolved.json": rendered.config}
        files += [HostFile(path=name, text=json.dumps(text, indent=2) + "\n") for name, text in texts.items()]
    return files


def _plan_host(
    job: Job,
    contact: Contact,
    host: Host,
    run: Mapping[str, Any],
    run_dir: HostDir,
    own_dir: str,
    shared: Sequence[HostFile],
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
        HostFile(path="bin/python", text=render_stand_in(run_dir, host.name, python, job.spec.setup), mode=0o700),
    ]
    files.extend(shared)
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
        locks=_locks_of(facts, host.slots) if contact.hardware.accelerator == "cuda" else (),
    )


def _locks_of(facts: Facts, slots: Sequence[int]) -> tuple[str, ...]:
    """Names by which every user of a host knows its accelerators."""
    uuids = {str(gpu.get("index")): gpu.get("uuid") for gpu in facts.accelerators}
    return tuple(uuids.get(str(slot)) or f"slot-{slot}" for slot in slots)


def _env_request(env: Mapping[str, str], python: str) -> dict[str, Any]:
    return {"keep": list(KEPT_ENV), "set": dict(env), "path": [str(PurePosixPath(python).parent)]}


def render_stand_in(run_dir: HostDir, host: str, python: str, setup: tuple[str, ...]) -> str:
    """The shell script that stands in for the interpreter in DeepSpeed's command line.

    One path on all hosts, although interpreters, setup lines and environments differ; and DeepSpeed's own
    ``pkill -f`` pattern, made of this path, can match no process of another run.
    """
    folder = shlex.quote(str(run_dir))
    # In UTF-8 mode, since values must arrive byte for byte whatever the host's locale.
    start = shlex.join([python, "-I", "-X", "utf8", run_dir / "code/llmtrain/train/bootstrap.py", str(run_dir), python])
    lines = ["#!/bin/bash" if setup else "#!/bin/sh", f"cd {folder} || exit 97"]
    if setup:
        # Said by the script itself: pdsh tells only that some host ended with some code.
        trap = f"trap 'code=$?; echo \"{SETUP_FAILED} {host} with exit code $code\" >&2; exit $code' EXIT"
        before = "export LLMTRAIN_BEFORE_SETUP=$(env -0 | base64 -w0)"
        lines += [before, trap, "set -e", *setup, "set +e", "trap - EXIT"]
    return "\n".join([*lines, f'exec {start} "$@"', ""])
