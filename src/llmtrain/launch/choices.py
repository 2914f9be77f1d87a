"""What the run file leaves open, chosen from the hosts' facts. Pure; each choice with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from llmtrain.cluster.probes import ops_folder
from llmtrain.errors import PreflightError
from llmtrain.spec.choice import Choice
from llmtrain.spec.runspec import parse_rate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmtrain.cluster.probes import Facts
    from llmtrain.launch.contact import Contact
    from llmtrain.launch.job import Job
    from llmtrain.spec.runspec import RunSpec

COPY_SHARE = 10
"""Copies of checkpoints take one part in so many of the link that the ranks talk over."""
ASSUMED_MBITS = 1000
"""Speed of a link whose driver tells none."""
Dtype = Literal["bf16", "fp16", "fp32"]

RANK_ENV: tuple[tuple[str, str, str], ...] = (
    ("TOKENIZERS_PARALLELISM", "false", "loader processes are forked"),
    ("HF_HUB_OFFLINE", "1", "everything is on the hosts; no rank may download"),
    ("HF_DATASETS_OFFLINE", "1", "the same for data"),
    ("WANDB_MODE", "disabled", "trackers are off unless asked for"),
    ("NCCL_DEBUG", "WARN", "errors without the flood"),
    ("PYTHONUTF8", "1", "hosts differ in their locale"),
    ("LC_ALL", "C.UTF-8", "hosts differ in their locale"),
    ("PYTHONUNBUFFERED", "1", "the log shows what happened last"),
    ("PYTHONNOUSERSITE", "1", "packages in a home folder would differ between hosts"),
)
"""Name, value and reason of the variables every rank is given; the run file's ``env`` wins."""

KEPT_ENV = (
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "TMPDIR",
    "PATH",
    "LD_LIBRARY_PATH",
    "CUDA_HOME",
    "CUDA_PATH",
    "XDG_CACHE_HOME",
    "HF_HOME",
)
"""The allow-list: what a rank keeps of its login's environment; all else is dropped."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What the ranks compute on."""

    accelerator: Literal["cuda", "cpu"]
    """DeepSpeed's name for it."""
    dtype: Dtype
    """Precision of the computation."""
    attention: str
    """Attention kernel, by its transformers name."""


def choose_hardware(
    spec: RunSpec, facts: Sequence[Facts], *, flash_imports: bool
) -> tuple[Hardware, tuple[Choice, ...]]:
    """Accelerator, precision and attention.

    Raises:
        PreflightError: some hosts have accelerators and some have none, or only ones of another make.
    """
    accelerator, first = _accelerator(spec, facts)
    dtype, second = _dtype(spec, facts, accelerator)
    attention, third = _attention(spec, accelerator, flash_imports=flash_imports)
    return Hardware(accelerator=accelerator, dtype=dtype, attention=attention), (first, second, third)


def _accelerator(spec: RunSpec, facts: Sequence[Facts]) -> tuple[Literal["cuda", "cpu"], Choice]:
    asked = spec.env.get("DS_ACCELERATOR")
    if asked in {"cpu", "cuda"}:
        return asked, Choice(key="accelerator", value=asked, reason="env.DS_ACCELERATOR says so")  # type: ignore[return-value]
    without = [item for item in facts if not item.accelerators]
    if not without:
        name = facts[0].accelerators[0].get("name") or "NVIDIA GPU"
        return "cuda", Choice(key="accelerator", value="cuda", reason=f"every host has one ({name})")
    if len(without) < len(facts):
        raise PreflightError(
            "no accelerator here, while other hosts have some",
            where=without[0].host,
            fix="repair its driver (nvidia-smi), or leave the host out with --exclude",
        )
    odd = next((item for item in facts if item.other_accelerators), None)
    if odd is not None:
        raise PreflightError(
            f"an accelerator of another make ({', '.join(odd.other_accelerators)}), which llmtrain is not tested on",
            where=odd.host,
            fix="to train on the processors of the hosts instead: --env DS_ACCELERATOR=cpu",
        )
    return "cpu", Choice(key="accelerator", value="cpu", reason="no host has an NVIDIA GPU: training on processors")


def _dtype(spec: RunSpec, facts: Sequence[Facts], accelerator: str) -> tuple[Dtype, Choice]:
    if spec.model.dtype != "auto":
        return spec.model.dtype, Choice(key="model.dtype", value=spec.model.dtype, reason="as asked")
    old = [
        gpu.get("name") or "GPU"
        for item in facts
        for gpu in item.accelerators
        if gpu.get("compute_cap") and float(gpu["compute_cap"] or 0) < 8.0
    ]
    if accelerator == "cuda" and old:
        return "fp16", Choice(key="model.dtype", value="fp16", reason=f"{old[0]} came before Ampere and has no bf16")
    return "bf16", Choice(key="model.dtype", value="bf16", reason="the range of fp32, so no loss scaling")


def _attention(spec: RunSpec, accelerator: str, *, flash_imports: bool) -> tuple[str, Choice]:
    asked = spec.model.attention
    if asked != "auto":
        return asked, Choice(key="model.attention", value=asked, reason="as asked")
    if accelerator == "cuda" and flash_imports:
        return "flash_attention_2", Choice(
            key="model.attention", value="flash_attention_2", reason="flash_attn imports on every host"
        )
    return "sdpa", Choice(key="model.attention", value="sdpa", reason="flash_attn does not import on every host")


def choose_cores(cpus: Sequence[int], slots: int) -> tuple[int, dict[int, tuple[int, ...]]]:
    """Threads per rank, and the processors each local rank is bound to.

    Equal, consecutive shares keep a rank on one socket where slots divide the sockets; with more slots than
    processors nothing is bound.
    """
    share = len(cpus) // slots
    if share < 1:
        return 1, {}
    return share, {local: tuple(cpus[local * share : (local + 1) * share]) for local in range(slots)}


def rank_env(
    spec: RunSpec, facts: Facts, *, interface: str, threads: int, hardware: Hardware, run_id: str
) -> dict[str, str]:
    """Everything a rank's environment is given on one host, the user's values last.

    Args:
        spec: the run.
        facts: the host's.
        interface: the one its traffic takes.
        threads: threads of a rank.
        hardware: what it computes on.
        run_id: the mark that every process of the run carries.
    """
    ops = ops_folder(facts)
    own = {
        **{name: value for name, value, _ in RANK_ENV},
        "LLMTRAIN_RUN_ID": run_id,
        # NCCL matches prefixes unless told otherwise: eth1 would also mean eth10.
        "NCCL_SOCKET_IFNAME": f"={interface}",
        "GLOO_SOCKET_IFNAME": interface,
        "OMP_NUM_THREADS": str(threads),
        "TORCH_EXTENSIONS_DIR": ops,
        # Else in /tmp, under a name that anybody on the host can take first.
        "TORCHINDUCTOR_CACHE_DIR": f"{ops}/inductor",
    }
    if hardware.accelerator == "cpu":
        own["DS_ACCELERATOR"] = "cpu"
    return {**own, **spec.env}


def choose_copies(job: Job, contact: Contact) -> tuple[float | None, Choice | None]:
    """Bytes a second that leave each host for copies of its checkpoints; None for no copies. And why.

    Whether hosts share a disk is seen when they have saved.
    """
    spec = job.spec
    saves = spec.training.save_steps or spec.checkpoint.save_minutes
    if len(job.cluster.hosts) < 2 or job.script is not None or not saves or spec.checkpoint.copies == "never":
        return None, None
    if spec.checkpoint.copy_rate:
        rate, reason = parse_rate(spec.checkpoint.copy_rate), "as asked"
    else:
        speeds = [_speed(contact.facts[name], link.interface) for name, link in contact.network.links.items()]
        known = [speed for speed in speeds if speed]
        mbits = min(known) if known else ASSUMED_MBITS
        rate = mbits * 1e6 / 8 / COPY_SHARE
        reason = f"a tenth of {mbits} Mbit/s, {'the slowest link' if known else 'assumed: no driver tells its speed'}"
    text = f"to the next host, at most {rate / 1e6:.1f} MB/s"
    return rate, Choice(key="checkpoint copies", value=text, reason=reason)


def _speed(facts: Facts, interface: str) -> int | None:
    return next((one.speed_mbits for one in facts.interfaces if one.name == interface), None)


def general_choices(job: Job, contact: Contact, run: Mapping[str, Any]) -> tuple[Choice, ...]:
    """What is neither about networks nor DeepSpeed's configuration."""
    host = job.cluster.hosts[0]
    threads, cores = choose_cores(contact.facts[host.name].cpus, len(host.slots))
    cpus = len(contact.facts[host.name].cpus)
    bound = "each rank bound to its share" if cores else "more ranks than processors, so none is bound"
    chosen = [
        Choice(key="threads", value=threads, reason=f"{cpus} processors for {len(host.slots)} ranks; {bound}"),
    ]
    if job.data is not None:
        reason = f"{job.data.examples} examples recognised"
        chosen.append(Choice(key="data.format", value=run["data"]["format"], reason=reason))
    if job.script is not None:
        return (*chosen, *_script_choices(job))
    if job.tokenized:
        chosen.append(Choice(key="data.tokenized", value=job.tokenized, reason="made by llmtrain data from this data"))
    if job.spec.data.packing:
        reason = "as asked; the batch counts rows, and the loaded model must prove that examples do not mix"
        chosen.append(Choice(key="data.packing", value=True, reason=reason))
    if run["lora"]:
        lora = run["lora"]
        which = ", ".join(lora["targets"]) or "all linear layers but the output"
        reason = f"alpha {lora['alpha']:g}; on {which}; learning rate {run['training']['learning_rate']:g}"
        chosen.append(Choice(key="lora.rank", value=lora["rank"], reason=reason))
    if run["data"]["max_length"] != job.spec.data.max_length:
        reason = "the longest the model was made for"
        chosen.append(Choice(key="data.max_length", value=run["data"]["max_length"], reason=reason))
    if job.spec.training.max_steps is not None and job.spec.training.epochs is not None:
        reason = "max_steps wins over epochs"
        chosen.append(Choice(key="training.max_steps", value=job.spec.training.max_steps, reason=reason))
    return tuple(chosen)


def _script_choices(job: Job) -> list[Choice]:
    script = job.script
    if script is None:
        return []
    how = {"file": "a file", "module": "a module", "console": "a command of the environment"}[script.kind]
    connect = "" if script.kind == "file" else ", started once the ranks are connected"
    sent = str(job.code) if job.code else "nothing is sent: --code DIR would"
    return [
        Choice(key="script", value=str(script), reason=f"{how} of yours{connect}; {len(script.args)} arguments"),
        Choice(key="code", value=script.code, reason=f"{sent}; .gitignore is respected"),
    ]
