"""A launch plan as people read it, and as JSON."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from llmtrain.report.errors import clean

if TYPE_CHECKING:
    from rich.console import Console

    from llmtrain.launch.prepare import HostPlan, LaunchPlan

SECRET_FILES = ("env.json", "bin/python")
"""Files whose text may hold values a user wants nobody to read."""


def show_plan(console: Console, plan: LaunchPlan, output: str) -> None:
    """Hosts and ranks, what was chosen and why."""
    table = Table(box=None, pad_edge=False)
    for column in ("host", "ranks", "slots", "network", "interpreter"):
        table.add_column(column, overflow="fold")
    for host in plan.hosts:
        network = f"{host.interface} {host.address}"
        cells = (host.name, _join(host.ranks), _join(host.slots), network, host.python)
        table.add_row(*(Text(clean(cell)) for cell in cells))  # as text: brackets are not markup
    console.print(table)
    console.print("chosen:", markup=False)
    for choice in plan.choices:
        value = "(left out)" if choice.value is None else str(choice.value)
        console.print(clean(f"  {choice.key} = {value}: {choice.reason}"), markup=False)
    batch = plan.deepspeed.batch
    console.print(f"{batch}; model goes to {clean(output)}", markup=False)


def show_dry_run(console: Console, plan: LaunchPlan, output: str) -> None:
    """All that a real run would write and start."""
    console.print("\ncopied to these hosts:" if plan.copies else "\nnothing to copy", markup=False)
    for name, path in plan.copies:
        instead = " instead of what is there" if (name, path) in plan.replaced else ""
        console.print(clean(f"  {name}:{path}{instead}"), markup=False)
    console.print("\nfiles on every host, in its run folder:", markup=False)
    for host in plan.hosts:
        console.print(f"  {clean(host.name)}:{host.own_dir}", markup=False)
        for file in host.files:
            console.print(f"    {file.mode:o} {file.path} ({len(file.text.encode())} bytes)", markup=False)
    console.print("    600 code/llmtrain/... (the rank code of this llmtrain)", markup=False)
    if plan.code is not None:
        console.print(clean(f"    600 project/... ({plan.code})"), markup=False)
    console.print("\nenvironment of the ranks (first host; values of yours are not shown):", markup=False)
    for key, value in plan.hosts[0].env.items():
        console.print(f"  {key}={value if key not in plan.private_env else '(yours)'}", markup=False)
    console.print("\nDeepSpeed configuration:", markup=False)
    console.print(json.dumps(plan.deepspeed.config, indent=2), markup=False)
    console.print("\ncommand:", markup=False)
    console.print(shlex.join(plan.runner_argv), markup=False)
    console.print(f"\ndry run: nothing was written; the model would go to {clean(output)}", markup=False)


def plan_json(plan: LaunchPlan, output: str) -> dict[str, Any]:
    """The twin of :func:`show_dry_run`."""
    return {
        "ok": True,
        "exit_code": 0,
        "dry_run": True,
        "run_id": plan.run_id,
        "world_size": plan.world_size,
        "hosts": [_host_json(plan, host) for host in plan.hosts],
        "copies": [
            {"host": host, "path": path, "replaces": (host, path) in plan.replaced} for host, path in plan.copies
        ],
        "master": f"{plan.master_addr}:{plan.master_port}",
        "run": dict(plan.run),
        "head_files": dict(plan.head_files),
        "command": list(plan.runner_argv),
        "command_env": {key: value for key, value in plan.runner_env.items() if key != "SSH_AUTH_SOCK"},
        "choices": [{"key": choice.key, "value": choice.value, "reason": choice.reason} for choice in plan.choices],
        "output": output,
    }


def _host_json(plan: LaunchPlan, host: HostPlan) -> dict[str, Any]:
    return {
        "name": host.name,
        "ranks": list(host.ranks),
        "slots": list(host.slots),
        "interface": host.interface,
        "address": host.address,
        "python": host.python,
        "run_dir": host.own_dir,
        "files": [
            {
                "path": file.path,
                "mode": f"{file.mode:o}",
                "bytes": len(file.text.encode()),
                "text": None if file.path in SECRET_FILES else file.text,
            }
            for file in host.files
        ],
        "env": {key: None if key in plan.private_env else value for key, value in host.env.items()},
    }


def _join(values: tuple[int, ...]) -> str:
    if len(values) > 2 and values == tuple(range(values[0], values[-1] + 1)):
        return f"{values[0]}-{values[-1]}"
    return ",".join(map(str, values))
