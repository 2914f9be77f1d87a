"""``data``, ``merge`` and ``export``: what goes into a training, and what is made of its result."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

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
    app.command("export")(export)


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


def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Id, the beginning of one, a run folder, or 'last'.")],
    output: Annotated[str, typer.Option("--output", metavar="DIR", help="A new folder here, or HOST:/DIR.")],
    step: Annotated[int | None, typer.Option("--step", metavar="N", help="Of the checkpoint; the newest one.")] = None,
    dtype: Annotated[
        Literal["bf16", "fp32"] | None, typer.Option("--dtype", help="Precision; that of the run's own model.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a model of a checkpoint, wherever its files lie."""
    from llmtrain.launch.export import Wanted, parse_target
    from llmtrain.launch.export import export as export_run
    from llmtrain.launch.jobs import find_run

    host, path = parse_target(output)
    wanted = Wanted(step=step, dtype=dtype, host=host, path=path)
    said = export_run(find_run(run), wanted, lambda text: typer.echo(text, err=True))
    if as_json:
        sys.stdout.write(json.dumps(said, indent=2) + "\n")
        return
    merged = ", adapters merged" if said["merged"] else ""
    typer.echo(f"loads in transformers: {said['loaded']}")
    typer.echo(f"model: {said['output']} (step {said['step']}, {said['dtype']}{merged}), {said['seconds']} s")
