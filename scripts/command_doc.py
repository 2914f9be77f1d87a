"""Fill in what commands print in docs/commands/*.md, so that no page shows what is no longer so.

    python scripts/command_doc.py

A block after a comment ``<!-- output of: llmtrain ... -->`` holds what that command prints, in a folder with a tiny
model, chat data and a hostfile. tests/test_docs.py runs the same and compares.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "commands"
BLOCK = re.compile(r"<!-- output of: (?P<command>llmtrain .+?) -->\n```\n(?P<text>.*?)```\n", re.DOTALL)
SHOWN = 40
"""Lines of an output; the rest is left out, and said to be."""


def prepare(folder: Path) -> None:
    """What the commands are run on."""
    from llmtrain.train.tinymodel import write_tiny_model

    write_tiny_model(folder / "model")
    rows = [(f"{a}+{b}?", f"{a}+{b} is {a + b}." + " It is so." * (a // 3)) for a in range(1, 10) for b in range(1, 5)]
    with (folder / "chat.jsonl").open("w", encoding="utf-8") as file:
        for question, answer in [*rows, rows[0]]:
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": turns}) + "\n")
    (folder / "hostfile").write_text("gpu001 slots=8\ngpu002 slots=8\n", encoding="utf-8")


def run(command: str, folder: Path) -> str:
    """What a command prints on both streams, with the folder called /data."""
    script = f'exec 2>&1; llmtrain() {{ {sys.executable} -m llmtrain.cli "$@"; }}; {command}'
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), "COLUMNS": "110", "NO_COLOR": "1", "LANG": "C.UTF-8"}
    env["PYTHONPATH"] = str(ROOT / "src")
    done = subprocess.run(["bash", "-c", script], cwd=folder, env=env, stdout=subprocess.PIPE, text=True, check=False)
    text = re.sub(r"(?<=-tokenized/)[0-9a-f]{16}", "0123456789abcdef", done.stdout.replace(str(folder), "/data"))
    lines = [line.rstrip() for line in text.splitlines()]
    more = [f"... ({len(lines) - SHOWN} more lines)"] if len(lines) > SHOWN else []
    return "".join(f"{line}\n" for line in [*lines[:SHOWN], *more])


def render(page: str, folder: Path) -> str:
    """The page with every block filled in anew."""

    def fill(found: re.Match[str]) -> str:
        return f"<!-- output of: {found['command']} -->\n```\n{run(found['command'], folder)}```\n"

    return BLOCK.sub(fill, page)


def main() -> None:
    """Write all pages."""
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        for path in sorted(PAGES.glob("*.md")):
            path.write_text(render(path.read_text(encoding="utf-8"), Path(folder)), encoding="utf-8")


if __name__ == "__main__":
    main()
