"""``COMMAND OPTIONS -- PROGRAM ARGS``: what stands behind ``--`` is not ours to read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from typer.core import TyperCommand

from llmtrain.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import typer

    from llmtrain.spec.script import Script

KEY = "llmtrain.program"


class WithProgram(TyperCommand):
    """A command that keeps what stands behind ``--`` as it is."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Set the program aside before the options are read."""
        if "--" in args:
            at = args.index("--")
            ctx.meta[KEY] = tuple(args[at + 1 :])
            args = args[:at]
        return super().parse_args(ctx, args)


def before_program(argv: Sequence[str]) -> list[str]:
    """Our own words of a command line."""
    return list(argv[: list(argv).index("--")] if "--" in argv else argv)


def read_words(context: typer.Context) -> tuple[str, ...] | None:
    """What stood behind ``--``; None where there was no ``--``."""
    words: tuple[str, ...] | None = context.meta.get(KEY)
    return words


def read_program(context: typer.Context, code: str | None) -> Script | None:
    """The user's program, if there is one.

    Raises:
        UsageError: ``--code`` without a program, or a program that cannot be understood.
    """
    from llmtrain.spec.script import parse_script

    words = read_words(context)
    if words is None:
        if code is not None:
            raise UsageError("--code goes with a program of yours", where="--code", fix="add -- train.py ARGS")
        return None
    return parse_script(words, code=code, folder=Path.cwd())
