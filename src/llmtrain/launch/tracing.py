"""Trace the activations of the real model class in a process that has torch, beside the formulas' count."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.errors import UsageError
from llmtrain.spec.jsonfile import read_json

if TYPE_CHECKING:
    from llmtrain.plan.estimate import Estimate


def run_trace(found: Estimate) -> int:
    """Peak of activations and logits of one micro batch, in bytes, traced.

    Raises:
        UsageError: torch or transformers is not installed here, or the class cannot be traced.
    """
    keys, _ = read_json(Path(found.shape.config.where), what="model configuration")
    setup = found.setup
    request = {
        "keys": keys,
        "micro": setup.micro,
        "length": setup.length,
        "attention": "eager" if setup.attention == "eager" else "sdpa",
        "checkpointing": setup.checkpointing,
        "dtype": setup.dtype,
    }
    argv = [sys.executable, "-W", "ignore", "-m", "llmtrain.train.trace", json.dumps(request)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise UsageError(f"the model could not be traced: {last}", where="--trace", fix="leave --trace out")
    return int(json.loads(done.stdout.strip().splitlines()[-1])["peak"])
