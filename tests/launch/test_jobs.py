"""Runs seen and steered from another terminal than the one that started them, over three hosts of a lab."""

from __future__ import annotations

import json
import signal

import pytest
from tests.documented import read_example, stale_lines
from tests.launch.launchlab import LLMTRAIN, wait_for

pytestmark = pytest.mark.timeout(600)  # three runs, one after the other, belong to one fixture

# In its seventh step one rank sleeps; nothing of the product knows of it.
SLEEPER = """
import time as _time
_before = Telemetry.on_step_end
def _sleep(self, args, state, control, **more):
    if state.global_step == 6:
        _time.sleep(600)
    return _before(self, args, state, control, **more)
Telemetry.on_step_end = _sleep
"""


def call(launch_lab, folder, *words):
    """`llmtrain WORDS --json` on the head: its exit code and document."""
    done = launch_lab.lab.run("head", [LLMTRAIN, *words, "--json"], cwd=folder, check=False, timeout=120)
    return done.returncode, json.loads(done.stdout or "null"), done.stderr


@pytest.fixture(scope="module")
def folder(launch_lab):
    """A working folder for runs over three hosts."""
    return launch_lab.folder("/root/jobs", hosts="node1 node2 node3")


@pytest.fixture(scope="module")
def kept(launch_lab, folder):
    """A run whose terminal is killed, which is then looked at, and asked to stop from elsewhere; then resumed."""
    run = launch_lab.launch(folder, "--json", "--set", "training.max_steps=100000")
    run.wait_step(2)
    run.process.send_signal(signal.SIGKILL)
    run.wait()
    before = run.step
    run.wait_more(before + 5)
    wait_for(lambda: call(launch_lab, folder, "status")[1]["hosts"][2]["memory"]["total"], 30, "no memory is known")
    run.seen = call(launch_lab, folder, "status", run.id[:-2])[1]
    run.listed = call(launch_lab, folder, "jobs")[1]["runs"]
    run.printed = launch_lab.lab.run("head", [LLMTRAIN, "logs", "--rank", "0", "--grep", "step 2/"], cwd=folder).stdout
    run.stopped = call(launch_lab, folder, "stop", "last")
    run.wait_gone()
    run.again = launch_lab.start(
        folder, "resume", "last", "--set", f"training.max_steps={run.outcome['last_step'] + 2}"
    )
    run.again.wait()
    return run


def test_a_run_outlives_its_terminal(kept):
    """With the terminal's process killed the run trains on, and `status` and `jobs` show it running."""
    assert kept.seen["status"] == "running"
    assert kept.listed[-1]["run_id"] == kept.id
    assert [host["alive"] for host in kept.seen["hosts"]] == [True] * 3
    assert [rank["rank"] for host in kept.seen["hosts"] for rank in host["ranks"]] == [0, 1, 2]
    assert all(rank["rss"] > 1 << 20 for host in kept.seen["hosts"] for rank in host["ranks"])
    assert kept.seen["step"] >= 5


def test_logs_are_chosen_by_rank_and_text(kept):
    """`logs` prints only lines of that rank that hold the text, with host and rank before them."""
    (line,) = kept.printed.splitlines()
    assert line.startswith("node1-0 | step 2/")


def test_stop_saves_and_leaves_nothing(kept):
    """`stop` waits for a checkpoint on every host and a verified end; the run's own code is that of Ctrl-C."""
    code, document, _ = kept.stopped
    assert (code, document["outcome"]["exit_code"]) == (0, 130)
    assert document["outcome"]["saved"].endswith(f"checkpoints/step-{document['outcome']['last_step']:06d}")
    assert document["outcome"]["leftovers"] == {}


def test_a_stopped_run_is_resumed_from_that_step(kept):
    """`resume` goes on with the step after the saved one, and ends well."""
    assert kept.again.process.returncode == 0, kept.again.err
    assert kept.again.metrics[0]["step"] == kept.outcome["last_step"] + 1


def test_sigterm_saves_and_ends_with_15(launch_lab, folder):
    """SIGTERM to the command saves and ends with code 15, ready to be queued again."""
    run = launch_lab.launch(folder, "--json", "--set", "training.max_steps=100000")
    run.wait_step(1)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 15, run.err
    assert "llmtrain resume" in run.err
    run.wait_gone()


def test_the_rank_that_sleeps_is_named(launch_lab, folder):
    """Where one rank sleeps in step 7 the run ends with code 10, naming it, its line, and what the others wait in."""
    sets = {"setup": json.dumps([sleeper()]), "stall.floor": "6", "training.max_steps": "99"}
    run = launch_lab.launch(folder, "--json", *(word for key in sets for word in ("--set", f"{key}={sets[key]}")))
    assert run.wait(120) == 10, run.err
    failure = run.json["first_failure"]
    assert (failure["host"], failure["rank"], failure["cause"]) == ("node2", 1, "stall")
    assert "_sleep (" in failure["message"]
    assert "ranks 0, 2 wait in" in failure["message"]
    assert len(list((run.dir / "stacks").iterdir())) == 3
    run.wait_gone()
    launch_lab.wait_quiet()


@pytest.fixture(scope="module")
def restarted(launch_lab, folder):
    """A run that loses a rank once and may be restarted twice; every event goes to a command."""
    launch_lab.lab.write("head", "/root/notify.sh", "cat >>/root/notified\n")
    sets = ("training.max_steps=12", "training.save_steps=3", "restart.pause=1", "notify=sh /root/notify.sh")
    words = [word for one in sets for word in ("--set", one)]
    run = launch_lab.launch(folder, "--json", "--max-restarts", "2", *words)
    run.wait_step(7)
    launch_lab.kill(run.rank(1)[1])
    run.wait()
    return run


def test_a_killed_rank_costs_a_restart(restarted):
    """The run goes on from its last checkpoint by itself, no step left out, with the same losses as before."""
    assert restarted.process.returncode == 0, restarted.err
    assert (restarted.json["restarts"], restarted.json["last_step"]) == (1, 12)
    assert "restart 1 of 2" in restarted.err
    rows = [(row["step"], row["loss"]) for row in restarted.metrics if "loss" in row]
    cut = next(at for at in range(1, len(rows)) if rows[at][0] <= rows[at - 1][0])
    assert [step for step, _ in rows[cut:]] == list(range(7, 13))  # saved after step 6
    first = dict(rows[:cut])
    assert all(abs(first[step] - loss) < 1e-3 for step, loss in rows[cut:] if step in first)
    restarted.wait_gone()


def test_a_checkpoint_on_three_hosts_becomes_one_model(launch_lab, folder, restarted):
    """`export` makes of the last step's files on three hosts what the run itself gathered, number by number."""
    from safetensors.torch import load_file

    code, said, err = call(launch_lab, folder, "export", restarted.id, "--output", "exported")
    assert code == 0, err
    ends = read_example("export", "llmtrain export")[-2:]  # with --json the last two lines are the document
    assert stale_lines("export", "llmtrain export", err) == ends
    assert (said["step"], said["dtype"], said["loaded"]) == (12, "fp32", "yes")
    disk = launch_lab.lab.state.disk("head")
    mine = load_file(disk / "root/jobs/exported/model.safetensors")
    theirs = load_file(disk / restarted.json["output"].lstrip("/") / "model.safetensors")
    assert mine.keys() == theirs.keys()
    assert all(bool((mine[name] == theirs[name]).all()) for name in theirs)
    for host in ("node1", "node2", "node3"):
        left = launch_lab.lab.run(host, ["sh", "-c", f"ls /root/.llmtrain/runs/{restarted.id}*"]).stdout
        assert "export" not in left, left


def test_an_export_that_cannot_be_is_one_error(launch_lab, folder, restarted):
    """A step that no host saved, and a folder that exists, are told before anything is done."""
    for words, told in ((("--step", "5", "--output", "new"), "no checkpoint of step 5"), (("--output", "."), "exists")):
        done = launch_lab.lab.run("head", [LLMTRAIN, "export", restarted.id, *words], cwd=folder, check=False)
        assert done.returncode == 2
        assert told in done.stderr
        assert "fix:" in done.stderr


def test_every_event_reaches_the_command(launch_lab, restarted):
    """`notify` gets events as JSON on its standard input, the failure and the end among them."""
    lines = launch_lab.lab.read("head", "/root/notified").splitlines()
    events = [json.loads(line)["event"] for line in lines]
    assert {"run_dir", "start", "restart", "resume", "outcome"} <= set(events)


def sleeper():
    """A setup line that makes node2's rank sleep in its seventh step."""
    code = SLEEPER.replace("\n", "\\n")
    file = "code/llmtrain/train/telemetry.py"
    return f"[ $(uname -n) != node2 ] || grep -q _sleep {file} || printf '{code}' >>{file}"
