"""Read a run file, lay command-line options over it, and say precisely what is wrong with either."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from llmtrain.errors import InputFileError, LlmtrainError, UsageError
from llmtrain.spec.runspec import Part, RunSpec, check_env
from llmtrain.spec.yamlfile import KeyPath, parse_yaml, read_text, read_yaml

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pydantic_core import ErrorDetails

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
DEFAULT_NAME = "llmtrain.yaml"
PATH_KEYS: tuple[KeyPath, ...] = (
    ("hosts",),
    ("output",),
    ("environment",),
    ("env_file",),
    ("model", "path"),
    ("data", "path"),
    ("data", "eval"),
    ("sync", "paths"),
)


@dataclass
class Layers:
    """Raw values by origin, later ones on top."""

    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[KeyPath, int] = field(default_factory=dict)
    options: dict[KeyPath, str] = field(default_factory=dict)
    """Keys that came from the command line, with the option as typed."""
    file: str | None = None

    def where(self, path: KeyPath) -> str | None:
        """Where the value at ``path``, or the nearest block above it, was written."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.options:
                return self.options[path[:end]]
            if path[:end] in self.lines:
                return f"{self.file}:{self.lines[path[:end]]}"
        return self.file


def read_run(
    run_file: str | None,
    *,
    options: Mapping[str, tuple[str, Any]] | None = None,
    sets: Sequence[str] = (),
    envs: Sequence[str] = (),
    folder: Path | None = None,
) -> RunSpec:
    """Read the run file and lay the options over it.

    Args:
        run_file: its path; ``llmtrain.yaml`` of ``folder`` if that exists and none is named.
        options: dotted key -> (option as typed, value); later layers win.
        sets: ``KEY=VALUE`` texts, VALUE read as YAML.
        envs: ``NAME=VALUE`` texts.
        folder: what relative paths of options refer to; the current one if not given.

    Returns:
        The run with absolute paths. Relative paths of the file refer to the file's own folder.

    Raises:
        InputFileError: a fault in the file.
        UsageError: a fault in an option.
    """
    base = folder or Path.cwd()
    layers = _read_layers(run_file, base)
    for key, (option, value) in (options or {}).items():
        if value is not None:
            _put(layers, tuple(key.split(".")), _absolute(tuple(key.split(".")), value, base), option)
    for text in sets:
        path, value = _parse_set(text)
        _put(layers, path, _absolute(path, value, base), f"--set {text}")
    for text in envs:
        key, value = _parse_assignment(text, "--env")
        # A secret may stand in an option; it must not come back in an error message.
        _put(layers, ("env", key), value, f"--env {key}=...")
    return _with_env_file(_validate(layers))


def _read_layers(run_file: str | None, base: Path) -> Layers:
    default = base / DEFAULT_NAME
    path = Path(run_file) if run_file else default
    if run_file is None and not default.exists():
        return Layers()
    values, lines = read_yaml(path, what="run file")
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise InputFileError(
            "the run file is not a mapping of keys", where=f"{path}:1", fix="write lines like 'name: x'"
        )
    layers = Layers(values=values, lines=lines, file=str(path))
    for key in PATH_KEYS:
        value = _get(values, key)
        if isinstance(value, (str, list)):
            _put_value(values, key, _absolute(key, value, path.resolve().parent))
    data = values.get("data")
    mix = data.get("mix") if isinstance(data, dict) else None
    for item in mix if isinstance(mix, list) else ():
        if isinstance(item, dict):
            item["path"] = _absolute(("data", "path"), item.get("path"), path.resolve().parent)
    config = values.get("config")
    if isinstance(config, str) and _looks_like_file(config):
        values["config"] = str(path.resolve().parent / config)
    return layers


def _looks_like_file(config: str) -> bool:
    return "/" in config or config.endswith((".json", ".yaml", ".yml"))


def _absolute(path: KeyPath, value: Any, base: Path) -> Any:
    if isinstance(value, list) and path in PATH_KEYS:
        return [_absolute_text(path, item, base) for item in value]
    return _absolute_text(path, value, base)


def _absolute_text(path: KeyPath, value: Any, base: Path) -> Any:
    if not isinstance(value, str) or not value:
        return value
    if path == ("config",) and _looks_like_file(value):
        return str(base / Path(value).expanduser())
    if path not in PATH_KEYS:
        return value
    host, colon, rest = value.partition(":")
    if path == ("output",) and colon and "/" not in host:
        return f"{host}:{rest}"
    if path == ("model", "path") and _HUB_NAME.fullmatch(value) and not (base / value).exists():
        return value  # perhaps the name of a model on a hub; read_model says what to do then
    return os.path.normpath(base / Path(value).expanduser())


def _get(values: dict[str, Any], path: KeyPath) -> Any:
    node: Any = values
    for key in path:
        if not isinstance(node, dict) or key not in node:
            return None
        node = node[key]
    return node


def _put_value(values: dict[str, Any], path: KeyPath, value: Any) -> None:
    node = values
    for key in path[:-1]:
        child = node.get(key)
        if not isinstance(child, dict):
            child = {}
            node[key] = child
        node = child
    node[path[-1]] = value


def _put(layers: Layers, path: KeyPath, value: Any, option: str) -> None:
    _put_value(layers.values, path, value)
    layers.options[path] = option


def find_run_file(named: str | None) -> str | None:
    """Absolute path of the run file that a command reads, if it reads one."""
    path = Path(named or DEFAULT_NAME)
    return str(path.resolve()) if named or path.exists() else None


def parse_variables(texts: Sequence[str]) -> dict[str, str]:
    """``NAME=VALUE`` texts of ``--env``.

    Raises:
        UsageError: one is not such a text.
    """
    return dict(_parse_assignment(text, "--env") for text in texts)


def lay_over(values: dict[str, Any], sets: Sequence[str]) -> dict[str, Any]:
    """Raw values with ``--set`` texts laid over them; paths refer to the current folder.

    Raises:
        UsageError: one is not such a text, or names a key or value that a run file cannot have.
    """
    layers = Layers(values=values)
    for text in sets:
        path, value = _parse_set(text)
        _put(layers, path, _absolute(path, value, Path.cwd()), f"--set {text}")
    return layers.values


def _parse_assignment(text: str, option: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UsageError(f"{option} needs NAME=VALUE", where=option, fix=f"write {option} NAME=VALUE")
    return key.strip(), value


def _parse_set(text: str) -> tuple[KeyPath, Any]:
    key, value = _parse_assignment(text, "--set")
    path = tuple(key.split("."))
    if not all(path):
        raise UsageError(f"--set key {key!r} has an empty part", where=f"--set {text}", fix="write --set batch.micro=2")
    try:
        parsed, _ = parse_yaml(value, name="--set")
    except InputFileError as error:
        raise UsageError(error.error, where=f"--set {text}", fix=f"quote the value: --set '{key}=\"...\"'") from None
    return path, parsed


def _validate(layers: Layers) -> RunSpec:
    from pydantic import ValidationError

    try:
        return RunSpec.model_validate(layers.values)
    except ValidationError as error:
        raise _explain(error.errors()[0], layers) from None


def _explain(detail: ErrorDetails, layers: Layers) -> LlmtrainError:
    loc = tuple(str(part) for part in detail["loc"])
    path = _known_path(loc, layers.values)
    if path == ("env",):
        path = _find_variable(layers.values)
    where = layers.where(path)
    kind = UsageError if any(path[:end] in layers.options for end in range(1, len(path) + 1)) else InputFileError
    key = ".".join(path)
    if detail["type"] == "extra_forbidden":
        valid = _valid_keys(path[:-1])
        near = difflib.get_close_matches(path[-1], valid, n=1, cutoff=0.5)
        fix = f"did you mean {'.'.join((*path[:-1], near[0]))}?" if near else f"valid keys: {', '.join(valid)}"
        return kind(f"unknown key {key}", where=where, fix=fix)
    message = detail["msg"].removeprefix("Value error, ")
    if message[1:2].islower():
        message = message[0].lower() + message[1:]
    shown = "" if path[:1] == ("env",) else f", found {_shorten(detail['input'])}"
    return kind(f"{key}: {message}{shown}" if key else message, where=where, fix="correct the value")


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _known_path(loc: KeyPath, values: dict[str, Any]) -> KeyPath:
    """Drop the parts of a pydantic location that name union members or validators, not keys of the file."""
    path: list[str] = []
    node: Any = values
    for part in loc:
        name = part
        if isinstance(node, dict) and name in node:
            path.append(name)
            node = node[name]
        elif isinstance(node, (list, tuple)) and name.isdigit() and int(name) < len(node):
            path.append(name)
            node = node[int(name)]
        else:
            break
    return tuple(path) or loc


def _find_variable(values: dict[str, Any]) -> KeyPath:
    """Which variable is the bad one; the check of all of them only says that one is."""
    variables = _get(values, ("env",))
    for key, text in variables.items() if isinstance(variables, dict) else ():
        try:
            check_env(str(key), str(text))
        except ValueError:  # noqa: PERF203
            return "env", str(key)
    return ("env",)


def _valid_keys(path: KeyPath) -> list[str]:
    model: type[Part] = RunSpec
    for key in path:
        info = next((f for name, f in model.model_fields.items() if key in (name, f.alias)), None)
        if info is None:
            return [name for name in model.model_fields if name]
        inner = [item for item in (info.annotation, *get_args(info.annotation)) if _is_part(item)]
        if not inner:
            continue
        model = inner[0]
    return [info.alias or name for name, info in model.model_fields.items()]


def _is_part(item: Any) -> bool:
    return isinstance(item, type) and issubclass(item, Part)


def _with_env_file(spec: RunSpec) -> RunSpec:
    """Variables of the file come under those written in ``env:`` or ``--env``."""
    if spec.env_file is None:
        return spec
    return spec.model_copy(update={"env": {**read_env_file(spec.env_file), **spec.env}})


def read_env_file(path: str) -> dict[str, str]:
    """Read ``NAME=VALUE`` lines; blank lines and lines from ``#`` are skipped, one pair of outer quotes is removed.

    Raises:
        InputFileError: a line that is none of these, or a reserved name. The value is never shown.
    """
    result: dict[str, str] = {}
    for number, raw in enumerate(read_text(path, what="environment file").split("\n"), start=1):
        line = raw.rstrip("\r")
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        key, equals, value = line.partition("=")
        try:
            if not equals:
                raise ValueError("a line without '='")  # noqa: TRY301
            check_env(key.strip(), value)
        except ValueError as error:
            fix = "write NAME=VALUE, without 'export'"
            raise InputFileError(str(error), where=f"{path}:{number}", fix=fix) from None
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        result[key.strip()] = value
    return result
