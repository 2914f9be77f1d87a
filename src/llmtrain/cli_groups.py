"""How ``llmtrain --help`` groups the commands, and what a shell completes beyond their names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typer.core import TyperGroup

if TYPE_CHECKING:
    import typer
    from typer import _click

GROUPS: dict[str, tuple[str, ...]] = {
    "Run": ("launch", "smoke"),
    "Before a run": ("init", "hosts", "check", "data", "plan", "map", "render"),
    "Bring to the hosts": ("sync", "sync-weights", "sync-env"),
    "While it runs": ("jobs", "status", "logs", "attach", "stop", "resume", "clean", "who", "exec"),
    "After a run": ("ask", "merge", "export", "diff", "compare"),
}
"""Heading -> commands under it, in the order of a run's life."""
OTHERS = "More"


class Grouped(TyperGroup):
    """The whole program's help as plain text: drawing its frames took longer than all the rest of the command."""

    def format_help(self, ctx: _click.Context, formatter: _click.HelpFormatter) -> None:
        """Usage, what it is for, the commands under their headings, the options."""
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        self.format_commands(ctx, formatter)
        records = [record for param in self.get_params(ctx) if (record := param.get_help_record(ctx))]
        with formatter.section("Options"):
            formatter.write_dl(records)
        self.format_epilog(ctx, formatter)

    def format_commands(self, ctx: _click.Context, formatter: _click.HelpFormatter) -> None:  # noqa: ARG002
        """One line for each command, under the headings of ``GROUPS``."""
        wide = max(map(len, self.commands))
        for heading in dict.fromkeys(command.rich_help_panel for command in self.commands.values()):  # type: ignore[attr-defined]
            shown = {n: c for n, c in self.commands.items() if c.rich_help_panel == heading}  # type: ignore[attr-defined]
            with formatter.section(heading):
                rows = [
                    (name.ljust(wide), command.get_short_help_str(formatter.width - wide - 6))
                    for name, command in shown.items()
                ]
                formatter.write_dl(rows)


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
