"""The driver's reports in the kernel's log, and what they make of a failure."""

from __future__ import annotations

import pytest

from llmtrain.errors import ExitCode
from llmtrain.launch.verdict import Failure
from llmtrain.launch.xid import judge_xid, parse_xids

BUS = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
FAULT = "NVRM: Xid (PCI:0000:5e:00): 31, pid=4242, name=python3, Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS"
OLD = "[  12.3] NVRM: Xid (0000:05:00): 48, Double Bit ECC error"
OTHER = "nvidia 0000:3b:00.0: enabling device"


@pytest.mark.parametrize(
    ("line", "found"),
    [(BUS, ("0000:3b:00", 79)), (FAULT, ("0000:5e:00", 31)), (OLD, ("0000:05:00", 48)), (OTHER, None)],
)
def test_reports_are_read(line, found):
    """Card and number of every form the driver prints; other lines are none."""
    xids = parse_xids([line])
    assert ([(one.pci, one.code) for one in xids] or [None]) == [found]


def crash(cause="crash"):
    """A rank's failure on host b."""
    return Failure(host="b", rank=1, cause=cause, message="CUDA error", advice=None)


def test_a_card_that_fell_off_the_bus_is_the_cause():
    """A rank's error on a host whose card has failed is told as the card's, with what to do."""
    failure, code = judge_xid(crash(), ExitCode.RANK_FAILED, {"b": [FAULT, BUS]}, "b")
    assert (failure.cause, code) == ("xid", ExitCode.RANK_FAILED)
    assert failure.message.startswith("Xid 79: GPU has fallen off the bus, on the card at 0000:3b:00")
    assert "--exclude" in failure.advice


def test_a_report_that_a_program_causes_is_only_a_note():
    """Xid 31 comes of faulty programs too: the rank's own error stays the cause."""
    failure, _ = judge_xid(crash(), ExitCode.RANK_FAILED, {"b": [FAULT]}, "b")
    assert failure.cause == "crash"
    assert "Xid 31" in failure.advice


def test_reports_of_other_hosts_and_other_causes_change_nothing():
    """Neither another host's card nor a loss that is no number has to do with it."""
    assert judge_xid(crash(), ExitCode.RANK_FAILED, {"c": [BUS]}, "b")[0] == crash()
    assert judge_xid(crash("nonfinite"), ExitCode.RANK_FAILED, {"b": [BUS]}, "b")[0].cause == "nonfinite"
