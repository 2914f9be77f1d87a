"""``data`` and ``merge``: what goes into a training, and what is made of its result."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from llmtrain.errors import InputFileError

RunFile = Annotated[str | None, typer.Argument(metavar="[RUN.yaml]", help="Run file; llmtrain.yaml here if it exists.")]
Model = Annotated[str | None, typer.Option("--model", metavar="DIR", help="Model whose tokenizer is used.")]
Data = Annotated[str | None, typer.Option("--data", metavar="PATH", help="Training data.")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any key of the run file.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, all else on stderr.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("data")(data)
    app.command("merge")(merge)


def data(
    run_file: RunFile = None,
    model: Model = None,
    data: Data = None,
    sets: Sets = None,
    as_json: AsJson = False,
) -> None:
    """Tokenize the data once and show what is in it. Launch reuses it."""
    from llmtrain.launch.dataset import summarise
    from llmtrain.report.data import show_data
    from llmtrain.spec.runfile import read_run

    options = {
        "model.path": ("--model", model),
        "data.path": ("--data", data),
        "hosts": ("LLMTRAIN_HOSTS", os.environ.get("LLMTRAIN_HOSTS")),
    }
    spec = read_run(run_file, options=options, sets=sets or ())
    summary = summarise(spec, lambda text: typer.echo(text, err=True))
    if as_json:
        sys.stdout.write(json.dumps(summary.to_json(), indent=2) + "\n")
    else:
        show_data(summary)


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
