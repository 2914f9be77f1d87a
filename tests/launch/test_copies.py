"""Checkpoints on hosts that share no disk: copied to the next host, and brought back to one that lost its own."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from tests.launch.jobs import write_job
from tests.launch.launchlab import wait_for

from llmtrain.launch.choices import choose_copies
from llmtrain.launch.copies import Copies
from llmtrain.launch.recover import Loss, choose_recovery

HOSTS = ("a", "b", "c")


def place(*steps, erased=()):
    """What hosts have after these steps: their own files, and copies of the host before; None of it where erased."""
    before = dict(zip(HOSTS, ("c", "a", "b"), strict=True))
    seen = {host: {path for step in steps for path in (step, f"copies/{before[host]}/{step}")} for host in HOSTS}
    return {**seen, **{host: set() for host in erased}}


def test_nothing_is_brought_where_all_is_there():
    """The newest checkpoint that all hosts have is chosen, and copies stay where they are."""
    found = choose_recovery(place("step-000003", "step-000006"), HOSTS, HOSTS)
    assert (found.name, found.losses) == ("step-000006", ())


def test_an_erased_host_gets_its_files_from_the_next():
    """The host after the erased one keeps its files."""
    found = choose_recovery(place("step-000006", erased=["b"]), HOSTS, HOSTS)
    assert found.losses == (Loss(host="b", owner="b", keeper="c"),)


def test_a_spare_gets_the_files_of_the_host_it_replaces():
    """The files are those of the ranks that the spare takes over."""
    seen = place("step-000006")
    found = choose_recovery({"a": seen["a"], "d": set(), "c": seen["c"]}, ("a", "d", "c"), HOSTS)
    assert found.losses == (Loss(host="d", owner="b", keeper="c"),)


def test_a_checkpoint_whose_copy_was_not_finished_is_passed_over():
    """An older one that is whole over the hosts is better than a newer one that is not."""
    seen = place("step-000003", "step-000006", erased=["b"])
    seen["c"].remove("copies/b/step-000006")
    assert choose_recovery(seen, HOSTS, HOSTS).name == "step-000003"


def test_two_neighbours_lost_are_too_many():
    """With the files of a host and its copy gone there is nothing to go on from."""
    assert choose_recovery(place("step-000006", erased=["b", "c"]), HOSTS, HOSTS) is None
    assert choose_recovery(place(), HOSTS, HOSTS) is None


def seal(tokens, rate=1e6):
    """Which checkpoints are copied once hosts have told of one, by what they tell of its manifest."""
    plan = SimpleNamespace(hosts=[SimpleNamespace(name=host) for host in HOSTS], copy_rate=rate)
    copies, copied = Copies(plan, None, lambda *_: None, lambda _: None), []
    copies._copy = copied.append
    for host, token in zip(HOSTS, tokens, strict=False):
        copies.note(host, "step-000003", token)
    if copies._thread is not None:
        wait_for(lambda: copied, 5, "nothing is copied")
    copies.close()
    return copied


def test_copies_begin_when_all_hosts_have_sealed():
    """Only what every host has is copied, and only where it is wanted."""
    assert seal(["1", "2", "3"]) == ["step-000003"]
    assert seal(["1", "2"]) == []
    assert seal(["1", "2", "3"], rate=None) == []


def test_hosts_with_one_disk_need_no_copies():
    """Hosts that see one and the same manifest share a disk."""
    assert seal(["1", "1", "1"]) == []


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        ((), "at most 125.0 MB/s: a tenth of 10000 Mbit/s, the slowest link"),
        (("checkpoint.copy_rate=80mbit",), "at most 10.0 MB/s: as asked"),
        (("checkpoint.copies=never",), None),
        (("checkpoint.save_minutes=0",), None),
    ],
)
def test_the_rate_of_copies_is_told(tmp_path, sets, said):
    """A tenth of the slowest link or what was asked for; nothing where nothing is saved or copied."""
    rate, choice = choose_copies(*write_job(tmp_path, sets=sets))
    assert (rate is None) == (said is None)
    assert said is None or f"{choice.value}: {choice.reason}".endswith(said)


@pytest.mark.timeout(600)
def test_a_run_goes_on_although_a_host_lost_its_disk(launch_lab):
    """With node2's run folder and checkpoints erased, `resume` goes on from a copied step with the losses of before."""
    folder = launch_lab.folder("/root/copies", hosts="node1 node2 node3")
    steady = ("training.schedule=constant", "training.warmup_steps=0")  # the same rate, however many steps follow
    saves = ("training.save_steps=10", "checkpoint.dir=/root/points", "checkpoint.keep=1")
    sets = ("training.max_steps=100000", *steady, *saves)
    run = launch_lab.launch(folder, "--json", *(word for one in sets for word in ("--set", one)))
    run.wait_step(1)
    wait_for(lambda: read_copied(run) or run.process.poll(), 120, lambda: run.err)
    assert read_copied(run)[0]["failed"] == {}, run.err
    wait_for(lambda: run.step % 10 == 3, 120, lambda: run.err)
    launch_lab.kill(run.rank(1)[1])
    run.wait()
    before = {row["step"]: row["loss"] for row in run.metrics if "loss" in row}
    launch_lab.lab.run("node2", ["rm", "-rf", "/root/points", f"/root/.llmtrain/runs/{run.id}"])

    again = launch_lab.start(folder, "resume", "last", "--set", f"training.max_steps={max(before) + 1}")
    assert again.wait() == 0, again.err
    losses = {row["step"]: row["loss"] for row in again.metrics if "loss" in row}
    step = min(losses) - 1
    assert f"node2 lacks step-{step:06d}: bringing the copy that node3 keeps" in again.err
    assert step >= int(read_copied(run)[0]["checkpoint"].removeprefix("step-"))
    assert len(set(before) & set(losses)) >= 2
    assert all(abs(before[one] - losses[one]) < 1e-4 for one in set(before) & set(losses))
    launch_lab.wait_quiet()


def read_copied(run):
    """The events that say that a checkpoint has been copied."""
    lines = (run.dir / "events.jsonl").read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["event"] == "copied"]
