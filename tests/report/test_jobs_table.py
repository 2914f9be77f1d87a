from __future__ import annotations

import pytest
from rich.console import Console

from llmtrain.launch.jobs import RunStatus
from llmtrain.report import jobs

NAME = "a-long-name-of-a-run-20261130-223703-d5b8"
REASON = "rank 1 on node2: " + "the reason is long " * 6


def run_status():
    """A run with more to say than a narrow terminal has columns."""
    return RunStatus(
        run_id=NAME,
        path=f"/runs/{NAME}",
        status="failed",
        begun=0.0,
        state={},
        outcome={"last_step": 3, "final_loss": 5.5, "reason": REASON},
    )


@pytest.mark.parametrize(("terminal", "whole"), [(True, False), (False, True)], ids=["terminal", "pipe"])
def test_a_runs_name_is_never_cut(monkeypatch, capsys, terminal, whole):
    """On 80 columns only the reason is cut and a run is one line; into a pipe nothing is cut."""
    monkeypatch.setattr(jobs, "_console", lambda: Console(width=80, force_terminal=terminal, color_system=None))
    jobs.show_runs([run_status()], hidden=0)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert NAME in lines[1]
    assert (REASON.strip() in lines[1]) is whole
    assert len(lines[1].rstrip()) <= 80 or whole
