from __future__ import annotations

import pytest
from tests.cluster.hosts import make_facts

from llmtrain.cluster.checks.bringup import STAGES, judge_bringup, judge_transport
from llmtrain.cluster.details import Details


def told(*stages, error=None):
    """What a rank tells that passed these stages."""
    lines = [{"stage": stage} for stage in stages]
    return [*lines, {"stage": "error", "error": error}] if error else lines


CPU = ("import", "rendezvous", "gloo", "sweep")


def test_ranks_that_pass_every_stage_give_nothing():
    """All stages passed by all ranks is no finding, with GPUs and without."""
    assert judge_bringup({"a": {0: told(*CPU)}, "b": {1: told(*CPU)}}, cuda=False) == []
    assert judge_bringup({"a": {0: told(*STAGES)}}, cuda=True) == []
    assert judge_bringup({}, cuda=False) == []


@pytest.mark.parametrize(("passed", "stage"), [(0, "import"), (1, "rendezvous"), (2, "gloo"), (3, "nccl-host")])
def test_the_host_that_is_behind_is_named_with_its_stage(passed, stage):
    """Ranks that wait for the one behind are not blamed; the stage it did not pass is named."""
    found = judge_bringup(
        {"a": {0: told(*STAGES[: passed + 1])}, "b": {1: told(*STAGES[:passed], error="boom")}}, cuda=True
    )
    (finding,) = found
    assert (finding.host, finding.level) == ("b", "fail")
    assert f"the stage {stage}: boom" in finding.saw


def test_a_sweep_that_is_not_finished_only_warns():
    """A network that is too slow for the sweep is not a network that does not work."""
    (finding,) = judge_bringup({"a": {0: told(*CPU)}, "b": {1: told(*CPU[:-1])}}, cuda=False)
    assert (finding.host, finding.level) == ("b", "warn")


def test_sockets_beside_an_active_adapter_are_a_failure():
    """NCCL on sockets fails where InfiniBand is active, and is fine where there is none or it is used."""
    port = {"device": "mlx5_0", "port": "1", "state": "4: ACTIVE"}
    rich = {name: make_facts(name, details=Details(infiniband=(port,))) for name in "ab"}
    poor = {name: make_facts(name) for name in "ab"}
    sockets, verbs = (
        {"stage": "nccl", "log": [f"h:1 [0] NCCL INFO Using network {name}\n"]} for name in ("Socket", "IB")
    )
    assert judge_transport(poor, {"a": {0: [sockets]}, "b": {1: [sockets]}}) == []
    assert judge_transport(rich, {"a": {0: [verbs]}, "b": {1: [verbs]}}) == []
    found = judge_transport(rich, {"a": {0: [sockets]}, "b": {1: [verbs]}})
    assert [(one.host, one.level) for one in found] == [("a", "fail")]
