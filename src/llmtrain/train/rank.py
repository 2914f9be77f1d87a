"""One rank: ``python -u -m llmtrain.train.rank RUN_JSON``.

Checks that it is one of the planned ranks, binds its cores, runs the task that run.json names, and leaves a done
record whatever happens. DeepSpeed's launcher has set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
Nothing heavy is imported before the checks, so that a wrong launch ends within a second.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from llmtrain.errors import InputFileError, UsageError
from llmtrain.process import write_json
from llmtrain.train.failure import describe_failure
from llmtrain.train.place import parse_place
from llmtrain.train.records import SCHEMA, Beat
from llmtrain.train.runjson import read_run
from llmtrain.train.stacks import NUMBER

if TYPE_CHECKING:
    from llmtrain.train.place import Place
    from llmtrain.train.runjson import RankRun

TASKS = {"finetune": "llmtrain.train.finetune", "script": "llmtrain.train.script"}
"""Task in run.json -> module whose ``run(run, place, beat)`` does it."""


def execute(run_json: Path, beat: Beat | None = None) -> int:
    """Run the task and write this rank's done record.

    Returns:
        0 after success, 1 after an exception, which is printed and recorded.
    """
    rank = _number(os.environ.get("RANK"))
    beat = beat or Beat(run_json.parent, rank)
    world_size = _number(os.environ.get("WORLD_SIZE"))
    error: dict[str, str] | None = None
    more: dict[str, Any] = {}
    try:
        run = read_run(run_json)
        place = parse_place(os.environ, run.world_size)
        world_size = place.world_size
        _settle(run, place)
        more = _find_task(run)(run, place, beat) or {}
    except BaseException as problem:  # noqa: BLE001 - whatever ends a rank is recorded
        error = describe_failure(problem)
        traceback.print_exception(problem)
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "rank": rank,
        "ok": error is None,
        "step": beat.step,
        "world_size": world_size,
        "error": error,
        "exit_code": 0 if error is None else 1,
        "signal": None,
        "time": time.time(),
        **more,
    }
    if error is None:
        beat.enter("done")
    done = run_json.parent / "done"
    done.mkdir(exist_ok=True)
    write_json(done / f"{rank}.json", document)
    return 0 if error is None else 1


def _settle(run: RankRun, place: Place) -> None:
    """Bind cores and threads; must come before torch is imported."""
    faulthandler.enable()
    stacks = run.run_dir / "stacks"
    stacks.mkdir(exist_ok=True)
    # Kept open for the life of the rank; written to when the guardian asks what the rank is doing.
    faulthandler.register(NUMBER, (stacks / f"{place.rank}.txt").open("w", encoding="utf-8"), all_threads=True)
    cores = run.cores.get(place.local_rank)
    if cores:
        try:
            os.sched_setaffinity(0, cores)
        except OSError as problem:
            # A container may allow other CPUs than the host shows; training unbound is slower, not wrong.
            sys.stderr.write(f"warning: cannot bind to cores {list(cores)}: {problem}\n")
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(run.threads)
    # Data and model are on this host, and nobody is told that a run started.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _find_task(run: RankRun) -> Any:
    if run.task not in TASKS:
        raise InputFileError(f"task: {run.task!r} is unknown; known: {', '.join(TASKS)}", where="run.json")
    return importlib.import_module(TASKS[run.task]).run


def _number(text: str | None) -> int:
    try:
        return int(text or "")
    except ValueError:
        return -1


def _leave(code: int) -> NoReturn:
    """End now.

    The interpreter's own exit can abort (-6) or hang in threads of communication libraries after a good run, and
    waits for batch-loading processes after a bad one. Everything that matters is on disk by now.
    """
    for child in multiprocessing.active_children():
        child.terminate()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def main(argv: list[str]) -> int:
    """Take the one argument and run."""
    if len(argv) != 1:
        raise UsageError("usage: python -u -m llmtrain.train.rank RUN_JSON")
    return execute(Path(argv[0]))


if __name__ == "__main__":
    _leave(main(sys.argv[1:]))
