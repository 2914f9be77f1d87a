"""Checkpoints to go on from, and the final model: gathered, checked, and only then put in place."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import shutil
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.errors import DiskError, InputFileError, RankFailedError
from llmtrain.process import write_json
from llmtrain.train.keeping import make_private, place_copies, prune
from llmtrain.train.modeldir import tidy, write_pretty
from llmtrain.train.records import SCHEMA
from llmtrain.train.seal import choose_intact, examine_candidates, sync_folder, write_manifest, write_through

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llmtrain.train.crew import Crew
    from llmtrain.train.runjson import RankRun

NOTE = "checkpoint.json"
TORCH_WRITER = ("PytorchStreamWriter", "inline_container")
"""Words in the RuntimeErrors with which torch.save tells that a file could not be written."""

# --- checkpoints -----------------------------------------------------------------------------------------------


def checkpoint_path(run: RankRun, step: int) -> Path:
    """Where the checkpoint of a step is, on every host."""
    return run.checkpoints / f"step-{step:06d}"


def write_checkpoint(trainer: Any, run: RankRun, crew: Crew) -> Path | None:
    """Save optimizer, weights and place in the data, so that a run can go on; every rank calls this.

    Each host gets what its ranks need to go on, because hosts need not share a disk: DeepSpeed writes each rank's
    part where the rank is, and the small files that every rank reads are written once per host. The folder gets its
    name when the files of all hosts are on disk and listed in its manifest.

    Returns:
        The checkpoint, or None where a disk did not take it: the run goes on, and the previous ones stay.
    """
    step = trainer.state.global_step
    final = checkpoint_path(run, step)
    partial = run.checkpoints / f".step-{step:06d}.partial"
    saving = _Saving(crew, run.host)
    first = crew.place.is_first_on_host
    _fill(trainer, run, crew, saving, partial)
    hosts: list[Any] = []
    if saving.goes_on():
        files = saving.attempt(lambda: write_through(partial)) if first else None
        mine = {"host": run.host, "first_rank": crew.place.rank, "files": files} if files else None
        hosts = [said for said in crew.share(mine) if said]
        if run.checkpoint.copies:
            hosts = place_copies(hosts, final.name)
    if saving.goes_on() and first:
        saving.attempt(lambda: write_manifest(partial, step, hosts))
    if not saving.goes_on():
        if first:
            shutil.rmtree(partial, ignore_errors=True)
        crew.wait()
        return None
    if first:
        with contextlib.suppress(FileNotFoundError):  # on a shared disk another host was first
            partial.rename(final)
        sync_folder(run.checkpoints)
    crew.wait()  # before anything older goes, the new one has its name everywhere
    if first:
        prune(run.checkpoints, run.checkpoint.keep)
    crew.wait()
    return final


def _fill(trainer: Any, run: RankRun, crew: Crew, saving: _Saving, partial: Path) -> None:
    first = crew.place.is_first_on_host
    if first:
        shutil.rmtree(partial, ignore_errors=True)
    crew.wait()
    tag = f"global_step{trainer.state.global_step}"
    if first:
        saving.attempt(lambda: make_private(run.checkpoints))
        saving.attempt(lambda: (partial / tag).mkdir(parents=True, exist_ok=True))
    # Every attempt is followed by agreement: a rank that gave up alone would leave the others waiting for it.
    if saving.goes_on():
        saving.attempt_engine(trainer.model_wrapped, partial, tag)
        saving.attempt(lambda: trainer._save_rng_state(str(partial)))  # noqa: SLF001 - transformers' resume reads it
        if first:
            saving.attempt(lambda: _write_shared_files(trainer, run, partial, tag))


class _Saving:
    """One save on all ranks: what a disk refuses on one of them ends it on all, and never the run."""

    def __init__(self, crew: Crew, host: str) -> None:
        self._crew = crew
        self._host = host
        self._problem: str | None = None
        self._failed = False

    def attempt(self, act: Callable[[], Any]) -> Any:
        """Do it, unless something failed here before; what the disk refuses is kept for ``goes_on``."""
        if self._problem is None:
            try:
                return act()
            except (OSError, RuntimeError) as problem:
                # torch tells of a full disk with a RuntimeError of its archive writer.
                if isinstance(problem, RuntimeError) and not any(name in str(problem) for name in TORCH_WRITER):
                    raise
                self._problem = f"{self._host}: {str(problem).splitlines()[0]}"
        return None

    def attempt_engine(self, engine: Any, partial: Path, tag: str) -> None:
        """DeepSpeed's save; its ranks wait for each other in it, so a refused file must not end it half way."""
        kept = [(engine.checkpoint_engine, "save"), (engine, "_copy_recovery_script")]
        for owner, name in kept:
            setattr(owner, name, functools.partial(self._attempt_call, getattr(owner, name)))
        try:
            # DeepSpeed writes `latest` on rank 0's host alone, and with ZeRO-2 before the other ranks have written.
            engine.save_checkpoint(str(partial), tag=tag, save_latest=False)
        finally:
            for owner, name in kept:
                delattr(owner, name)  # what the class has shows again

    def _attempt_call(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return self.attempt(lambda: call(*args, **options))

    def goes_on(self) -> bool:
        """Whether all has gone well on every rank so far; every rank calls this, and rank 0 says once what has not."""
        if self._failed:
            return False
        problems = list(dict.fromkeys(problem for problem in self._crew.share(self._problem) if problem))
        self._failed = bool(problems)
        if self._failed and self._crew.place.is_first:
            sys.stdout.write(f"checkpoint not saved, the previous one stays: {'; '.join(problems[:3])}\n")
            sys.stdout.flush()
        return not self._failed


def _write_shared_files(trainer: Any, run: RankRun, partial: Path, tag: str) -> None:
    import torch
    from accelerate.utils import DeepSpeedSchedulerWrapper
    from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME

    if not isinstance(trainer.lr_scheduler, DeepSpeedSchedulerWrapper):  # DeepSpeed saves its own
        torch.save(trainer.lr_scheduler.state_dict(), partial / SCHEDULER_NAME)
    trainer.state.save_to_json(str(partial / TRAINER_STATE_NAME))
    (partial / "latest").write_text(tag, encoding="utf-8")
    note = {"schema": SCHEMA, "run_id": run.run_id, "step": trainer.state.global_step, **_shape(run)}
    note["stop_tokens"] = list(trainer.stop_tokens)  # for who exports the model from here
    write_json(partial / NOTE, note)


def _shape(run: RankRun) -> dict[str, int]:
    """What must be the same for a run to go on from another's checkpoint with the same data order."""
    return {
        "world_size": run.world_size,
        "zero_stage": run.deepspeed.get("zero_optimization", {}).get("stage", 0),
        "batch_global": run.batch.global_size,
        "seed": run.training.seed,
    }


def find_resume(run: RankRun, crew: Crew) -> Path | None:
    """The checkpoint to go on from: the one asked for, or the last before it that is intact on every host.

    Raises:
        InputFileError: none is intact.
    """
    if run.training.resume is None:
        return None
    named = Path(run.training.resume)
    place = crew.place
    mine = (run.host, examine_candidates(named, place.rank)) if place.is_first_on_host else None
    seen = dict(said for said in crew.share(mine) if said)
    chosen, problems = choose_intact(named, seen)
    if problems and place.is_first:
        sys.stdout.write(f"going on from {chosen.name} instead of {named.name}: {'; '.join(problems)}\n")
    return chosen


def check_resume(run: RankRun, directory: Path | None) -> Path | None:
    """The checkpoint to go on from, after a look at whether this run can.

    Raises:
        InputFileError: it is not a checkpoint, or was written by a run of another shape.
    """
    if directory is None:
        return None
    try:
        note = json.loads((directory / NOTE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise InputFileError(
            f"training.resume: not a checkpoint of llmtrain ({NOTE} is missing or broken)",
            where=str(directory),
            fix="name a folder like checkpoints/step-000100 that exists on every host",
        ) from None
    for key, value in _shape(run).items():
        if note.get(key) != value:
            raise InputFileError(
                f"training.resume: the checkpoint has {key} {note.get(key)}, this run has {value}",
                where=str(directory),
                fix=f"use {key} {note.get(key)} again, or start from the model's weights",
            )
    return directory


# --- the final model -------------------------------------------------------------------------------------------


def check_output(output: Path) -> None:
    """Refuse an output that holds something, before hours are spent.

    Raises:
        InputFileError: it exists and is not an empty folder.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputFileError("the output exists already and is never overwritten", where=str(output))


def gather_weights(model: Any, dtype: Any, *, keep: bool, trained_only: bool = False) -> dict[str, Any]:
    """All weights of a model, whole, on the CPU; every rank calls this, one keeps them.

    Works for every ZeRO stage: only stage 3 divides parameters, and those are collected one at a time, so that no
    accelerator ever holds more than one of them.

    Args:
        model: the model inside the engine.
        dtype: parameters are converted to it; other tensors stay as they are.
        keep: whether this rank wants the result; the others get an empty dict.
        trained_only: leave out what is frozen.
    """
    import deepspeed

    weights: dict[str, Any] = {}
    names: dict[int, str] = {}
    parameters = {id(parameter) for parameter in model.parameters()}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if trained_only and not tensor.requires_grad:
            continue
        if id(tensor) in names:  # tied: the same parameter under another name
            if keep:
                weights[name] = weights[names[id(tensor)]]
            continue
        names[id(tensor)] = name
        divided = [tensor] if hasattr(tensor, "ds_id") else []
        with deepspeed.zero.GatheredParameters(divided, enabled=bool(divided)):
            if keep:
                wanted = dtype if id(tensor) in parameters else tensor.dtype
                # A copy even where nothing changes: the gathered storage goes away with the context.
                weights[name] = tensor.detach().to(device="cpu", dtype=wanted, copy=True)
    return weights


def write_model(
    model: Any, weights: dict[str, Any], tokenizer: Any, run: RankRun, *, card: str, stop_tokens: tuple[int, ...]
) -> None:
    """Write the tuned model as a Hugging Face directory; rank 0 calls this.

    It appears under its name only when it is complete and its tensors are those of the base model.

    Raises:
        RankFailedError: tensors are missing; what was written stays beside the output, under a ``.partial`` name.
        DiskError: the disk is full.
    """
    partial = run.output.with_name(f".{run.output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    _check_space(partial.parent, sum(tensor.numel() * tensor.element_size() for tensor in weights.values()))
    base = Path(run.model.path)
    _restore_configs(model, base)
    model.save_pretrained(partial, state_dict=weights)
    tokenizer.save_pretrained(partial)
    finish_configs(partial, base, "float32" if run.model.dtype == "fp32" else "bfloat16", stop_tokens)
    (partial / "README.md").write_text(card, encoding="utf-8")
    _compare_tensors(partial, base, model)
    tidy(partial)
    if run.output.is_dir():
        run.output.rmdir()  # checked to be empty before the training
    run.output.parent.mkdir(parents=True, exist_ok=True)
    partial.rename(run.output)


def _check_space(folder: Path, needed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DiskError(
            f"the model needs {needed / 1e9:.1f} GB, the disk has {free / 1e9:.1f} GB free", where=str(folder)
        )


def _restore_configs(model: Any, base: Path) -> None:
    """Undo what training changed in the configuration; a tuned model should generate as fast as its base."""
    from transformers import GenerationConfig

    # The trainer switches the cache off for gradient checkpointing. A base that says nothing means the default, on.
    plain = json.loads((base / "config.json").read_text(encoding="utf-8"))
    model.config.use_cache = plain.get("use_cache", True)
    # save_pretrained refuses a generation config that contradicts itself, which many models have; the base's own
    # file takes its place afterwards.
    if (base / "generation_config.json").is_file():
        model.generation_config = GenerationConfig()


def finish_configs(partial: Path, base: Path, dtype: str, stop_tokens: Sequence[int]) -> None:
    """Say the precision of the weights, and stop at the tokens that trained answers end with."""
    config = json.loads((partial / "config.json").read_text(encoding="utf-8"))
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    write_pretty(partial / "config.json", config)
    source = base if (base / "generation_config.json").is_file() else partial
    generation = json.loads((source / "generation_config.json").read_text(encoding="utf-8"))
    known = generation.get("eos_token_id")
    stops = known if isinstance(known, list) else [] if known is None else [known]
    added = [token for token in stop_tokens if token not in stops]
    if added:
        # Trained to end its turn with this token, the model must also be stopped there.
        generation["eos_token_id"] = [*added, *stops]
    write_pretty(partial / "generation_config.json", generation)


def _compare_tensors(partial: Path, base: Path, model: Any) -> None:
    """The written tensors must be those of the base model, or at least as many numbers as were trained.

    The second measure is for bases whose files name tensors in an older way, which transformers renames on loading.
    """
    prefix = f"{model.base_model_prefix}."
    shapes = read_tensor_shapes(partial)
    written, original = (
        {name.removeprefix(prefix): shape for name, shape in found.items()}
        for found in (shapes, read_tensor_shapes(base))
    )
    if written == original:
        return
    # ds_numel: what ZeRO-3 has divided says how large it is as a whole.
    trained = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())
    numbers = sum(math.prod(shape) for shape in shapes.values())
    if numbers < trained:
        missing = sorted(original.keys() - written.keys())
        raise RankFailedError(
            f"the written model has {numbers} parameters, {trained} were trained; missing, for example: {missing[:3]}",
            where=str(partial),
        )


def read_tensor_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor in a directory's safetensors files, from their headers alone."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(directory.glob("model*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        shapes.update({name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"})
    return shapes
