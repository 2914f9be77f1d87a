"""The command line: read the input, call one function, print, exit. No logic.

Imports of anything heavy stand inside the commands: ``llmtrain --help`` must answer at once.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmtrain import __version__
from llmtrain.cli_check import register as register_check
from llmtrain.cli_everyday import register as register_everyday
from llmtrain.cli_follow import finish as _finish
from llmtrain.cli_follow import start_and_follow
from llmtrain.cli_groups import Grouped, arrange, complete_preset
from llmtrain.cli_jobs import register as register_jobs
from llmtrain.cli_model import register as register_model
from llmtrain.cli_plan import register as register_plan
from llmtrain.cli_program import WithProgram, before_program, read_program
from llmtrain.cli_sync import register as register_sync
from llmtrain.errors import ExitCode, LlmtrainError, UsageError

if TYPE_CHECKING:
    from llmtrain.spec.runspec import RunSpec

app = typer.Typer(
    name="llmtrain",
    cls=Grouped,
    help="Fine-tune a causal language model over bare SSH hosts with one command.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

RunFile = Annotated[str | None, typer.Argument(metavar="[RUN.yaml]", help="Run file; llmtrain.yaml here if it exists.")]
Hosts = Annotated[str | None, typer.Option("--hosts", metavar="HOSTFILE", help="One 'NAME slots=N' a line.")]
Config = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="NAME_OR_FILE",
        help="Preset, or DeepSpeed YAML or JSON file.",
        autocompletion=complete_preset,
    ),
]
Model = Annotated[str | None, typer.Option("--model", metavar="DIR", help="Hugging Face model directory.")]
Data = Annotated[str | None, typer.Option("--data", metavar="PATH", help="Training data: chat JSONL or text.")]
Output = Annotated[str | None, typer.Option("--output", metavar="DIR", help="Where the model goes; DIR or HOST:DIR.")]
Include = Annotated[str | None, typer.Option("--include", metavar="SPEC", help="Only these: 'a:0,1@b'.")]
Exclude = Annotated[str | None, typer.Option("--exclude", metavar="SPEC", help="All but these.")]
NumHosts = Annotated[int | None, typer.Option("--num-hosts", metavar="N", help="The first N hosts.")]
MasterAddr = Annotated[str | None, typer.Option("--master-addr", metavar="A", help="Where the ranks meet.")]
MasterPort = Annotated[
    int | None, typer.Option("--master-port", metavar="P", min=1024, max=65535, help="Port they meet on.")
]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any key of the run file.")]
Envs = Annotated[list[str] | None, typer.Option("--env", metavar="K=V", help="Variable of the ranks.")]
EnvFile = Annotated[str | None, typer.Option("--env-file", metavar="F", help="File of variables, for secrets.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, all else on stderr.")]
SkipChecks = Annotated[
    list[str] | None, typer.Option("--skip-check", metavar="NAMES", help="Go on although these checks fail.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show all that would happen, and stop.")]


def _version(value: bool) -> None:
    if value:
        typer.echo(f"llmtrain {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Fine-tune a causal language model over bare SSH hosts with one command."""


@app.command(cls=WithProgram)
def launch(
    context: typer.Context,
    run_file: RunFile = None,
    hosts: Hosts = None,
    config: Config = None,
    model: Model = None,
    data: Data = None,
    output: Output = None,
    include: Include = None,
    exclude: Exclude = None,
    num_hosts: NumHosts = None,
    master_addr: MasterAddr = None,
    master_port: MasterPort = None,
    sets: Sets = None,
    envs: Envs = None,
    env_file: EnvFile = None,
    skip_check: SkipChecks = None,
    launcher: Annotated[
        str | None, typer.Option("--launcher", metavar="auto|pdsh|ssh", help="How the ranks are started.")
    ] = None,
    code: Annotated[
        str | None, typer.Option("--code", metavar="DIR", help="Code sent with a script of yours; its folder.")
    ] = None,
    max_restarts: Annotated[
        int | None, typer.Option("--max-restarts", metavar="N", min=0, help="After failures that this can cure.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Bring what hosts lack without asking.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Queue for accelerators another run holds.")] = False,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return once all hosts are good, and print the run's id.")
    ] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Fine-tune a model, or run your own script, over all hosts. A script of yours: launch ... -- train.py ARGS."""
    from llmtrain.cluster.findings import parse_names
    from llmtrain.launch.job import Selection
    from llmtrain.launch.run import launch as run_launch
    from llmtrain.launch.verdict import Outcome
    from llmtrain.report.live import Live
    from llmtrain.report.plan import plan_json, show_dry_run
    from llmtrain.spec.runfile import find_run_file

    options = _options(hosts, config, model, data, output, env_file)
    selection = Selection(
        include=include,
        exclude=exclude,
        num_hosts=num_hosts,
        master_addr=master_addr,
        master_port=master_port,
        skip_checks=parse_names(skip_check or (), option="--skip-check"),
        wait=wait,
        run_file=find_run_file(run_file),
    )
    options["launcher"] = ("--launcher", launcher)
    options["restart.max"] = ("--max-restarts", max_restarts)
    spec = _read(run_file, options, sets, envs)
    script = read_program(context, code)
    if not dry_run:
        start_and_follow(spec, selection, script, yes=yes, detach=detach, as_json=as_json)
    live = Live()
    try:
        result = run_launch(spec, selection, live.tell, dry_run=True, script=script)
    finally:
        live.close()
    if isinstance(result, Outcome):
        raise AssertionError("a dry run ends in a plan")  # noqa: TRY004  a bug, not a type
    place = spec.output or "the run folder"
    if not as_json:
        show_dry_run(live.console, result, place)
    _finish(plan_json(result, place) if as_json else None, 0)


@app.command()
def render(
    run_file: RunFile = None,
    hosts: Hosts = None,
    config: Config = None,
    model: Model = None,
    include: Include = None,
    exclude: Exclude = None,
    num_hosts: NumHosts = None,
    sets: Sets = None,
    envs: Envs = None,
    template: Annotated[
        bool, typer.Option("--template", help="Keep 'auto' where Hugging Face's Trainer fills it.")
    ] = False,
) -> None:
    """Print the DeepSpeed JSON of a run; reasons go to stderr."""
    from llmtrain.launch.job import Selection
    from llmtrain.launch.render import render as run_render
    from llmtrain.report.live import show_choices

    spec = _read(run_file, _options(hosts, config, model, None, None, None), sets, envs)
    rendered = run_render(spec, Selection(include=include, exclude=exclude, num_hosts=num_hosts))
    show_choices(rendered.choices)
    _finish(rendered.template if template else rendered.config, 0)


@app.command()
def smoke(hosts: Hosts = None, sets: Sets = None, envs: Envs = None, as_json: AsJson = False) -> None:
    """Train a tiny model for three steps, by the whole real path."""
    from llmtrain.launch.smoke import smoke as run_smoke
    from llmtrain.report.live import Live, show_outcome, show_stages

    live = Live(brief=True)
    try:
        report = run_smoke(hosts or os.environ.get("LLMTRAIN_HOSTS"), sets or (), envs or (), live.tell)
    finally:
        live.close()
    show_outcome(live, report.outcome)
    show_stages(live, report.stages)
    _finish(report.to_json() if as_json else None, int(report.outcome.exit_code))


def _options(
    hosts: str | None, config: str | None, model: str | None, data: str | None, output: str | None, env_file: str | None
) -> dict[str, tuple[str, Any]]:
    return {
        "hosts": ("--hosts", hosts or os.environ.get("LLMTRAIN_HOSTS")),
        "config": ("--config", config),
        "model.path": ("--model", model),
        "data.path": ("--data", data),
        "output": ("--output", output),
        "env_file": ("--env-file", env_file),
    }


def _read(
    run_file: str | None, options: dict[str, tuple[str, Any]], sets: list[str] | None, envs: list[str] | None
) -> RunSpec:
    from llmtrain.spec.runfile import read_run

    return read_run(run_file, options=options, sets=sets or (), envs=envs or ())


register_check(app)
register_sync(app)
register_plan(app)
register_everyday(app)
register_model(app)
register_jobs(app)
arrange(app)


def main() -> None:
    """Entry point of the console script: errors become lines and exit codes here, and only here."""
    try:
        code = app(prog_name="llmtrain", standalone_mode=False)
    except LlmtrainError as error:
        code = _fail(error)
    except Exception as error:
        code = _fail_otherwise(error)
    sys.stdout.flush()
    sys.stderr.flush()
    if code in {ExitCode.INTERRUPTED, ExitCode.TERMINATED}:
        os._exit(code)  # threads may still wait for a host that does not answer
    sys.exit(code)


def _fail(error: LlmtrainError) -> int:
    from llmtrain.report.errors import error_json, show_error

    show_error(error)
    if "--json" in before_program(sys.argv):
        sys.stdout.write(json.dumps(error_json(error), indent=2) + "\n")
    return int(error.exit_code)


def _fail_otherwise(error: Exception) -> int:
    """A mistake in the options, or a bug; typer has had click inside and outside, so its errors are told by shape."""
    if type(error).__name__ == "NoArgsIsHelpError":
        sys.stdout.write(f"{error}\n")
        return ExitCode.USAGE
    if getattr(error, "exit_code", None) == ExitCode.USAGE and hasattr(error, "format_message"):
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "llmtrain"
        message = str(error.format_message()).strip().rstrip(".")
        return _fail(UsageError(message[:1].lower() + message[1:], where="command line", fix=f"{command} --help"))
    from llmtrain.report.errors import show_bug

    return int(show_bug(error))


if __name__ == "__main__":
    main()
