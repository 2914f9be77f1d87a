"""Who may import whom, as data; read from the source without running it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import llmtrain
from llmtrain.sync.bundle import PARTS

ROOT = Path(llmtrain.__file__).parent
ROOMS = {
    "cli": {"launch", "sync", "cluster", "plan", "spec", "report"},
    "launch": {"sync", "cluster", "plan", "spec"},
    "sync": {"cluster", "spec"},
    "cluster": {"spec"},
    "plan": {"spec"},
    "train": {"spec"},
    "report": {"launch", "sync", "cluster", "plan", "spec"},
    "spec": set(),
    "process": set(),
    "errors": set(),
}
"""Room -> rooms it may import, besides itself and what is for everyone."""
EVERYONE = {"errors", "process", "__version__"}
LIBRARIES = {
    "torch": ("train/",),
    "transformers": ("train/",),
    "deepspeed": ("train/",),
    "trl": ("train/",),
    "peft": ("train/",),
    "accelerate": ("train/",),
    "datasets": ("train/",),
    "safetensors": ("train/",),
    "gguf": ("train/",),
    "paramiko": ("cluster/ssh.py",),
    "subprocess": (
        "cluster/",
        "sync/hop.py",
        "launch/execute.py",
        "launch/stage.py",
        "launch/smoke.py",
        "launch/tokens.py",
        "launch/tracing.py",
        "train/entry.py",
        "train/stacks.py",
    ),
    "pydantic": ("spec/",),
    "yaml": ("spec/",),
    "typer": ("cli",),
    "rich": ("report/",),
}
"""Library -> where it may be imported."""
ON_THE_HEAD = {"torch", "transformers", "deepspeed", "pydantic", "paramiko", "rich.progress", "yaml"}
"""What must not be loaded before a command is chosen."""
MODULES = sorted(ROOT.rglob("*.py"))


def imported(path):
    """Dotted names that a module imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from names if node.module == "llmtrain" else [str(node.module)]


def room(name):
    """The room of a module; the command line has a module for each group of commands."""
    return "cli" if name.startswith("cli_") else name


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_rooms_import_only_what_they_may(path):
    """Every import of one of our own modules follows the arrows between the rooms."""
    own = room(path.relative_to(ROOT).parts[0].removesuffix(".py"))
    targets = {room(name.split(".")[1]) for name in imported(path) if name.startswith("llmtrain.")}
    assert targets <= ROOMS.get(own, set()) | EVERYONE | {own}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_libraries_are_imported_only_in_their_rooms(path):
    """Heavy libraries, and those that open a door out of this process, are imported only where they belong."""
    own = str(path.relative_to(ROOT))
    libraries = {name.split(".")[0] for name in imported(path)}
    assert [name for name in libraries & set(LIBRARIES) if not own.startswith(LIBRARIES[name])] == []


def test_command_line_starts_without_anything_heavy():
    """Importing the command line loads neither torch, deepspeed, pydantic nor paramiko."""
    code = "import sys, llmtrain.cli; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert ON_THE_HEAD & set(loaded) == set()


@pytest.mark.parametrize("name", ["entry", "guardian", "bootstrap", "stacks", "kernellog", "locks"])
def test_what_starts_first_on_a_host_needs_the_standard_library_only(name):
    """Leash, guardian and bootstrap load nothing that a bare interpreter lacks."""
    path = ROOT / f"train/{name}.py"
    ours = {item for item in imported(path) if item.startswith("llmtrain")}
    assert ours <= {
        "llmtrain.process",
        "llmtrain.errors",
        "llmtrain.train.stacks",
        "llmtrain.train.kernellog",
        "llmtrain.train.locks",
    }
    assert {item.split(".")[0] for item in imported(path)} - {"llmtrain"} <= sys.stdlib_module_names


def test_the_agent_of_a_sync_is_read_by_a_python_of_2016():
    """Its parts parse as Python 3.6 and import only the standard library and earlier parts."""
    for number, name in enumerate(PARTS):
        path = ROOT / f"sync/{name}.py"
        ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 6))
        ours = {item for item in imported(path) if item.startswith("llmtrain")}
        assert ours <= {"llmtrain.sync", *(f"llmtrain.sync.{part}" for part in PARTS[:number])}
        assert {item.split(".")[0] for item in imported(path)} - {"llmtrain"} <= sys.stdlib_module_names
