"""Run a program of the user's own as one rank: ``run`` is called on every rank.

It runs in this process, so that an exception is recorded with its place and a console script starts after
communication is up: tools that load a model before they connect would otherwise be told a world size of 1.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import threading
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.errors import InputFileError, RankFailedError

if TYPE_CHECKING:
    from llmtrain.train.place import Place
    from llmtrain.train.records import Beat
    from llmtrain.train.runjson import RankRun, ScriptPart


def run(run: RankRun, _place: Place, beat: Beat) -> None:
    """Run it to its end.

    Raises:
        RankFailedError: it ended by ``sys.exit`` with another code than 0.
        InputFileError: the environment has no such command.
    """
    script = run.script
    if script is None:
        raise InputFileError("the run file has no script", where="run.json")
    run.output.mkdir(exist_ok=True)
    os.chdir(script.cwd)
    if script.kind != "file" or os.environ.get("DS_ACCELERATOR") == "cpu":
        _connect()
    beat.enter("script", 0)
    try:
        _start(script)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise RankFailedError(f"{script.target} ended with exit code {end.code}") from end
    _finish()


def _connect() -> None:
    """Communication first; on processors for files too, where Hugging Face's Trainer would connect too late."""
    import deepspeed
    import torch.distributed as dist

    if not dist.is_initialized():
        deepspeed.init_distributed(verbose=False)


def _start(script: ScriptPart) -> None:
    if script.kind == "file":
        sys.argv = [script.target, *script.args]
        sys.path.insert(0, str(Path(script.target).parent))
        runpy.run_path(script.target, run_name="__main__")
    elif script.kind == "module":
        sys.argv = [script.target, *script.args]  # runpy puts the module's path first
        sys.path.insert(0, script.cwd)
        runpy.run_module(script.target, run_name="__main__", alter_sys=True)
    else:
        _start_command(script)


def _start_command(script: ScriptPart) -> None:
    """What the command's own launcher does: import its function and call it."""
    program = Path(sys.executable).parent / script.target
    sys.argv = [str(program), *script.args]
    found = [entry for entry in entry_points(group="console_scripts") if entry.name == script.target]
    if found:
        sys.exit(found[0].load()())
    if not program.is_file():
        raise InputFileError(
            f"the environment has no command {script.target}",
            where=str(program),
            fix="install it there, or name the environment: --set environment=PREFIX",
        )
    sys.path.insert(0, str(program.parent))
    runpy.run_path(str(program), run_name="__main__")


def _finish() -> None:
    """What the interpreter does at its end, which a rank never comes to: threads, then functions set for the exit."""
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    atexit._run_exitfuncs()  # noqa: SLF001 - the only way to run them without ending
