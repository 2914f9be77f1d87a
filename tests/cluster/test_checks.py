from __future__ import annotations

from dataclasses import replace

import pytest
from tests.cluster.hosts import gpu, make_facts

from llmtrain.cluster.checks.peers import judge_names, judge_peers
from llmtrain.cluster.details import Details
from llmtrain.cluster.doctor import judge
from llmtrain.cluster.findings import CHECKS, parse_names, refuse_failures
from llmtrain.cluster.needs import Needs
from llmtrain.cluster.network import Link
from llmtrain.cluster.nvidia import Gpu, GpuProcess
from llmtrain.cluster.peers import ALL_PAIRS, Sight, chosen_peers
from llmtrain.cluster.probes import clock_skew, ops_folder
from llmtrain.errors import PreflightError, UsageError
from llmtrain.spec.hostfile import parse_hostfile

CLUSTER = parse_hostfile("a slots=1\nb slots=1\nc slots=1\n", name="hostfile")
TOOLS = {"c++": "/usr/bin/c++", "ninja": "/opt/env/bin/ninja", "nvcc": "/usr/local/cuda/bin/nvcc"}
GPU = Gpu(
    name="NVIDIA A100-SXM4-80GB",
    uuid="GPU-1",
    total_mib=81920,
    used_mib=5,
    mig=False,
    persistence=True,
    uncorrectable=0,
    remap_pending=False,
    remap_failed=False,
    recovery=None,
    throttles=(),
    link_width=(16, 16),
    fabric=None,
    processes=(),
)
WHOLE = Details(
    kernel="6.8.0-45-generic",
    user="user",
    limits={"nofile": 1048576, "memlock": -1},
    shm_total_bytes=32 << 30,
    shm_free_bytes=32 << 30,
    node_mount=("ext4", "rw,relatime"),
    tools=TOOLS,
    nvcc="12.8",
    torch_cuda="12.8",
    nccl="2.27.3",
    driver="570.86.15",
    driver_loaded=True,
    python_header=True,
    gpus=(GPU,),
)
HCA = {"device": "mlx5_0", "port": "1", "state": "4: ACTIVE", "rate": "200 Gb/sec", "link_layer": "InfiniBand"}
OPS = Needs(ops=("cpu_adam",), cuda=True)


def judged(odd, needs=None, **facts):
    """Findings of three GPU hosts of which the second is odd."""
    hosts = {}
    for number, name in enumerate("abc", start=1):
        details = replace(WHOLE, **odd) if name == "b" else WHOLE
        own = facts if name == "b" else {}
        hosts[name] = make_facts(name, number, **{"accelerators": (gpu(),), "details": details, **own})
    return judge(CLUSTER, hosts, needs or OPS)


def test_whole_hosts_with_gpus_give_nothing():
    """Three equal hosts with healthy GPUs give no finding."""
    assert judged({}) == []


@pytest.mark.parametrize(
    ("odd", "check", "level", "words"),
    [
        ({"driver_error": "Failed to initialize NVML: Driver/library version mismatch"}, "driver", "fail", "mismatch"),
        ({"driver": "550.54.14"}, "driver", "warn", "550.54.14"),
        ({"nccl": "2.21.5"}, "versions", "fail", "NCCL 2.21.5"),
        ({"kernel": "5.15.0-100"}, "platform", "warn", "kernel 5.15"),
        ({"gpus": (replace(GPU, mig=True),)}, "mig", "fail", "MIG"),
        ({"gpus": (replace(GPU, recovery="Reset"),)}, "accelerator-health", "fail", "Reset"),
        ({"gpus": (replace(GPU, uncorrectable=3),)}, "accelerator-health", "warn", "3 uncorrectable"),
        ({"gpus": (replace(GPU, remap_pending=True),)}, "accelerator-health", "warn", "reset"),
        ({"gpus": (replace(GPU, remap_failed=True),)}, "accelerator-health", "warn", "replaced"),
        ({"gpus": (replace(GPU, throttles=("hw_slowdown",)),)}, "accelerator-health", "warn", "hw_slowdown"),
        ({"gpus": (replace(GPU, link_width=(4, 16)),)}, "accelerator-health", "warn", "4 of 16"),
        ({"xids": ("NVRM: Xid (PCI:0000:3b:00): 79, gone",)}, "accelerator-health", "warn", "XID 79"),
        ({"gpus": (replace(GPU, used_mib=40000),)}, "accelerator-busy", "warn", "cannot be seen"),
        ({"nvswitch": True}, "fabric", "warn", "fabricmanager"),
        ({"nvswitch": True, "gpus": (replace(GPU, fabric="In Progress"),)}, "fabric", "fail", "fabricmanager"),
        ({"node_mount": ("nfs4", "rw")}, "shared-dir", "warn", "nfs4"),
        ({"node_mount": ("ext4", "rw,noexec")}, "node-dir", "fail", "noexec"),
        ({"node_mount": ("ext4", "ro")}, "node-dir", "fail", "read-only"),
        ({"shm_total_bytes": 64 << 20, "shm_free_bytes": 60 << 20}, "shm", "warn", "64 MiB"),
        ({"shm_total_bytes": 64 << 20, "shm_free_bytes": 0}, "shm", "fail", "0 MiB free"),
        ({"limits": {"nofile": 256, "memlock": -1}}, "limits", "warn", "256 open files"),
        ({"tools": {**TOOLS, "c++": None}}, "build", "fail", "no C++ compiler"),
        ({"tools": {**TOOLS, "ninja": None}}, "build", "fail", "no ninja"),
        ({"tools": {**TOOLS, "nvcc": None}}, "build", "fail", "no nvcc"),
        ({"nvcc": "11.8"}, "build", "warn", "nvcc 11.8"),
        ({"python_header": False}, "build", "fail", "Python.h"),
        ({"user": "someone"}, "account", "warn", "someone"),
    ],
)
def test_each_detail_gives_its_finding(odd, check, level, words):
    """One thing that is odd on one host gives one finding with its level, host, words and a fix."""
    (finding,) = judged(odd)
    assert (finding.host, finding.check, finding.level) == ("b", check, level)
    assert words in finding.saw
    assert finding.fix
    assert finding.check in CHECKS


@pytest.mark.parametrize(
    ("facts", "check", "level"),
    [
        ({"clock_skew_s": -600.0}, "clock", "warn"),
        ({"node_dir_free_inodes": 10}, "disk", "fail"),
        ({"memory_available_bytes": 1 << 28}, "memory", "warn"),
        ({"machine": "aarch64"}, "platform", "fail"),
        ({"accelerators": ()}, "slots", "fail"),
        ({"accelerators": (gpu("8.9", "NVIDIA L40S"),)}, "accelerator-type", "warn"),
        ({"noise": "WELCOME"}, "noisy-shell", "warn"),
    ],
)
def test_each_fact_gives_its_finding(facts, check, level):
    """The same for what belongs to the facts."""
    (finding,) = judged({}, **facts)
    assert (finding.host, finding.check, finding.level) == ("b", check, level)


def test_what_is_unknown_is_not_judged():
    """A host that told no details gives no finding about them."""
    hosts = {name: make_facts(name, number) for number, name in enumerate("abc", start=1)}
    assert judge(CLUSTER, hosts, Needs(ops=("cpu_adam",))) == []


def test_compiled_operations_need_no_compiler():
    """What is built in the working folder for these versions, or came with DeepSpeed, is not compiled again."""
    bare = {"tools": {"c++": None, "ninja": None, "nvcc": None}}
    mine = ops_folder(make_facts("b")).rpartition("/")[2]
    assert judged({**bare, "built_ops": (f"{mine}/cpu_adam",)}) == []
    assert judged({**bare, "shipped_ops": ("cpu_adam",)}) == []
    assert len(judged({**bare, "built_ops": (f"{mine.replace('2.13', '2.12')}/cpu_adam",)})) == 3


def test_too_little_memory_for_a_certain_need_fails():
    """A host that cannot hold its share of the optimizer is refused."""
    (finding,) = judged({}, replace(OPS, memory_bytes={"b": 100 << 30}))
    assert (finding.check, finding.level) == ("memory", "fail")


def test_locked_memory_matters_only_beside_an_active_adapter():
    """A low memlock fails for a user with InfiniBand, not for root, nor where no port is active."""
    low = {"limits": {"nofile": -1, "memlock": 65536}}
    assert judged(low) == []
    found = {(one.check, one.level) for one in judged({**low, "infiniband": (HCA,)})}
    assert ("limits", "fail") in found
    assert not {one.check for one in judged({**low, "infiniband": (HCA,)}, uid=0)} & {"limits"}


def test_processes_on_an_accelerator_are_named():
    """Who computes on a GPU is told with pid, user and run; what only draws is not."""
    worker = GpuProcess(pid=7, name="/opt/python", memory_mib=900, kind="C")
    screen = replace(worker, kind="G")
    assert judged({"gpus": (replace(GPU, processes=(screen,)),)}) == []
    (finding,) = judged({"gpus": (replace(GPU, processes=(worker,)),), "owners": {7: ("eve", "run-1")}})
    assert finding.saw == "accelerator 0: pid 7 eve run run-1 900 MiB"


@pytest.mark.parametrize(("there", "skew"), [(105.0, 0.0), (100.0, 0.0), (110.0, 0.0), (99.0, -1.0), (171.0, 61.0)])
def test_clock_skew_is_what_is_certain(there, skew):
    """A clock read between question and answer is off only by what lies outside."""
    assert clock_skew(there, 100.0, 110.0) == skew


LINKS = {name: Link(interface="eth0", address=f"10.0.0.{number}") for number, name in enumerate("abc", start=1)}
SIGHT = Sight(reached={}, pings={}, names={}, marks=(), master_busy=None)
HOSTS = {name: make_facts(name, number) for number, name in enumerate("abc", start=1)}


def peers(**sights):
    """Findings where these hosts saw something of note."""
    clear = {name: replace(SIGHT, reached=dict.fromkeys(set("abc") - {name})) for name in "abc"}
    return judge_peers(HOSTS, LINKS, {**clear, **sights}, 29500)


def test_hosts_that_see_each_other_give_nothing():
    """No finding where every port, name and packet arrives."""
    assert peers() == []


@pytest.mark.parametrize(
    ("sight", "host", "check", "level"),
    [
        (replace(SIGHT, reached={"b": "timed out", "c": None}), "b", "ports", "fail"),
        (replace(SIGHT, master_busy="Address already in use"), "a", "master-port", "fail"),
        (replace(SIGHT, marks=("b",)), "a", "shared-dir", "fail"),
        (replace(SIGHT, pings={"b": {"small": True, "large": False}}), "a", "mtu", "warn"),
    ],
)
def test_each_sight_gives_its_finding(sight, host, check, level):
    """A closed port, a busy port, a shared folder and lost large packets are findings of the right host."""
    (finding,) = peers(a=sight)
    assert (finding.host, finding.check, finding.level) == (host, check, level)


def test_where_no_datagram_arrives_packet_sizes_are_unknown():
    """A firewall that drops datagrams says nothing about their size."""
    assert peers(a=replace(SIGHT, pings={"b": {"small": False, "large": False}})) == []


def test_names_that_only_the_head_knows_are_fine():
    """Aliases that no host resolves are the head's own affair; one host that differs from the others is not."""
    unknown = replace(SIGHT, names={"a": (), "b": (), "c": ()})
    assert judge_names(HOSTS, dict.fromkeys("abc", unknown)) == []
    known = replace(SIGHT, names={name: (link.address,) for name, link in LINKS.items()})
    findings = judge_names(HOSTS, {"a": known, "b": known, "c": replace(known, names={**known.names, "a": ()})})
    assert [(one.host, one.level) for one in findings] == [("c", "warn")]


def test_large_clusters_are_not_crossed_by_every_pair():
    """Beyond a size each host tries host 0 and its neighbours, and every host is tried by somebody."""
    names = [f"n{number}" for number in range(200)]
    tried = {name: chosen_peers(name, names) for name in names}
    assert max(map(len, tried.values())) <= ALL_PAIRS
    assert set(names) == {other for others in tried.values() for other in others}
    assert all(name not in others for name, others in tried.items())


def test_names_of_checks_are_checked():
    """Several names in one word are taken, a misspelt one is refused with the nearest."""
    assert parse_names(["disk,shm", "clock"], option="--only") == {"disk", "shm", "clock"}
    with pytest.raises(UsageError, match="no check dsk"):
        parse_names(["dsk"], option="--skip")


def test_failures_can_be_skipped_by_name_but_not_unreachable_hosts():
    """`--skip-check` passes over its own check only."""
    (finding,) = judged({"gpus": (replace(GPU, mig=True),)})
    refuse_failures([finding], skip=frozenset({"mig"}))
    with pytest.raises(PreflightError, match="--skip-check mig"):
        refuse_failures([finding], skip=frozenset({"disk"}))
    with pytest.raises(PreflightError):
        refuse_failures([replace(finding, check="login")], skip=frozenset({"login"}))
