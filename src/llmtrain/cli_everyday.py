"""``exec``, ``hosts``, ``ask``, ``diff`` and ``init``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from llmtrain.cli_program import WithProgram, read_words
from llmtrain.errors import InputFileError, UsageError


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("exec", cls=WithProgram)(execute)
    app.command("hosts")(hosts)
    app.command("ask")(ask)
    app.command("diff")(diff)
    app.command("init")(init)


def execute(
    context: typer.Context,
    run_file: Annotated[str | None, typer.Argument(metavar="[RUN.yaml]", help="Run file that names the hosts.")] = None,
    hosts: Annotated[str | None, typer.Option("--hosts", metavar="HOSTFILE", help="One 'NAME slots=N' a line.")] = None,
    include: Annotated[str | None, typer.Option("--include", metavar="SPEC", help="Only these.")] = None,
    exclude: Annotated[str | None, typer.Option("--exclude", metavar="SPEC", help="All but these.")] = None,
    timeout_s: Annotated[float, typer.Option("--timeout", metavar="S", help="Seconds a host may take.")] = 60.0,
) -> None:
    """Run a command on every host; equal output is shown once. Use: exec --hosts HOSTFILE -- CMD ARGS."""
    from llmtrain.launch.everyday import merge_answers, run_everywhere, worst_code
    from llmtrain.report.errors import clean
    from llmtrain.spec.hostfile import read_hostfile, select
    from llmtrain.spec.runfile import read_run

    words = read_words(context)
    if not words:
        raise UsageError("nothing to run stands after --", where="command line", fix="llmtrain exec -- nvidia-smi -L")
    named = read_run(run_file, options={"hosts": ("--hosts", hosts or os.environ.get("LLMTRAIN_HOSTS"))}).hosts
    if named is None:
        raise UsageError("--hosts HOSTFILE is missing", where="command line", fix="add --hosts HOSTFILE")
    cluster = select(read_hostfile(named), include=include, exclude=exclude)
    said = merge_answers(run_everywhere(cluster, words, timeout_s=timeout_s))
    for one in said:
        ended = "" if one.code == 0 else f" (exit code {one.code})"
        typer.echo(clean(f"{','.join(one.hosts)}:{ended}"))
        for line in one.text.splitlines():
            typer.echo(clean(f"  {line}"))
    raise typer.Exit(worst_code(said))


def hosts(
    names: Annotated[str, typer.Argument(metavar="NAMES", help="For example 'gpu[001-008]', or 'a,b'.")],
    probe: Annotated[bool, typer.Option("--probe", help="Ask the hosts for slots and addresses.")] = False,
    slots: Annotated[int, typer.Option("--slots", min=1, help="Slots where none are found.")] = 1,
) -> None:
    """Print a hostfile for 'gpu[001-008]', slots probed. Use: hosts 'gpu[001-008]' --probe > hostfile."""
    from llmtrain.launch.everyday import examine_names, render_hosts
    from llmtrain.report.errors import clean
    from llmtrain.spec.hostrange import expand

    listed = expand(names)
    facts = examine_names(listed) if probe else None
    sys.stdout.write(clean(render_hosts(listed, facts, slots)))
    if facts and facts.failed:
        raise next(iter(facts.failed.values()))


def ask(
    model: Annotated[str, typer.Argument(metavar="DIR", help="A finished model.")],
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="What to ask.")],
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Longest answer.")] = 100,
) -> None:
    """Ask a finished model one question, on this machine."""
    if not Path(model).is_dir():
        raise InputFileError("no such model directory", where=model, fix="name the folder that launch wrote")
    sys.stdout.flush()
    # Another program, since only the rank code may load torch.
    words = ["-m", "llmtrain.train.answer", "--max-tokens", str(max_tokens), "--", model, question]
    os.execv(sys.executable, [sys.executable, *words])  # noqa: S606


def diff(
    first: Annotated[str, typer.Argument(metavar="RUN_A", help="Run folder or id.")],
    second: Annotated[str, typer.Argument(metavar="RUN_B", help="Run folder or id.")],
) -> None:
    """Show in what two runs differ: settings, versions, loss."""
    from llmtrain.launch.compare import choose_steps, compare, read_record
    from llmtrain.report.errors import clean

    records = read_record(first), read_record(second)
    lines = [f"{records[0].name} -> {records[1].name}"]
    lines += [f"{item.key}: {item.first} -> {item.second}" for item in compare(*records)]
    for step in choose_steps(*records):
        before, after = (one.losses[step] for one in records)
        lines.append(f"loss at step {step}: {before:.4f} -> {after:.4f} ({after - before:+.4f})")
    ends = [one.outcome.get("reason", "still running") for one in records]
    lines.append(f"end: {ends[0]} -> {ends[1]}")
    typer.echo(clean("\n".join(lines)))


def init(
    source: Annotated[
        str | None, typer.Option("--from", metavar="FILE", help="LLaMA-Factory or axolotl YAML to translate.")
    ] = None,
) -> None:
    """Write a commented llmtrain.yaml, or translate a foreign one."""
    from llmtrain.spec.runfile import DEFAULT_NAME
    from llmtrain.spec.translate import read_foreign, render_run_file

    translation = read_foreign(source) if source else None
    try:
        with Path(DEFAULT_NAME).open("x", encoding="utf-8") as file:
            file.write(render_run_file(translation))
    except FileExistsError:
        fix = "move it away first"
        raise UsageError("there is one already, and it is never overwritten", where=DEFAULT_NAME, fix=fix) from None
    typer.echo(f"written: {DEFAULT_NAME}", err=True)
    for key in translation.left if translation else ():
        typer.echo(f"no counterpart: {key}", err=True)
