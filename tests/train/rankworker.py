"""Started by DeepSpeed's launcher: runs several run.json files in one set of processes, as ``rank`` would run each.

Starting torch, transformers and DeepSpeed takes many times longer than training a tiny model, so the tests share it.
Beside what ``rank`` writes, each run folder gets ``loaded-RANK.json`` (how the model lay after loading) and, from
rank 0, ``master.pt``: the trained weights as DeepSpeed itself hands them out.
"""

from __future__ import annotations

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


CURRENT: list[runjson.RankRun] = []

if __name__ == "__main__":
    files = [Path(name) for name in sys.argv[1:]]
    watch_loading()
    watch_weights()
    leave = crew.Crew.leave
    crew.Crew.leave = lambda _: None
    code = 0
    for file in files:
        CURRENT[:] = [runjson.read_run(file)]
        if file is files[-1]:
            crew.Crew.leave = leave
        code = rank.execute(file)
    rank._leave(code)
