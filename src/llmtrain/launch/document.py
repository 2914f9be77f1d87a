"""What the ranks read: run.json, and for a user's program its arguments with every path filled in. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmtrain.launch.choices import choose_copies
from llmtrain.spec.script import fill_args

if TYPE_CHECKING:
    from llmtrain.launch.contact import Contact
    from llmtrain.launch.job import Job
    from llmtrain.launch.rundir import HostDir
    from llmtrain.spec.dsconfig import Rendered

GRACE_S = 3.0
PROJECT = "project"
"""Folder of the user's code in the run folder."""


def make_document(job: Job, contact: Contact, rendered: Rendered, run_id: str, run_dir: HostDir) -> dict[str, Any]:
    """The resolved run, without what differs between hosts."""
    spec = job.spec
    training = spec.training.model_dump()
    if training["max_steps"] is None and training["epochs"] is None:
        training["epochs"] = 1.0
    return {
        "schema": 1,
        "run_id": run_id,
        "run_dir": str(run_dir),
        "world_size": job.cluster.world_size,
        "task": "finetune" if job.script is None else "script",
        "script": _script(job, run_dir),
        "model": {
            "path": str(job.model.path) if job.model else "",
            "dtype": contact.hardware.dtype,
            "attention": contact.hardware.attention,
            "trust_remote_code": spec.model.trust_remote_code,
        },
        "data": _data(job, run_dir),
        "batch": {
            "global": rendered.batch.global_,
            "micro": rendered.batch.micro,
            "accumulation": rendered.batch.accumulation,
        },
        "training": training,
        "lora": _lora(job),
        "deepspeed": rendered.config,
        "output": run_dir / "output",
        "checkpoints": f"{spec.checkpoint.dir}/{run_id}" if spec.checkpoint.dir else run_dir / "checkpoints",
        "checkpoint": {
            "keep": spec.checkpoint.keep,
            "save_minutes": spec.checkpoint.save_minutes,
            "copies": choose_copies(job, contact)[0] is not None,
        },
        "grace_s": GRACE_S,
        "environment": _environment(job, contact),
    }


def _data(job: Job, run_dir: HostDir) -> dict[str, Any]:
    data = job.spec.data
    longest = job.model.max_position if job.model else None
    return {
        "path": job.sources[0].path if job.sources else data.path or "",
        "sources": [source.to_json() for source in job.sources],
        "format": job.data.format if job.data else data.format,
        "max_length": min(data.max_length, longest or data.max_length),
        "packing": data.packing,
        "eval": data.eval,
        "tokenized": job.tokenized,
        "chat_template": run_dir / "template.jinja" if job.template_text is not None else data.chat_template,
    }


def _lora(job: Job) -> dict[str, Any] | None:
    lora = job.spec.lora
    return {**lora.model_dump(), "alpha": lora.alpha or 2.0 * lora.rank} if lora.rank else None


def _environment(job: Job, contact: Contact) -> dict[str, Any]:
    """Prefix, and digests of what was installed on the hosts: one, if all are alike."""
    digests = sorted({str(item.environment) for item in contact.facts.values() if item.environment})
    return {"prefix": job.spec.environment, "digests": digests}


def _script(job: Job, run_dir: HostDir) -> dict[str, Any] | None:
    script = job.script
    if script is None:
        return None
    places = {
        "ds_config": run_dir / "ds_config.json",
        "ds_config_resolved": run_dir / "ds_config_resolved.json",
        "output": run_dir / "output",
        "model": str(job.model.path) if job.model else None,
        "data": job.spec.data.path,
    }
    project = run_dir / PROJECT
    return {
        "kind": script.kind,
        "target": f"{project}/{script.target}" if script.kind == "file" else script.target,
        "args": list(fill_args(script.args, places)),
        "cwd": project if script.cwd == "." else f"{project}/{script.cwd}",
    }
