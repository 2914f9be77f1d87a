"""What is asked of each host, for ``launch`` and ``check`` alike."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmtrain.cluster.needs import PACKAGES, SCRIPT_PACKAGES, Needs
from llmtrain.cluster.probes import FactsRequest
from llmtrain.launch.job import python_on
from llmtrain.launch.render import assume
from llmtrain.spec.dsconfig import render_deepspeed
from llmtrain.spec.presets import overrides_layer
from llmtrain.spec.runspec import parse_ports

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmtrain.cluster.probes import Facts
    from llmtrain.launch.job import Job
    from llmtrain.spec.runspec import RunSpec

DEFAULT_PORTS = (20000, 29999)
"""Below the range the kernel gives to outgoing connections, so that a free port stays free until it is used."""
ADAM_BYTES = 12
"""Bytes per parameter of the optimizer on a processor: an fp32 copy and two moments."""
_ROOM = 256 << 20


def facts_request(spec: RunSpec, host: str, trees: Sequence[str], *, deep: bool = False) -> FactsRequest:
    """The question to one host."""
    own = spec.per_host.get(host)
    return FactsRequest(
        python=python_on(spec, host),
        node_dir=(own.node_dir if own else None) or spec.node_dir,
        ports=parse_ports(spec.ports) if spec.ports else DEFAULT_PORTS,
        trees=tuple(trees),
        deep=deep,
    )


def wanted_network(spec: RunSpec, host: str) -> str | None:
    """Subnet or interface the user asks for on a host."""
    own = spec.per_host.get(host)
    return (own.network if own else None) or spec.network


def needs_of(job: Job, facts: Mapping[str, Facts], trees: Mapping[str, Mapping[str, Any]]) -> Needs:
    """What the run needs, as far as it is certain before anything is chosen.

    Args:
        job: the run.
        facts: hosts that answered.
        trees: digests of model and data here.
    """
    config, cuda = assume_config(job, facts)
    lora = job.spec.lora.rank is not None
    parameters = job.model.parameters if job.model and job.script is None and not lora else 0
    share = ADAM_BYTES * parameters // job.cluster.world_size
    held = share if not cuda or _offload_device(config) == "cpu" else 0
    return Needs(
        trees=trees,
        bring=job.bring,
        free_bytes=_space(job),
        memory_bytes={host.name: held * len(host.slots) for host in job.cluster.hosts},
        ops=ops_of(config, cuda=cuda),
        cuda=cuda,
        bf16=job.spec.model.dtype == "bf16",
        packages=(*PACKAGES, *(() if not lora else ("peft",))) if job.script is None else SCRIPT_PACKAGES,
    )


def assume_config(job: Job, facts: Mapping[str, Facts]) -> tuple[Mapping[str, Any], bool]:
    """DeepSpeed's configuration before anything is chosen, and whether the ranks compute on NVIDIA GPUs."""
    cuda = _computes_on_gpus(job.spec, facts)
    wanted = replace(assume(job.spec, job.cluster.world_size, job.script), accelerator="cuda" if cuda else "cpu")
    rendered = render_deepspeed(job.preset, overrides_layer(job.spec.deepspeed), model=job.model, wanted=wanted)
    return rendered.config, cuda


def _space(job: Job) -> int:
    """The tuned model, and what is copied where it is missing, with a little room."""
    model = job.model.weight_bytes if job.model else 0
    return 2 * model + (job.data.bytes if job.data else 0) + (job.code.bytes if job.code else 0) + _ROOM


def _computes_on_gpus(spec: RunSpec, facts: Mapping[str, Facts]) -> bool:
    asked = spec.env.get("DS_ACCELERATOR")
    return asked == "cuda" if asked else any(item.accelerators for item in facts.values())


def ops_of(config: Mapping[str, Any], *, cuda: bool) -> tuple[str, ...]:
    """DeepSpeed's operations that a configuration compiles on first use."""
    zero = config.get("zero_optimization") or {}
    devices = {(zero.get(key) or {}).get("device") for key in ("offload_optimizer", "offload_param")}
    kind = str((config.get("optimizer") or {}).get("type", "")).lower()
    offloaded = _offload_device(config) in {"cpu", "nvme"}
    wanted = {
        "cpu_adam": offloaded and kind in {"", "adam", "adamw"},
        "async_io": "nvme" in devices,
        "fused_adam": cuda and not offloaded and kind in {"adam", "adamw"},
        "deepspeed_shm_comm": not cuda,
    }
    return tuple(name for name, needed in wanted.items() if needed)


def _offload_device(config: Mapping[str, Any]) -> str | None:
    zero = config.get("zero_optimization") or {}
    device: str | None = (zero.get("offload_optimizer") or {}).get("device")
    return device
