"""A program of the user's own instead of our fine-tune: what stands behind ``--`` of a launch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from llmtrain.errors import InputFileError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PLACES = ("ds_config", "ds_config_resolved", "output", "model", "data")
"""What is replaced in arguments, written in braces."""
_MARK = re.compile("|".join(rf"\{{{name}\}}" for name in PLACES))
_LAUNCHERS = ("deepspeed", "torchrun", "accelerate", "mpirun")


@dataclass(frozen=True, kw_only=True)
class Script:
    """A program and its arguments."""

    kind: Literal["file", "module", "console"]
    """A Python file, a module as after ``python -m``, or a command of the environment's ``bin``."""
    target: str
    """The file relative to ``code``, the module's name, or the command's name."""
    args: tuple[str, ...]
    """Arguments as typed."""
    code: str | None
    """Folder that is sent to all hosts; None where nothing is."""
    cwd: str
    """Where it runs, relative to ``code``."""

    def __str__(self) -> str:
        return f"-m {self.target}" if self.kind == "module" else self.target

    def uses(self, place: str) -> bool:
        """Whether an argument names a place such as ``{model}``."""
        return any(f"{{{place}}}" in arg for arg in self.args)


def fill_args(args: Sequence[str], places: Mapping[str, str | None]) -> tuple[str, ...]:
    """Arguments with the places in braces replaced, in one pass; all else stays byte for byte.

    Raises:
        UsageError: a place that this run does not have.
    """

    def fill(match: re.Match[str]) -> str:
        value = places[match[0][1:-1]]
        if value is None:
            name = match[0][1:-1]
            raise UsageError(f"an argument says {match[0]}, and no {name} is given", fix=f"add --{name} PATH")
        return value

    return tuple(_MARK.sub(fill, arg) for arg in args)


def parse_script(words: Sequence[str], *, code: str | None, folder: Path) -> Script:
    """Understand what stands behind ``--``.

    Args:
        words: program and arguments.
        code: ``--code``.
        folder: the user's current folder.

    Raises:
        UsageError: no program, a launcher instead of one, or a file outside of the code that is sent.
        InputFileError: the file does not exist.
    """
    rest = list(words)
    if rest and re.fullmatch(r"python[\d.]*", Path(rest[0]).name):
        rest = rest[1:]  # python train.py: the hosts' own interpreter is meant
    if not rest or rest == ["-m"]:
        raise UsageError("nothing to run stands after --", where="--", fix="write -- train.py ARGS")
    if rest[0] == "-m":
        return _module(rest[1], tuple(rest[2:]), code, folder)
    if rest[0] in _LAUNCHERS:
        raise UsageError(
            f"llmtrain starts the ranks itself, in place of {rest[0]}",
            where=f"-- {rest[0]}",
            fix="write only the program and its arguments: -- train.py ARGS",
        )
    if rest[0].endswith(".py") or (folder / rest[0]).is_file():
        return _file(rest[0], tuple(rest[1:]), code, folder)
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*", rest[0]):
        raise UsageError(
            f"{rest[0]!r} is neither a file here, nor -m MODULE, nor the name of a command",
            where="--",
            fix="write -- train.py ARGS",
        )
    _need_code(rest[1:], code, folder)
    return _script("console", rest[0], tuple(rest[1:]), code, folder)


def _script(
    kind: Literal["file", "module", "console"], target: str, args: tuple[str, ...], code: str | None, folder: Path
) -> Script:
    cwd = "."
    if code is not None:
        code = str((folder / code).resolve())
        if folder.resolve().is_relative_to(code):
            cwd = folder.resolve().relative_to(code).as_posix()
    return Script(kind=kind, target=target, args=args, code=code, cwd=cwd)


def _file(word: str, args: tuple[str, ...], code: str | None, folder: Path) -> Script:
    path = folder / Path(word).expanduser()
    if not path.is_file():
        raise InputFileError("no such script", where=str(path), fix="name an existing file after --")
    # Not resolved: a link to a script brings the folder it is seen in, where its neighbours are.
    path = path.parent.resolve() / path.name
    top = (folder / code).resolve() if code is not None else path.parent
    if not path.is_relative_to(top):
        raise UsageError(
            "the script is not in the code folder", where=f"--code {code}", fix=f"use --code {path.parent}, or a parent"
        )
    return _script("file", path.relative_to(top).as_posix(), args, str(top), folder)


def _module(name: str, args: tuple[str, ...], code: str | None, folder: Path) -> Script:
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", name):
        raise UsageError(f"{name!r} is not the name of a module", where="-m", fix="write -m package.module")
    top = name.partition(".")[0]
    if code is None and ((folder / top).is_dir() or (folder / f"{top}.py").is_file()):
        code = str(folder)  # it is found here, as with python -m
    if code is None:
        _need_code(args, code, folder)
    return _script("module", name, args, code, folder)


def _need_code(args: Sequence[str], code: str | None, folder: Path) -> None:
    """Nothing is sent for a command of the environment, so a file named in its arguments would be missing."""
    if code is not None:
        return
    for arg in args:
        name = arg.rpartition("=")[2]
        if Path(name).suffix and not name.startswith("/") and (folder / name).is_file():
            raise UsageError(
                f"{name} is a file here, and would not be on the hosts",
                where=f"-- ... {arg}",
                fix="add --code . (sends this folder), or --code DIR and run from inside it",
            )
