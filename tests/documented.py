"""Examples in docs/commands held against what commands really print."""

from __future__ import annotations

import re
from pathlib import Path

PAGES = Path(__file__).resolve().parents[1] / "docs/commands"
EXAMPLE = r"^    \$ (?P<command>[^\n]*)\n(?P<lines>(?:    (?!\$ )[^\n]*\n)+)"


def read_example(page: str, command: str) -> list[str]:
    """The lines that a page shows under the first of its commands that begins so; lines of dots left out."""
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    for found in re.finditer(EXAMPLE, text, re.MULTILINE):
        if found["command"].startswith(command):
            return [line[4:].rstrip() for line in found["lines"].splitlines() if line.strip() != "..."]
    raise AssertionError(f"no example of {command} in {page}.md")


def blur(line: str) -> str:
    """A line without what differs from run to run: numbers, units of size, paths, spaces of columns."""
    line = re.sub(r"/[\w./+-]+", "/PATH", line)
    line = re.sub(r"\d[\d.,:]*", "#", line)
    line = re.sub(r"# ?[KMGT]iB", "# B", line)
    return re.sub(r"\s+", " ", line).strip()


def stale_lines(page: str, command: str, output: str) -> list[str]:
    """Lines of an example that the real output does not have."""
    real = {blur(line) for line in output.splitlines()}
    return [line for line in read_example(page, command) if blur(line) not in real]
