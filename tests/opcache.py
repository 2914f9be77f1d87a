"""DeepSpeed's compiled operations for the tests: built once, and checked by ninja at the start of every session."""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import sys
from pathlib import Path

BUILD_OPS = (
    "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load(verbose=False);"
    "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder; ShareMemCommBuilder().load(verbose=False)"
)


@functools.cache
def build_ops() -> Path:
    """Folder of operations that are fresh for this very environment; copy it where somebody may write.

    Ninja compares commands and times of headers, so what another environment built, or this one before it was made
    anew, would be compiled again on every host of a lab at once: minutes in which nothing trains.
    """
    base = Path(os.environ.get("LLMTRAIN_TEST_OPCACHE", Path.home() / ".cache/llmtrain-test/ops"))
    folder = base / hashlib.sha256(os.fsencode(sys.prefix)).hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # ninja lies beside the interpreter
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(folder), "PATH": path}
    subprocess.run([sys.executable, "-c", BUILD_OPS], env=env, check=True, capture_output=True, timeout=900)
    return folder
