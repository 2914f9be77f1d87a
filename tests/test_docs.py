from __future__ import annotations

import re
import runpy
from pathlib import Path

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
