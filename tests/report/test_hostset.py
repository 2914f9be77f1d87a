from __future__ import annotations

import pytest

from llmtrain.cluster.findings import Finding
from llmtrain.report.check import merge_findings
from llmtrain.report.hostset import fold_hosts


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["gpu001"], "gpu001"),
        ([f"gpu{number:03d}" for number in range(1, 17)], "gpu[001-016]"),
        (["n1", "n2", "n4", "n10"], "n[1-2,4,10]"),
        (["a", "b"], "a,b"),
        (["n1.x.y", "n2.x.y", "head"], "n[1-2].x.y,head"),
        (["n1", "n01"], "n1,n01"),
        (["gpu009", "gpu010"], "gpu[009-010]"),
        ([], ""),
    ],
)
def test_host_names_are_folded(names, text):
    """Names that differ in one number become ranges; padded numbers keep their width."""
    assert fold_hosts(names) == text


def test_alike_findings_of_many_hosts_are_one_line():
    """Findings that differ only in the host are merged, with HOST in the fix; others stay apart."""
    findings = [
        Finding(host=host, check="disk", level="fail", saw=saw, wanted="space", fix=f"ssh -- {host} df")
        for host, saw in [("n1", "1 GiB"), ("n2", "1 GiB"), ("n10", "1 GiB"), ("n3", "2 GiB")]
    ]
    first, second = merge_findings(findings)
    assert first.hosts == ("n1", "n2", "n10")
    assert first.finding.fix == "ssh -- HOST df"
    assert (second.hosts, second.finding.fix) == (("n3",), "ssh -- n3 df")
