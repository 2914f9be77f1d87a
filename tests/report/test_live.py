"""What a launch shows while it runs and at its end, without a terminal."""

from __future__ import annotations

import pytest
from tests.launch.jobs import write_job

from llmtrain.errors import ExitCode
from llmtrain.launch.prepare import plan_launch
from llmtrain.launch.verdict import Failure, Outcome
from llmtrain.report.live import Live, show_outcome
from llmtrain.report.plan import plan_json, show_dry_run


@pytest.fixture
def live():
    """A display on standard error that is no terminal."""
    return Live()


def metrics(step, **more):
    """One line of metrics.jsonl."""
    return {"step": step, "max_steps": 9, "loss": 2.5, "tokens_per_s": 1234.5, "learning_rate": 1e-5, **more}


def make_plan(tmp_path, **options):
    """A plan for two hosts that no one has."""
    job, contact = write_job(tmp_path, **options)
    return plan_launch(job, contact, "run-1", {"HOME": "/home/me"})


def test_first_and_last_step_are_always_shown(live, capsys):
    """Without a terminal there are plain step lines: the first, the last, and few between."""
    for step in range(1, 10):
        live.tell("metrics", metrics(step))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/9", "step 9/9"]
    assert "loss 2.5000  1,234 tokens/s" in lines[0]
    assert lines[1].endswith("0:00 left")


def test_loss_that_is_no_number_is_said(live, capsys):
    """A loss that is not finite arrives as null and is shown as nan."""
    live.tell("metrics", metrics(1, loss=None))
    assert "loss nan" in capsys.readouterr().err


def test_words_of_hosts_cannot_steer_the_terminal(live, capsys):
    """Escape sequences in what hosts report are not shown, and brackets are no markup."""
    failure = Failure(
        host="a", rank=3, cause="crash", message="bad\x1b]0;title\x07 [red]row[/red]", tail="\x1b[2Jlast\rwords"
    )
    outcome = Outcome(ok=False, exit_code=ExitCode.RANK_FAILED, run_dir="/runs/x", reason="x", first_failure=failure)
    show_outcome(live, outcome)
    shown = capsys.readouterr().err
    assert "\x1b" not in shown
    assert "\r" not in shown
    assert "error: bad]0;title [red]row[/red]\nwhere: a, rank 3\nfix: see the logs" in shown
    assert "  | [2Jlast\n  | words\n" in shown


def test_host_that_did_not_confirm_is_named(live, capsys):
    """Whoever may still have processes is named at the end."""
    outcome = Outcome(ok=False, exit_code=ExitCode.HOST_LOST, run_dir="/r", reason="x", unverified=("b",))
    show_outcome(live, outcome)
    assert "warning: b did not confirm" in capsys.readouterr().err


def test_success_is_said_with_loss_and_place(live, capsys):
    """A good end says how many ranks were done, the last loss, and where the model is."""
    outcome = Outcome(ok=True, exit_code=ExitCode.OK, run_dir="/r", reason="2 ranks done", final_loss=0.5, output="/m")
    show_outcome(live, outcome)
    assert capsys.readouterr().err == "done: 2 ranks done, final loss 0.5000\nmodel: /m\n"


def test_dry_run_shows_all_and_no_value_of_the_users(live, tmp_path, capsys):
    """A dry run shows hosts, files, copies, configuration and command; values of the user's variables stay hidden."""
    plan = make_plan(tmp_path, envs=("TOKEN=s3cret",))
    show_dry_run(live.console, plan, "/out")
    shown = capsys.readouterr().err
    for words in ("gpu004:/", "600 run.json", '"stage": 3', "--master_addr", "TOKEN=(yours)", "/out"):
        assert words in shown
    assert "s3cret" not in shown


def test_json_of_a_dry_run_hides_values_too(tmp_path):
    """The JSON twin holds the same plan, with the user's values left out."""
    document = plan_json(make_plan(tmp_path, envs=("TOKEN=s3cret",)), "/out")
    assert document["hosts"][0]["env"]["TOKEN"] is None
    assert "s3cret" not in str(document)
    assert document["world_size"] == 3
    assert document["command"][1:3] == ["-m", "llmtrain.train.runner"]


def test_brackets_in_a_path_are_shown_as_they_are(live, tmp_path, capsys):
    """An interpreter whose path looks like markup is shown letter by letter."""
    plan = make_plan(tmp_path, sets=("python=/opt/[bold]env/bin/python",))
    live.tell("plan", {"plan": plan, "output": "/out", "warnings": ()})
    assert "/opt/[bold]env/bin/python" in "".join(capsys.readouterr().err.split())
