"""Everything about a run that is known on the head before a host is touched."""

from __future__ import annotations

import ipaddress
import socket
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.errors import InputFileError, UsageError
from llmtrain.launch.render import assume
from llmtrain.launch.tokens import find_set
from llmtrain.spec.codetree import CodeTree, read_code
from llmtrain.spec.dataset import DataReport, read_dataset
from llmtrain.spec.dsconfig import render_deepspeed
from llmtrain.spec.hostfile import Cluster, is_loopback_name, read_hostfile, select
from llmtrain.spec.modelinfo import ModelInfo, read_model
from llmtrain.spec.presets import Layer, overrides_layer, read_config
from llmtrain.spec.source import Source, resolve_source
from llmtrain.spec.templates import refuse_unknown
from llmtrain.spec.yamlfile import read_text

if TYPE_CHECKING:
    from llmtrain.spec.runspec import Bring, RunSpec
    from llmtrain.spec.script import Script


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which hosts, and where ranks meet, as options of the command line say."""

    include: str | None = None
    """``--include``."""
    exclude: str | None = None
    """``--exclude``."""
    num_hosts: int | None = None
    """``--num-hosts``."""
    master_addr: str | None = None
    """``--master-addr``."""
    master_port: int | None = None
    """``--master-port``."""
    skip_checks: frozenset[str] = frozenset()
    """``--skip-check``: failures that do not stop the launch."""
    wait: bool = False
    """``--wait``: queue for accelerators that another run holds."""
    run_file: str | None = None
    """The run file; a resumed run reads its variables again, since their values are kept nowhere."""


@dataclass(frozen=True, kw_only=True)
class Material:
    """What is learned, and the model whose tokens it becomes; read and found good."""

    model: ModelInfo
    """The model."""
    files: tuple[tuple[Source, DataReport], ...]
    """Training files and what they hold."""
    held_out: DataReport | None
    """The evaluation file, if there is one."""
    template_text: str | None
    """Chat template read from the user's file."""
    max_length: int
    """Tokens of an example beyond which it is cut: as asked, or as the model was made for."""

    @property
    def format(self) -> str:
        """Name of the format, ``mixed`` for several."""
        formats = {report.format for _, report in self.files}
        return formats.pop() if len(formats) == 1 else "mixed"

    @property
    def total(self) -> DataReport:
        """All training files as one."""
        reports = [report for _, report in self.files]
        return replace(
            reports[0],
            format=self.format,
            examples=sum(report.examples for report in reports),
            bytes=sum(report.bytes for report in reports),
        )


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run whose files on the head have been read and found good."""

    spec: RunSpec
    """What the user wants."""
    cluster: Cluster
    """Selected hosts and slots, in rank order."""
    selection: Selection
    """Options about hosts."""
    preset: Layer
    """DeepSpeed keys of ``--config``."""
    model: ModelInfo | None
    """The model on the head; only a user's program goes without."""
    data: DataReport | None
    """The data on the head; None where a user's program reads them, in a form of its own or none."""
    sources: tuple[Source, ...]
    """Where the examples come from; none for a user's program."""
    template_text: str | None
    """Chat template read from the user's file."""
    tokenized: str | None
    """Folder of the data as ``llmtrain data`` tokenized them, which hosts get instead."""
    local: bool
    """The only host is this machine: no SSH is needed."""
    script: Script | None = None
    """A program of the user's that runs instead of our fine-tune."""
    code: CodeTree | None = None
    """Its files."""

    @property
    def trees(self) -> tuple[str, ...]:
        """Paths every host must have."""
        return tuple(self.bring)

    @property
    def bring(self) -> dict[str, Bring]:
        """Path every host must have -> what is done where it is missing or differs."""
        sync, held_out = self.spec.sync, self.spec.data.eval
        model = [str(self.model.path)] if self.model else []
        data = [source.path for source in self.sources]
        if self.script is not None and self.spec.data.path is not None:
            data.append(self.spec.data.path)
        if isinstance(held_out, str):
            data.append(held_out)
        if self.tokenized:
            data = [self.tokenized]
        kinds: list[tuple[list[str], Bring]] = [(model, sync.model), (data, sync.data), ([*sync.paths], "same")]
        return {path: mode for paths, mode in reversed(kinds) for path in paths}

    def python_on(self, host: str) -> str:
        """The interpreter on a host."""
        return python_on(self.spec, host)


def python_on(spec: RunSpec, host: str) -> str:
    """The interpreter the ranks use on a host: its own, the environment's, the named one, else ours."""
    own = spec.per_host.get(host)
    if own and own.python:
        return own.python
    if spec.environment:
        return f"{spec.environment}/bin/python"
    return spec.python or sys.executable


def read_job(spec: RunSpec, selection: Selection, script: Script | None = None) -> Job:
    """Read hostfile, preset, model and data.

    A user's program needs neither model nor data; both are sent to the hosts if they are given.

    Raises:
        UsageError: something needed is missing.
        InputFileError: a file cannot be used.
    """
    hosts = _need(spec.hosts, "--hosts HOSTFILE", "hosts")
    config = _need(spec.config, "--config PRESET_OR_FILE", "config")
    if script is None:
        _need(spec.model.path, "--model DIR", "model.path")
        if not spec.data.mix:
            _need(spec.data.path, "--data PATH", "data.path")
    cluster = select(
        read_hostfile(hosts), include=selection.include, exclude=selection.exclude, num_hosts=selection.num_hosts
    )
    _check_per_host(spec, cluster)
    preset = read_config(config)
    model = read_model(spec.model.path) if spec.model.path else None
    # Rendered again once the hosts have said what they are; a fault of the configuration need not wait for them.
    wanted = assume(spec, cluster.world_size, script)
    render_deepspeed(preset, overrides_layer(spec.deepspeed), model=model, wanted=wanted)
    material = read_material(spec, model) if script is None and model is not None else None
    if script is not None and spec.data.path and not Path(spec.data.path).exists():
        raise InputFileError("the data does not exist", where=spec.data.path, fix="correct --data")
    for path in spec.sync.paths:
        if not Path(path).exists():
            raise InputFileError("it does not exist", where=path, fix="correct sync.paths")
    return Job(
        spec=spec,
        cluster=cluster,
        selection=selection,
        preset=preset,
        model=model,
        data=material.total if material else None,
        sources=tuple(source for source, _ in material.files) if material else (),
        tokenized=find_set(spec, material) if material else None,
        template_text=material.template_text if material else None,
        local=is_local(cluster),
        script=script,
        code=read_code(script.code) if script and script.code else None,
    )


def read_material(spec: RunSpec, model: ModelInfo) -> Material:
    """Every data file read once; what it holds is named, so that the ranks need not recognise it again.

    Raises:
        UsageError: ``data.path`` and ``data.mix`` are both given.
        InputFileError: a file cannot be used, or a template is unknown.
    """
    if spec.data.mix and spec.data.path:
        raise UsageError("data.path and data.mix are both given", where="data", fix="keep one of them")
    named = [(item.path, item.format, item.weight) for item in spec.data.mix]
    asked = named or [(spec.data.path or "", spec.data.format, 1.0)]
    sources = [resolve_source(path, kind, weight) for path, kind, weight in asked]
    reports = [read_dataset(source) for source in sources]
    held_out = None
    if isinstance(spec.data.eval, str):
        held_out = read_dataset(spec.data.eval, format=reports[0].format if len(reports) == 1 else "auto")
    known = [replace(source, format=report.format) for source, report in zip(sources, reports, strict=True)]
    return Material(
        model=model,
        files=tuple(zip(known, reports, strict=True)),
        held_out=held_out,
        template_text=_template_text(spec),
        max_length=min(spec.data.max_length, model.max_position or spec.data.max_length),
    )


def _need(value: str | None, option: str, key: str) -> str:
    if value is None:
        raise UsageError(
            f"{option} is missing, and no run file gives {key}",
            where="command line",
            fix=f"add {option}, or write {key.replace('.', ': ')} into llmtrain.yaml",
        )
    return value


def _check_per_host(spec: RunSpec, cluster: Cluster) -> None:
    unknown = [name for name in spec.per_host if name not in cluster.names]
    known_in_file = set(read_hostfile(cluster.origin).names)
    for name in unknown:
        if name not in known_in_file:
            raise InputFileError(
                f"per_host names {name}, which is not in the hostfile",
                where=cluster.origin,
                fix=f"use one of: {', '.join(cluster.names[:8])}",
            )


def _template_text(spec: RunSpec) -> str | None:
    """A template named by a path is read here and travels with the run; a bare word is the name of a built-in one."""
    name = spec.data.chat_template
    if name is None:
        return None
    if "/" not in name and not Path(name).is_file():
        refuse_unknown(name)
        return None
    return read_text(Path(name).expanduser(), what="chat template")


def is_local(cluster: Cluster) -> bool:
    """Whether the only host is this machine under any of its names."""
    if len(cluster.hosts) != 1:
        return False
    name = cluster.names[0]
    if is_loopback_name(name) or name.lower() in {socket.gethostname().lower(), socket.getfqdn().lower()}:
        return True
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return False
    return ipaddress.IPv4Address(address).is_loopback or _is_own(address)


def _is_own(address: str) -> bool:
    """An address is ours if a socket may be bound to it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.bind((address, 0))
        except OSError:
            return False
    return True
