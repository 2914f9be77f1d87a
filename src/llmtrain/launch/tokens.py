"""Data tokenized once on the head, reused by launches and sent to hosts in place of the data."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.errors import InputFileError, LlmtrainError, UsageError
from llmtrain.launch.stage import code_files

if TYPE_CHECKING:
    from llmtrain.launch.job import Material
    from llmtrain.spec.runspec import RunSpec

FOLDER = ".llmtrain-tokenized"
"""Beside the data: where hosts can have the data, they can have this."""
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"}
CODE = (
    "train/data.py",
    "train/masking.py",
    "train/templates.py",
    "spec/datafile.py",
    "spec/dataset.py",
    "spec/formats.py",
    "spec/messages.py",
    "spec/source.py",
    "spec/tables.py",
)
"""What decides how an example becomes tokens; another version of it makes another set."""
EXAMPLES_PER_PROCESS = 2000
MAX_PROCESSES = 16


def choose_place(spec: RunSpec, material: Material) -> Path:
    """Where the set of this data lies: named by all that decides its content.

    Packing and weights are not among it: they choose among the rows when the run starts.
    """
    parts: list[Any] = [1, material.max_length, material.template_text, spec.data.chat_template]
    parts += [[source.to_json() | {"weight": 1}, report.digest_sha256] for source, report in material.files]
    parts += [material.held_out.digest_sha256 if material.held_out else None]
    parts += [_digest_tokenizer(material.model.path), _digest_code()]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return Path(material.files[0][0].path).parent / FOLDER / digest[:16]


def find_set(spec: RunSpec, material: Material) -> str | None:
    """The set that ``llmtrain data`` has left for exactly this data; None if there is none."""
    place = choose_place(spec, material)
    return str(place) if (place / "set.json").is_file() else None


def tokenize(spec: RunSpec, material: Material, *, python: str) -> tuple[dict[str, Any], Path]:
    """Make the set, or find it made; what became of the data, and where it lies.

    Raises:
        InputFileError: an example cannot be used, or the folder cannot be written.
        UsageError: the training's interpreter is not on this machine.
    """
    place = choose_place(spec, material)
    with tempfile.TemporaryDirectory(prefix="llmtrain-data-") as folder:
        code = Path(folder, "code")
        for name, text in code_files():
            path = code.parent / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text)
        run_json = Path(folder, "run.json")
        template = Path(folder, "template.jinja")
        if material.template_text is not None:
            template.write_text(material.template_text, encoding="utf-8")
        run_json.write_text(json.dumps(_document(spec, material, place, str(template))), encoding="utf-8")
        report = _run(python, code, run_json, place)
    return report, place


def _run(python: str, code: Path, run_json: Path, place: Path) -> dict[str, Any]:
    try:
        done = subprocess.run(
            [python, "-m", "llmtrain.train.tokenized", str(run_json), str(place)],
            env={**os.environ, "PYTHONPATH": str(code)},
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as problem:
        raise UsageError(
            f"the training's Python cannot be started here: {problem.strerror}",
            where=python,
            fix="tokenizing needs transformers on this machine: name another one with --set python=PATH",
        ) from None
    try:
        report: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        words = done.stderr.strip().splitlines() or ["it said nothing"]
        raise LlmtrainError(f"tokenizing failed: {words[-1]}", where=python, fix="llmtrain check") from None
    if "error" in report:
        raise InputFileError(report["error"], where=report["where"], fix=report["fix"])
    return report


def _document(spec: RunSpec, material: Material, place: Path, template: str) -> dict[str, Any]:
    """A run.json of one host whose ranks share the tokenizing; what concerns the training alone is a stand-in."""
    examples = sum(report.examples for _, report in material.files)
    workers = max(1, min(os.cpu_count() or 1, MAX_PROCESSES, examples // EXAMPLES_PER_PROCESS))
    named = material.template_text is None
    folder = place.parent / f".{place.name}.{os.getpid()}"
    return {
        "schema": 1,
        "run_id": "data",
        "host": "head",
        "run_dir": str(folder),
        "world_size": 1,
        "ranks": list(range(workers)),
        "task": "finetune",
        "model": {
            "path": str(material.model.path),
            "dtype": "bf16",
            "attention": "sdpa",
            "trust_remote_code": spec.model.trust_remote_code,
        },
        "data": {
            "path": material.files[0][0].path,
            "sources": [source.to_json() for source, _ in material.files],
            "format": material.format,
            "max_length": material.max_length,
            "packing": spec.data.packing,
            "eval": spec.data.eval,
            "chat_template": spec.data.chat_template if named else template,
            "tokenized": find_set(spec, material),
        },
        "batch": {"global": 1, "micro": 1, "accumulation": 1},
        "training": spec.training.model_dump(),
        "deepspeed": {},
        "threads": 1,
        "output": "",
        "checkpoints": "",
        "checkpoint": {"keep": 0, "save_minutes": 0, "copies": False},
        "grace_s": 0.0,
    }


def _digest_tokenizer(model: Path) -> str:
    """All small files of the model: a tokenizer is any of them."""
    digest = hashlib.sha256()
    for path in sorted(model.iterdir()):
        if path.is_file() and path.suffix not in WEIGHTS and path.name != "README.md":
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _digest_code() -> str:
    digest = hashlib.sha256()
    for name, text in code_files():
        if name.removeprefix("code/llmtrain/") in CODE:
            digest.update(text)
    return digest.hexdigest()
