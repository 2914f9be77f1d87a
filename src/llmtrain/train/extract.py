"""The weights that one host has of a checkpoint, without optimizer states: ``python -m llmtrain.train.extract``.

For each rank a file of plain numbers in the wanted precision; memory holds one piece of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.errors import InputFileError, LlmtrainError
from llmtrain.train.seal import examine_seal
from llmtrain.train.shards import find_parts, load_groups, read_layout, write_layout

if TYPE_CHECKING:
    from collections.abc import Sequence

NUMBERS = 16 << 20
"""Converted at once."""


def extract(checkpoint: Path, out: Path, *, dtype: str, ranks: Sequence[int]) -> int:
    """Write the parts of some ranks; returns their bytes.

    Args:
        checkpoint: a folder ``step-...`` on this host.
        out: a new folder for ``rank-R.bin``, ``rank-R.json`` and, with rank 0, ``layout.json``.
        dtype: ``bf16`` or ``fp32``.
        ranks: the ranks of this host.

    Raises:
        InputFileError: the checkpoint is damaged.
    """
    if (wrong := examine_seal(checkpoint, min(ranks))) is not None:
        raise InputFileError(f"the checkpoint is damaged: {wrong}", where=str(checkpoint), fix="export another --step")
    tag = checkpoint / (checkpoint / "latest").read_text(encoding="utf-8").strip()
    parts = find_parts(tag)
    out.mkdir(parents=True)
    layout = read_layout(tag, parts) if 0 in ranks else None
    if layout is not None:
        write_layout(out, layout)
    # The seal has shown that this host's files are all here; without ZeRO only rank 0 has one.
    return sum(_write_part(parts[rank], out, rank, dtype) for rank in ranks if rank in parts)


def _write_part(path: Path, out: Path, rank: int, dtype: str) -> int:
    import torch

    kind = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    groups = load_groups(path)
    with (out / f"rank-{rank:05d}.bin").open("wb") as stream:
        for group in groups:
            flat = group.reshape(-1)
            for at in range(0, flat.numel(), NUMBERS):
                piece = flat[at : at + NUMBERS].to(kind).contiguous()
                stream.write(memoryview(piece.view(torch.uint8).numpy()))
        written = stream.tell()
    sizes = [int(group.numel()) for group in groups]
    (out / f"rank-{rank:05d}.json").write_text(json.dumps({"rank": rank, "groups": sizes}), encoding="utf-8")
    return written


def main(argv: list[str] | None = None) -> int:
    """Extract, and print one JSON object; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m llmtrain.train.extract", description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), required=True)
    parser.add_argument("--ranks", required=True, help="as in 0,1")
    options = parser.parse_args(argv)
    ranks = [int(word) for word in options.ranks.split(",")]
    try:
        said: dict[str, Any] = {"bytes": extract(options.checkpoint, options.out, dtype=options.dtype, ranks=ranks)}
    except LlmtrainError as problem:
        said = {"error": problem.error, "where": problem.where, "fix": problem.fix}
    except OSError as problem:
        said = {"error": str(problem), "where": str(options.out), "fix": "df -h"}
    sys.stdout.write("\n" + json.dumps(said) + "\n")
    return int("error" in said)


if __name__ == "__main__":
    sys.exit(main())
