from __future__ import annotations

from dataclasses import replace

import pytest

from llmtrain.errors import UsageError
from llmtrain.plan.catalogue import find_accelerator, parse_rate, parse_size, plan_hardware, read_catalogue
from llmtrain.plan.request import parse_cluster
from llmtrain.plan.setup import Setup
from llmtrain.plan.shape import plan_shape
from llmtrain.plan.steptime import estimate_step
from llmtrain.plan.traffic import plan_traffic

SHAPE = plan_shape(
    {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
    },
    name="7B",
)
HOSTS = plan_hardware("A100-80G")
BASE = Setup(stage=3, ranks=16, slots=8, micro=2, accumulation=12, length=2048)


def ring_units(setup):
    """Bytes each rank sends in a step, in units of all weights at 16 bit."""
    sent = sum(item.ring_bytes(setup.ranks) for item in plan_traffic(SHAPE, setup))
    return sent / (2 * SHAPE.total) * setup.ranks / (setup.ranks - 1)


@pytest.mark.parametrize(("stage", "units"), [(0, 2), (1, 3), (2, 25), (3, 36)])
def test_traffic_of_twelve_micro_batches(stage, units):
    """With accumulation 12 a step sends 2, 3, 25 and 36 times the weights at stages 0 to 3 (less what is reused)."""
    assert ring_units(replace(BASE, stage=stage)) == pytest.approx(units, rel=0.06)


def test_one_rank_sends_nothing():
    """A single rank exchanges nothing."""
    assert plan_traffic(SHAPE, replace(BASE, ranks=1, slots=1)) == ()


def test_accumulation_does_not_amortise_stage_3():
    """Stage 3 gathers for every micro batch, so its traffic grows with accumulation."""
    assert ring_units(BASE) == pytest.approx(12 * ring_units(replace(BASE, accumulation=1)), rel=0.01)


def test_slow_network_shows():
    """A slower link between hosts never makes a step faster, and raises the break-even line."""
    fast, slow = (
        estimate_step(SHAPE, BASE, plan_hardware("A100-80G", [f"link.inter={rate}"])) for rate in ("800Gbit", "25Gbit")
    )
    assert slow.seconds > fast.seconds
    assert slow.break_even > fast.break_even


def test_break_even_follows_the_rule_of_thumb():
    """With checkpointing the line is near 6 x rate / (8 x bandwidth), whatever the model."""
    hosts = plan_hardware("A100-80G", ["link.inter=100Gbit", "software=1.0"])
    step = estimate_step(SHAPE, BASE, hosts)
    assert step.break_even == pytest.approx(6 * 150e12 / 8 / (12.5e9 * 0.73), rel=0.6)


def test_terms_add_up():
    """The step is the sum of what its terms expose."""
    step = estimate_step(SHAPE, BASE, HOSTS)
    assert step.seconds == pytest.approx(sum(term.exposed for term in step.terms))
    assert all(0 <= term.exposed <= term.seconds * 1.0001 for term in step.terms)


def test_cpu_adam_is_paid_once_a_step():
    """Offloading costs the same Adam whatever the accumulation."""
    setup = replace(BASE, optimizer="cpu")
    times = [
        next(term.seconds for term in estimate_step(SHAPE, one, HOSTS).terms if term.name == "CPU Adam")
        for one in (setup, replace(setup, accumulation=1))
    ]
    assert times[0] == times[1]


def test_catalogue_names_its_sources():
    """Every accelerator and link says where its numbers are from."""
    book = read_catalogue()
    for entry in (*book["accelerators"].values(), *book["links"].values()):
        assert entry["source"]


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("A100-80G", "A100-80G"),
        ("a100-40g", "A100-40G"),
        ("NVIDIA H100 80GB HBM3", "H100-80G"),
        ("NVIDIA A100-SXM4-80GB", "A100-80G"),
        ("A40", "A40-48G"),
        ("A10", "A10-24G"),
        ("NVIDIA A10", "A10-24G"),
        ("NVIDIA GeForce RTX 4090", "RTX4090-24G"),
        ("Tesla V100-SXM2-16GB", "V100-16G"),
    ],
)
def test_finds_accelerators(asked, found):
    """Catalogue names, short names and what nvidia-smi prints are understood."""
    assert find_accelerator(asked) == found


def test_refuses_unknown_accelerators():
    """An unknown accelerator is refused with what there is."""
    with pytest.raises(UsageError, match="TPU"):
        find_accelerator("TPUv4")


def test_sizes_and_rates():
    """Units are read as people write them."""
    assert (parse_size("1TiB"), parse_size("600GB"), parse_size("80GiB")) == (2**40, 600 * 10**9, 80 * 2**30)
    assert (parse_rate("100Gbit"), parse_rate("12GB"), parse_rate("12")) == (12.5e9, 12e9, 12e9)


def test_unknown_assumption_is_refused():
    """A misspelled assumption is refused with the nearest key."""
    with pytest.raises(UsageError) as refused:
        plan_hardware("A100-80G", ["host.rma=1TiB"])
    assert refused.value.fix == "did you mean host.ram?"


def test_cluster_of_hosts_one_does_not_have():
    """HOSTSxSLOTSxACCELERATOR describes hosts, and only that form is taken."""
    cluster, accelerator = parse_cluster("6x8xA100-80G")
    assert (len(cluster.hosts), cluster.world_size, accelerator) == (6, 48, "A100-80G")
    with pytest.raises(UsageError):
        parse_cluster("6x8")
