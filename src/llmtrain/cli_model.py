"""``merge``: adapters and their base model become one."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from llmtrain.errors import InputFileError


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("merge", rich_help_panel="Results")(merge)


def merge(
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER", help="Folder of adapters that launch wrote.")],
    output: Annotated[str, typer.Option("--output", metavar="DIR", help="A new folder for the whole model.")],
    model: Annotated[str | None, typer.Option("--model", metavar="DIR", help="The base; what ADAPTER names.")] = None,
) -> None:
    """Add LoRA adapters to their base model, tensor by tensor."""
    if not Path(adapter).is_dir():
        raise InputFileError("no such adapter", where=adapter, fix="name the folder that launch wrote")
    sys.stdout.flush()
    # Another program, since only the rank code may load torch.
    words = ["-m", "llmtrain.train.merge", "--output", output, *(["--model", model] if model else []), "--", adapter]
    os.execv(sys.executable, [sys.executable, *words])  # noqa: S606
