"""Write docs/run-file.md from the run file's own definition, so that it cannot go stale."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic_core import PydanticUndefined

from llmtrain.spec.runspec import Part, RunSpec

TARGET = Path(__file__).resolve().parents[1] / "docs" / "run-file.md"
HEAD = """# The run file

`llmtrain.yaml` of the current folder, or the file named first on the command line. Every key is optional in the file;
hosts, config, model.path and data.path must come from somewhere. Unknown keys are refused with the nearest valid one.
Relative paths refer to the file's folder; in options they refer to the current folder. `--set KEY=VALUE` reaches every
key, VALUE is read as YAML.

| key | default | values | meaning |
| --- | --- | --- | --- |
"""
TAIL = """
`per_host` takes host names as keys and, under each, `python`, `network` and `node_dir`:

    per_host:
      gpu007: {python: /opt/train/bin/python, network: ib1}

`deepspeed` takes any DeepSpeed key and lays it over the preset; null removes one. `env_file` holds `NAME=VALUE` lines;
one pair of outer quotes is removed, nothing is expanded. Variables of `env` and `--env` win over it.
"""


def render() -> str:
    """The page."""
    return HEAD + "".join(_rows(RunSpec, "")) + TAIL


def _rows(model: type[Part], prefix: str) -> list[str]:
    rows = []
    for name, info in model.model_fields.items():
        key = f"{prefix}{info.alias or name}"
        if isinstance(info.annotation, type) and issubclass(info.annotation, Part):
            rows += _rows(info.annotation, f"{key}.")
            continue
        default = "" if info.default in (None, PydanticUndefined, {}, ()) else _shown(info.default)
        meaning = (info.description or "").replace("``", "`")
        rows.append(f"| `{key}` | {default} | {_values(info.annotation)} | {meaning} |\n")
    return rows


def _shown(value: Any) -> str:
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _values(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    parts = [part for part in get_args(annotation) if part is not type(None)]
    if get_origin(annotation) in {dict, tuple} or not parts:
        plain = {str: "text", int: "whole number", float: "number", bool: "`true`, `false`"}
        origin = get_origin(annotation)
        return plain.get(annotation, "list" if origin is tuple else "mapping" if origin is dict else "number")
    return " or ".join(dict.fromkeys(_values(part) for part in parts if not _is_constraint(part)))


def _is_constraint(part: Any) -> bool:
    return not isinstance(part, type) and get_origin(part) is None


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
    sys.stdout.write(f"{TARGET}\n")
