"""The commands of docs/day-one.md and docs/day-thirty.md, on a head and two hosts, as they stand there."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def read_blocks(page):
    """The shell blocks of a page."""
    return re.findall(r"^```sh\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def days(script_lab):
    """All blocks of both days, run in order in one folder; their outputs."""
    folder = script_lab.folder("/root/days", {"chat.jsonl": script_lab.head / "root/data.jsonl"})
    if not (script_lab.head / "srv/model").exists():
        shutil.copytree(script_lab.head / "root/model", script_lab.head / "srv/model")
    path = f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
    outputs = {}
    for page in ("day-one.md", "day-thirty.md"):
        for block in read_blocks(page):
            script = ["bash", "-ec", "exec 2>&1\n" + block]
            done = script_lab.lab.run("head", script, cwd=folder, env={"PATH": path}, timeout=200, check=False)
            assert done.returncode == 0, f"{block}\n{done.stdout[-4000:]}"
            outputs[block] = done.stdout
    return script_lab.head / "root/days", outputs


def test_both_days_go_as_they_are_written(days):
    """Every command ends well, and the model of each day is there."""
    folder, outputs = days
    assert len(outputs) == len(read_blocks("day-one.md")) + len(read_blocks("day-thirty.md"))
    for name in ("tuned", "handover"):
        assert (folder / name / "model.safetensors").exists()


def test_the_last_day_shows_what_it_promises(days):
    """The comparison names what differed, and the card says what the model is made of."""
    shown = "".join(days[1].values())
    assert "loss at step 1:" in shown
    assert "SHA-256" in shown
