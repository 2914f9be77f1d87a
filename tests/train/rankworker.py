"""Started by DeepSpeed's launcher: runs several run.json files in one set of processes, as ``rank`` would run each.

Starting torch, transformers and DeepSpeed takes many times longer than training a tiny model, so the tests share it.
Beside what ``rank`` writes, each run folder gets ``loaded-RANK.json`` (how the model lay after loading) and, from
rank 0, ``master.pt``: the trained weights as DeepSpeed itself hands them out.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path

from llmtrain.train import crew, finetune, rank, runjson

RANK = int(os.environ["RANK"])


def watch_loading() -> None:
    """Note in each run folder how the model lay after loading."""
    load = finetune.load_model

    def load_and_note(run):
        model = load(run)
        divided = [parameter for parameter in model.parameters() if hasattr(parameter, "ds_id")]
        note = {
            "parameters": sum(1 for _ in model.parameters()),
            "divided": len(divided),
            "whole_here": sum(parameter.numel() for parameter in divided),
        }
        (run.run_dir / f"loaded-{RANK}.json").write_text(json.dumps(note))
        return model

    finetune.load_model = load_and_note


def watch_weights() -> None:
    """Save in each run folder the trained weights as DeepSpeed hands them out."""
    gather = finetune.gather_weights

    def gather_and_note(model, dtype, **options):
        import torch
        from deepspeed.utils import safe_get_full_fp32_param

        masters = {
            name: safe_get_full_fp32_param(parameter)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        if options["keep"]:
            torch.save({name: value.clone() for name, value in masters.items()}, CURRENT[0].run_dir / "master.pt")
        return gather(model, dtype, **options)

    finetune.gather_weights = gather_and_note


def damage_checkpoint(run: runjson.RankRun) -> None:
    """Shorten a shard of the checkpoint that the run ``fallen-back`` asks for."""
    if run.run_dir.name == "fallen-back" and RANK == 0:
        shard = min(Path(run.training.resume).glob("global_step*/*optim_states.pt"))
        os.truncate(shard, shard.stat().st_size // 2)


def fill_disk() -> None:
    """Let the disk be full for rank 1 when the run ``unsaved`` saves step 4 (a stand-in for the file system)."""
    import torch

    save = torch.save

    def refuse(value, file, *args, **options):
        if RANK == 1 and "unsaved/checkpoints/.step-000004" in str(file):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return save(value, file, *args, **options)

    torch.save = refuse


CURRENT: list[runjson.RankRun] = []

if __name__ == "__main__":
    files = [Path(name) for name in sys.argv[1:]]
    watch_loading()
    watch_weights()
    fill_disk()
    leave = crew.Crew.leave
    crew.Crew.leave = lambda _: None
    code = 0
    for file in files:
        CURRENT[:] = [runjson.read_run(file)]
        damage_checkpoint(CURRENT[0])
        if file is files[-1]:
            crew.Crew.leave = leave
        code = rank.execute(file)
    rank._leave(code)
