"""Strict YAML: safe tags only, no duplicate keys, and the line of every key kept for error messages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.errors import InputFileError

if TYPE_CHECKING:
    import yaml

KeyPath = tuple[str, ...]


def parse_yaml(text: str, *, name: str) -> tuple[Any, dict[KeyPath, int]]:
    """Parse one YAML document.

    Args:
        text: the document.
        name: what to call it in errors, usually its path.

    Returns:
        The value, and the 1-based line of every mapping key and list item, by key path (list items
        as their index written as text).

    Raises:
        InputFileError: not YAML, an object tag, a duplicate key, a key that is not text.
    """
    import yaml

    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None:
            return None, {}
        lines: dict[KeyPath, int] = {}
        _walk(node, (), lines, name)
        loader = yaml.SafeLoader("")
        return loader.construct_document(node), lines
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        problem = " ".join((error.problem or "not readable").split())
        raise InputFileError(
            f"not valid YAML: {problem}", where=f"{name}:{line}", fix="correct the syntax at that line"
        ) from None
    except yaml.YAMLError as error:
        raise InputFileError(f"not valid YAML: {error}", where=name, fix="save the file as UTF-8 text") from None
    except RecursionError:
        raise InputFileError("nested too deeply, or an alias refers to itself", where=name, fix="flatten it") from None


def _walk(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], name: str) -> None:
    import yaml

    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            _note_key(key_node, path, lines, name)
            _walk(value_node, (*path, str(key_node.value)), lines, name)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            child = (*path, str(index))
            lines[child] = item.start_mark.line + 1
            _walk(item, child, lines, name)


def _note_key(key_node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], name: str) -> None:
    line = key_node.start_mark.line + 1
    if key_node.tag != "tag:yaml.org,2002:str":
        shown = key_node.value if isinstance(key_node.value, str) else "a list or mapping"
        raise InputFileError(
            f"the key {shown} is not text", where=f"{name}:{line}", fix="write the key as a word, or put it in quotes"
        )
    child = (*path, str(key_node.value))
    if child in lines:
        raise InputFileError(
            f"the key {'.'.join(child)} stands twice (first on line {lines[child]})",
            where=f"{name}:{line}",
            fix="keep one of the two",
        )
    lines[child] = line


def read_text(path: str | Path, *, what: str) -> str:
    """Read a small UTF-8 file of the user's.

    Raises:
        InputFileError: missing, a folder, unreadable, or not UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputFileError(f"no such {what}", where=str(path), fix=f"ls {Path(path).parent}") from None
    except IsADirectoryError:
        raise InputFileError(f"the {what} is a folder", where=str(path), fix="name a file") from None
    except UnicodeDecodeError as error:
        raise InputFileError(
            f"the {what} is not UTF-8 text (byte {error.start})", where=str(path), fix="save it as UTF-8"
        ) from None
    except OSError as error:
        raise InputFileError(
            f"the {what} cannot be read: {error.strerror}", where=str(path), fix=f"ls -l {path}"
        ) from None


def read_yaml(path: str | Path, *, what: str = "file") -> tuple[Any, dict[KeyPath, int]]:
    """Read and parse a YAML file; see :func:`parse_yaml`."""
    return parse_yaml(read_text(path, what=what), name=str(path))
