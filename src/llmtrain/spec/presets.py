"""DeepSpeed configurations by name (those that are shipped) or by path (a user's YAML or JSON)."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.errors import InputFileError
from llmtrain.spec.jsonfile import parse_json
from llmtrain.spec.yamlfile import parse_yaml, read_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmtrain.spec.yamlfile import KeyPath


@dataclass(frozen=True, kw_only=True)
class Layer:
    """DeepSpeed keys from one place, and where each was written."""

    keys: Mapping[str, Any]
    """The keys, as written; "auto" and null are kept."""
    name: str
    """A preset's name, a file's path, or words such as "the run file or --set"."""
    file: str | None = None
    """The file the lines refer to."""
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    """1-based line of each key path."""

    def has(self, path: KeyPath) -> bool:
        """Whether this layer gives a value at ``path``."""
        node: Any = self.keys
        for key in path:
            if not isinstance(node, dict) or key not in node:
                return False
            node = node[key]
        return True

    def where(self, path: KeyPath) -> str:
        """Where the value at ``path``, or the nearest block above it, was written."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.lines:
                return f"{self.file}:{self.lines[path[:end]]} ({'.'.join(path)})"
        return f"{self.file or self.name} ({'.'.join(path)})"


def overrides_layer(keys: Mapping[str, Any]) -> Layer:
    """Wrap the ``deepspeed:`` block of a run file, options laid over it."""
    return Layer(keys=keys, name="deepspeed: of the run file, or --set deepspeed.KEY=VALUE")


def presets_folder() -> Path:
    """The folder of shipped presets: inside the package in a wheel, at the repository's top when editable."""
    here = Path(__file__).resolve()
    packaged = here.parents[1] / "configs"
    return packaged if packaged.is_dir() else here.parents[3] / "configs"


def preset_names() -> tuple[str, ...]:
    """Names ``--config`` accepts besides paths, sorted."""
    return tuple(sorted(path.stem for path in presets_folder().glob("*.yaml")))


def read_config(name_or_path: str) -> Layer:
    """Read a DeepSpeed configuration.

    Args:
        name_or_path: a preset's name, or the path of a YAML or JSON file (recognised by a slash or its ending).

    Raises:
        InputFileError: no such preset or file, not a mapping, a syntax error, a duplicate key, an object tag.
    """
    if "/" in name_or_path or name_or_path.endswith((".yaml", ".yml", ".json")):
        return _read_file(Path(name_or_path).expanduser(), name_or_path)
    names = preset_names()
    if name_or_path not in names:
        raise _no_preset(name_or_path, names)
    return _read_file(presets_folder() / f"{name_or_path}.yaml", name_or_path)


def _no_preset(name: str, names: tuple[str, ...]) -> InputFileError:
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    fix = f"did you mean {' or '.join(near)}?" if near else f"presets: {', '.join(names)}"
    if Path(name).is_file():
        fix = f"the file of that name is --config ./{name}; {fix}"
    return InputFileError(f"no preset is called {name!r}", where=f"--config {name}", fix=fix)


def _read_file(path: Path, name: str) -> Layer:
    text = read_text(path, what="DeepSpeed configuration")
    parse = parse_json if path.suffix == ".json" else parse_yaml
    keys, lines = parse(text, name=str(path))
    if not isinstance(keys, dict) or not keys:
        found = "empty" if not keys else f"a {type(keys).__name__}"
        raise InputFileError(
            f"the DeepSpeed configuration is {found}, not a mapping of keys",
            where=f"{path}:1",
            fix="start from a preset: llmtrain render --config zero3",
        )
    return Layer(keys=keys, name=name, file=str(path), lines=lines)
