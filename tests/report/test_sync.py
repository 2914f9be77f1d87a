"""What people see of a sync: the plan of a dry run, the table at the end, a rollback, bars."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from llmtrain.report.sync import SyncLive, show_sync
from llmtrain.sync.request import HostReport, SyncReport

MIB = 1 << 20


@pytest.fixture
def live():
    """One that writes plain text to a buffer."""
    found = SyncLive()
    found.console = Console(file=io.StringIO(), width=100, highlight=False, soft_wrap=True)
    return found


def shown(live) -> str:
    """All it printed."""
    return live.console.file.getvalue()


def reports(*hosts: HostReport, **values) -> SyncReport:
    """A report of these hosts."""
    return SyncReport(hosts=list(hosts), **values)


def test_the_end_names_every_host_its_bytes_and_the_time_of_a_serial_copy(live):
    """The serial copy is reckoned at the rate of the chain, also where most of it did not come from the source."""
    one = HostReport(host="a", ok=True, bytes_sent=100 * MIB, seconds=5.2)
    two = HostReport(host="b", ok=True, bytes_sent=94, bytes_reused=100 * MIB, seconds=0.7)
    bad = HostReport(host="c", error="disk full [x]")
    show_sync(live, reports(one, two, bad, head_bytes_sent=94, transfer_seconds=5.0, seconds=6.0))
    text = shown(live)
    assert "a     equal                  100.0 MiB" in text
    assert "20.0 MiB/s" in text
    assert "FAILED: disk full [x]" in text
    assert "2 of 3 hosts are equal to the source" in text
    assert "one copy after another: 5 s" in text


def test_a_dry_run_says_what_would_travel_and_what_it_needs(live):
    """Bytes and disk for every host, hosts that differ alike in one line, and what only they have stays."""
    changes = {"added": [1, ["new"]], "changed": [0, []], "touched": [0, []], "removed": [1, ["old"]]}
    hosts = [HostReport(host=name, ok=True, note="would be synced") for name in "ab"]
    planned = {name: {"bytes": 3 * MIB, "disk_bytes": 5 * MIB} for name in "ab"}
    show_sync(live, reports(*hosts, planned=planned, changes={"a": changes, "b": changes}), dry_run=True)
    text = shown(live)
    assert "would get  disk needed" in text
    assert "3.0 MiB      5.0 MiB" in text
    assert "a, b: 1 added: new; 1 only there (goes with --delete): old" in text
    assert "nothing was changed" in text


def test_a_rollback_claims_nothing_about_the_source(live):
    """It says how many hosts are back."""
    live.tell("order", {"path": "/x", "dest": "/x", "hosts": ["a"], "file": "hosts", "rollback": True})
    show_sync(live, reports(HostReport(host="a", ok=True, note="back to 12ab")), rollback=True)
    assert "/x -> the tree before on a (hosts)" in shown(live)
    assert "1 of 1 hosts are back to the tree before" in shown(live)
    assert "equal to the source" not in shown(live)


def test_without_a_terminal_there_are_lines_and_no_bars(live):
    """The plan is one line with the disk it takes, and progress comes every few seconds only."""
    live.tell(
        "planned", {"bytes": 10 * MIB, "hosts": {"a": 10 * MIB, "b": 0}, "files": 3, "disk": 12 * MIB, "plain": 0}
    )
    live.tell("progress", {"host": "a", "received": 5 * MIB, "lag": 20, "peer": "source"})
    assert shown(live) == "to send: 10.0 MiB once along a chain of 1; 12.0 MiB of disk beside the old tree\n"
