"""How ``llmtrain --help`` groups the commands, and what a shell completes beyond their names."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

GROUPS: dict[str, tuple[str, ...]] = {
    "Run": ("launch", "smoke"),
    "Before a run": ("init", "hosts", "check", "data", "plan", "map", "render"),
    "Bring to the hosts": ("sync", "sync-weights", "sync-env"),
    "While it runs": ("jobs", "status", "logs", "attach", "stop", "resume", "clean", "who", "exec"),
    "After a run": ("ask", "merge", "export", "diff", "compare"),
}
"""Heading -> commands under it, in the order of a run's life."""
OTHERS = "More"


def arrange(app: typer.Typer) -> None:
    """Put every registered command under its heading, headings and commands in the order above."""
    order = {name: (at, heading) for at, (heading, name) in enumerate(_pairs())}
    for command in app.registered_commands:
        command.rich_help_panel = order.get(_name(command), (0, OTHERS))[1]
    app.registered_commands.sort(key=lambda command: order.get(_name(command), (len(order), OTHERS))[0])


def _pairs() -> list[tuple[str, str]]:
    return [(heading, name) for heading, names in GROUPS.items() for name in names]


def _name(command: typer.models.CommandInfo) -> str:
    return command.name or (command.callback.__name__ if command.callback else "")


def complete_preset(incomplete: str) -> list[str]:
    """Presets whose names begin so; for ``--config``."""
    from llmtrain.spec.presets import preset_names

    return [name for name in preset_names() if name.startswith(incomplete)]
