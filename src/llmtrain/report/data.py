"""What ``llmtrain data`` shows."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from llmtrain.report.errors import clean

if TYPE_CHECKING:
    from llmtrain.launch.dataset import DataSummary

BAR = 40
STEPS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


def show_data(summary: DataSummary) -> None:
    """Print it."""
    console = Console(highlight=False, soft_wrap=True)
    for line in render_counts(summary):
        console.print(Text(clean(line)))
    console.print(Text("\nlength in tokens"))
    for line in render_histogram(summary.counts["lengths"], summary.counts["max_length"]):
        console.print(Text(line))
    console.print(Text("\nfirst example; what is not learned is dim, or between ⟨ ⟩ where there are no colours"))
    console.print(render_sample(summary.counts["sample"], colours=console.is_terminal))


def render_counts(summary: DataSummary) -> list[str]:
    """Lines of name and value. Pure."""
    counts = summary.counts
    lines = []
    for file in summary.files:
        weight = "" if file["weight"] == 1 else f", {file['weight']:g} times an epoch"
        ignored = f"; not used: {', '.join(file['ignored'])}" if file["ignored"] else ""
        lines.append(f"{file['path']}: {file['format']}, {file['examples']} examples{weight}{ignored}")
    share = counts["trained_tokens"] / max(1, counts["tokens"])
    held = f"{counts['held_out']:,} held out, {counts['dropped']:,} dropped"
    lines += [
        f"chat template     {counts['template'] or 'none: everything is learned'}",
        f"tokens            {counts['tokens']:,}, {counts['trained_tokens']:,} of them learned ({share:.0%})",
        f"examples          {counts['trained_on']:,} to train on, {held}",
        f"cut at {counts['max_length']:<10} {counts['truncated']:,} ({_share(counts, 'truncated')})",
        f"duplicates        {counts['duplicates']:,} ({_share(counts, 'duplicates')})",
    ]
    if counts["unstopped"]:
        lines.append(f"without an end    {counts['unstopped']:,}: the model cannot learn from these when to stop")
    rows = f"{counts['rows']:,} rows" + (" of several examples" if counts["packing"] else "")
    steps = summary.steps_per_epoch
    by = f" of {summary.batch}" if summary.batch else ""
    lines.append(f"steps an epoch    {f'{steps:,}' if steps else 'unknown until batch.global is given'}{by}, {rows}")
    lines.append(f"tokenized         {summary.place}{' (as before)' if summary.reused else ''}; launch uses it")
    return lines


def _share(counts: dict[str, Any], name: str) -> str:
    return f"{counts[name] / max(1, counts['examples']):.1%}"


def render_histogram(lengths: dict[str, int], max_length: int) -> list[str]:
    """A bar for each doubling of the length, and a border where examples are cut. Pure."""
    found = {int(length): count for length, count in lengths.items()}
    highs = sorted({*STEPS, max_length, max(STEPS[-1], *found)})
    rows = [
        (low + 1, high, sum(count for length, count in found.items() if low < length <= high))
        for low, high in itertools.pairwise([0, *highs])
    ]
    used = [at for at, (_, _, count) in enumerate(rows) if count]
    most = max((count for _, _, count in rows), default=0)
    lines = []
    for start, high, count in rows[used[0] : used[-1] + 1] if used else []:
        bar = "█" * -(-BAR * count // most)
        cut = "  cut" if count and start > max_length else ""
        lines.append(f"{start:>8} to {high:<8} {bar:<{BAR}} {count:,}{cut}")
    return lines


def render_sample(pieces: list[dict[str, Any]], *, colours: bool) -> Text:
    """The masked part dimmed. Pure."""
    text = Text()
    for piece in pieces:
        words = clean(piece["text"])
        masked = not piece["trained"]
        text.append(f"⟨{words}⟩" if masked and not colours else words, style="dim" if masked else "bold")
    return text
