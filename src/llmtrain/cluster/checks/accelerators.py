"""Accelerators: as many as slots, working, free, alike. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmtrain.cluster.checks.majority import odd_ones
from llmtrain.cluster.findings import Finding, Level
from llmtrain.cluster.nvidia import parse_xids

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmtrain.cluster.needs import Needs
    from llmtrain.cluster.nvidia import Gpu
    from llmtrain.cluster.probes import Facts
    from llmtrain.spec.hostfile import Cluster, Host

GRAVE_XIDS = {48: "double bit error", 74: "NVLink error", 79: "fallen off the bus", 95: "uncontained memory error"}
"""XIDs after which a GPU or its link is not to be trusted before a reset."""
HIDDEN_MIB = 2048
"""Memory in use without a process: more than a driver takes for itself."""


def judge_accelerators(cluster: Cluster, facts: Mapping[str, Facts], needs: Needs) -> list[Finding]:
    """With no accelerator anywhere the ranks run on processors, and slots are free to choose."""
    items = [facts[host.name] for host in cluster.hosts if host.name in facts]
    findings = [*_drivers(items), *_other_makes(items)]
    if not any(item.accelerators for item in items):
        return findings
    for host in cluster.hosts:
        if host.name in facts:
            findings += _slots(host, facts[host.name], cluster.origin)
            findings += _used(host, facts[host.name])
            findings += _health(facts[host.name])
    return [*findings, *_types(items), *_precision(items, needs)]


def _drivers(items: Sequence[Facts]) -> list[Finding]:
    return [
        Finding(
            host=item.host,
            check="driver",
            level="fail" if item.details.driver_loaded or "version mismatch" in error.lower() else "warn",
            saw=f"nvidia-smi: {error}",
            wanted="a driver whose module and libraries have one version",
            fix=f"ssh -- {item.host} reboot  # a new library needs the module of its version; or reload nvidia*",
        )
        for item in items
        if (error := item.details.driver_error)
    ]


def _other_makes(items: Sequence[Facts]) -> list[Finding]:
    return [
        Finding(
            host=item.host,
            check="accelerator-type",
            level="unknown",
            saw=f"an accelerator of another make ({', '.join(item.other_accelerators)})",
            wanted="NVIDIA: llmtrain is not tested on others",
            fix="to train on the processors of the hosts instead: --env DS_ACCELERATOR=cpu",
        )
        for item in items
        if item.other_accelerators and not item.accelerators
    ]


def _slots(host: Host, item: Facts, origin: str) -> list[Finding]:
    have, highest = len(item.accelerators), host.slots[-1]
    if highest < have:
        return []
    return [
        Finding(
            host=host.name,
            check="slots",
            level="fail",
            saw=f"{have} accelerator{'' if have == 1 else 's'}",
            wanted=f"slot {highest} is used, so at least {highest + 1}",
            fix=f"write '{host.name} slots={have}' in {origin}"
            if have
            else f"take {host.name} out of {origin}, or repair its driver (nvidia-smi)",
        )
    ]


def _used(host: Host, item: Facts) -> list[Finding]:
    """Split or busy accelerators, among those in use."""
    findings = []
    for slot in host.slots:
        if slot >= len(item.details.gpus):
            continue
        gpu = item.details.gpus[slot]
        if gpu.mig:
            findings.append(_mig(item.host, slot))
        elif busy := _busy(item, gpu):
            findings.append(
                Finding(
                    host=item.host,
                    check="accelerator-busy",
                    level="warn",
                    saw=f"accelerator {slot}: {busy}",
                    wanted="nobody else on it",
                    fix=f"llmtrain who, or ssh -- {item.host} nvidia-smi; --exclude {item.host}:{slot} leaves it out",
                )
            )
    return findings


def _mig(host: str, slot: int) -> Finding:
    return Finding(
        host=host,
        check="mig",
        level="fail",
        saw=f"accelerator {slot} is split by MIG",
        wanted="whole GPUs: NCCL cannot join slices of one",
        fix=f"ssh -- {host} nvidia-smi -i {slot} -mig 0",
    )


def _busy(item: Facts, gpu: Gpu) -> str | None:
    computing = [one for one in gpu.processes if "C" in one.kind]
    if computing:
        return ", ".join(_process(item, one.pid, one.name, one.memory_mib) for one in computing[:3])
    if gpu.used_mib and gpu.used_mib > HIDDEN_MIB and not gpu.processes:
        return f"{gpu.used_mib} MiB in use by processes that cannot be seen from here (another container?)"
    return None


def _process(item: Facts, pid: int, name: str, memory_mib: int | None) -> str:
    user, run = item.details.owners.get(pid, (None, None))
    words = [f"pid {pid}", user or "another user", f"run {run}" if run else name.rpartition("/")[2]]
    return " ".join([*words, f"{memory_mib} MiB"] if memory_mib is not None else words)


def _health(item: Facts) -> list[Finding]:
    return [
        Finding(
            host=item.host,
            check="accelerator-health",
            level=level,
            saw=saw,
            wanted="a healthy accelerator",
            fix=f"ssh -- {item.host} nvidia-smi --gpu-reset  # nothing may run on it; else leave it out with --exclude",
        )
        for level, saw in [*_grave(item), *_light(item)]
    ]


def _grave(item: Facts) -> list[tuple[Level, str]]:
    return [
        ("fail", f"accelerator {slot}: the driver asks for: {gpu.recovery}")
        for slot, gpu in enumerate(item.details.gpus)
        if gpu.recovery
    ]


def _light(item: Facts) -> list[tuple[Level, str]]:
    found: list[tuple[Level, str]] = []
    for slot, gpu in enumerate(item.details.gpus):
        signs = [
            f"{gpu.uncorrectable} uncorrectable memory errors" if gpu.uncorrectable else "",
            "a broken memory row could not be replaced" if gpu.remap_failed else "",
            "a broken memory row waits for a reset" if gpu.remap_pending else "",
            f"clocks held down ({', '.join(gpu.throttles)})" if gpu.throttles else "",
            _narrow(gpu),
        ]
        found += [("warn", f"accelerator {slot}: {sign}") for sign in signs if sign]
    for address, number in sorted(set(parse_xids(item.details.xids))):
        if number in GRAVE_XIDS:
            found.append(("warn", f"XID {number} ({GRAVE_XIDS[number]}) at {address} since boot"))
    return found


def _narrow(gpu: Gpu) -> str:
    now, most = gpu.link_width or (1, 1)
    return f"{now} of {most} PCIe lanes" if now * 2 <= most else ""


def _types(items: Sequence[Facts]) -> list[Finding]:
    names = {item.host: ", ".join(sorted({gpu["name"] or "?" for gpu in item.accelerators})) or None for item in items}
    return [
        Finding(
            host=host,
            check="accelerator-type",
            level="warn",
            saw=name,
            wanted=f"{wanted}, as on most hosts; the weakest sets pace, memory and precision for all",
            fix=f"--exclude {host}, or live with it",
        )
        for host, name, wanted in odd_ones(names)
    ]


def _precision(items: Sequence[Facts], needs: Needs) -> list[Finding]:
    if not needs.bf16:
        return []
    return [
        Finding(
            host=item.host,
            check="accelerator-type",
            level="warn",
            saw=f"{old[0]} has no bf16",
            wanted="compute capability 8.0 (Ampere) or later for dtype bf16",
            fix="--set model.dtype=fp16",
        )
        for item in items
        if (old := [gpu["name"] for gpu in item.accelerators if float(gpu.get("compute_cap") or 99) < 8.0])
    ]
