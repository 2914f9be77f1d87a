"""Enough of the machine: memory, shared memory, limits, clock. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmtrain.cluster.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmtrain.cluster.needs import Needs
    from llmtrain.cluster.probes import Facts

MIB, GIB = 1 << 20, 1 << 30
SHM = "/dev/shm"  # noqa: S108  looked at, nothing is written there
SMALL_SHM = 64 * MIB
"""What container engines give; NCCL and loader processes need more."""
MIN_FILES = 1024
MAX_SKEW_S = 2.0


def judge_machine(items: Sequence[Facts], needs: Needs) -> list[Finding]:
    """Findings about every host by itself."""
    return [
        finding
        for item in items
        for finding in (*_memory(item, needs), *_shm(item), *_files(item), *_memlock(item), *_clock(item))
    ]


def _memory(item: Facts, needs: Needs) -> list[Finding]:
    need = needs.memory_bytes.get(item.host, 0)
    if item.memory_total_bytes < need:
        level, have = "fail", item.memory_total_bytes
    elif item.memory_available_bytes < max(need, GIB):
        level, have = "warn", item.memory_available_bytes
    else:
        return []
    return [
        Finding(
            host=item.host,
            check="memory",
            level="fail" if level == "fail" else "warn",
            saw=f"{have / GIB:.1f} GiB {'in all' if level == 'fail' else 'available'}",
            wanted=f"{max(need, GIB) / GIB:.1f} GiB for what this host holds of model and optimizer",
            fix=f"see what uses it: ssh -- {item.host} ps -eo rss,user,pid,args --sort=-rss | head; or use more hosts",
        )
    ]


def _shm(item: Facts) -> list[Finding]:
    total, free = item.details.shm_total_bytes, item.details.shm_free_bytes
    if total is None or free is None or (total > SMALL_SHM and free > SMALL_SHM // 2):
        return []
    return [
        Finding(
            host=item.host,
            check="shm",
            level="fail" if free < MIB else "warn",
            saw=f"{SHM} has {total / MIB:.0f} MiB, {free / MIB:.0f} MiB free",
            wanted=f"more than {SMALL_SHM // MIB} MiB: ranks and their loaders meet there (Bus error otherwise)",
            fix=f"ssh -- {item.host} mount -o remount,size=8G {SHM}  # in a container: start it with --shm-size=8g",
        )
    ]


def _files(item: Facts) -> list[Finding]:
    soft = item.details.limits.get("nofile", -1)
    if soft == -1 or soft >= MIN_FILES:
        return []
    return [
        Finding(
            host=item.host,
            check="limits",
            level="warn",
            saw=f"{soft} open files",
            wanted=f"at least {MIN_FILES} in SSH sessions",
            fix=f"raise nofile in /etc/security/limits.conf on {item.host}, and take 'ulimit -n' out of its ~/.bashrc",
        )
    ]


def _memlock(item: Facts) -> list[Finding]:
    """Adapters pin what they send from; root may pin what it likes."""
    active = any("ACTIVE" in port.get("state", "") for port in item.details.infiniband)
    limit = item.details.limits.get("memlock", -1)
    if not active or item.uid == 0 or limit == -1 or limit >= GIB:
        return []
    return [
        Finding(
            host=item.host,
            check="limits",
            level="fail" if limit < 8 * MIB else "warn",
            saw=f"{limit // 1024} KiB may be locked in memory",
            wanted="unlimited where InfiniBand is used (ibv_reg_mr fails otherwise)",
            fix=f"write '* - memlock unlimited' to /etc/security/limits.conf on {item.host}, "
            "and LimitMEMLOCK=infinity for its ssh service; log in anew",
        )
    ]


def _clock(item: Facts) -> list[Finding]:
    skew = item.clock_skew_s
    if skew is None or abs(skew) <= MAX_SKEW_S:
        return []
    return [
        Finding(
            host=item.host,
            check="clock",
            level="warn",
            saw=f"its clock is {abs(skew):.0f} s {'ahead' if skew > 0 else 'behind'}",
            wanted=f"within {MAX_SKEW_S:.0f} s of the head's",
            fix=f"ssh -- {item.host} timedatectl set-ntp true",
        )
    ]
