from __future__ import annotations

import re
import runpy
from pathlib import Path

from llmtrain.cli import app
from llmtrain.errors import ExitCode
from llmtrain.spec.hostfile import read_hostfile
from llmtrain.spec.runfile import read_run

ROOT = Path(__file__).resolve().parents[1]


def test_run_file_page_is_fresh():
    """docs/run-file.md is what scripts/run_file_doc.py writes from the run file's own definition."""
    script = runpy.run_path(str(ROOT / "scripts" / "run_file_doc.py"))
    assert (ROOT / "docs" / "run-file.md").read_text() == script["render"]()


def test_every_exit_code_is_documented():
    """Each exit code of the program stands in docs/exit-codes.md."""
    page = (ROOT / "docs" / "exit-codes.md").read_text()
    listed = {int(number) for row in re.findall(r"^\| ([\d, ]+) \|", page, re.MULTILINE) for number in row.split(",")}
    assert listed == {int(code) for code in ExitCode}


def test_shipped_hostfiles_are_valid():
    """Every hostfile in hostfiles/ is accepted."""
    for path in (ROOT / "hostfiles").iterdir():
        assert read_hostfile(path).world_size > 0


def test_shipped_run_files_are_valid():
    """Every run file under examples/ is accepted."""
    paths = list((ROOT / "examples").rglob("llmtrain.yaml"))
    assert paths
    for path in paths:
        read_run(str(path))


def test_links_in_documents_lead_somewhere():
    """Every relative link of the documents names a file of the repository."""
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page}: {target}"


def test_every_command_has_a_page():
    """Each command stands in a page of docs/commands, with a page of its own or a family's."""
    text = "".join(page.read_text() for page in (ROOT / "docs" / "commands").glob("*.md"))
    for command in app.registered_commands:
        name = command.name or command.callback.__name__
        assert f"llmtrain {name}" in text, name


def test_printed_output_is_what_commands_print(tmp_path):
    """Every block of output in docs/commands that names its command is what the command prints today."""
    script = runpy.run_path(str(ROOT / "scripts" / "command_doc.py"))
    script["prepare"](tmp_path)
    pages = {page: page.read_text() for page in (ROOT / "docs" / "commands").glob("*.md")}
    assert sum(len(script["BLOCK"].findall(text)) for text in pages.values()) >= 6
    for page, text in pages.items():
        assert script["render"](text, tmp_path) == text, f"{page.name} is stale: python scripts/command_doc.py"
