"""The same software everywhere: what must match fails, what may differ warns. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmtrain.cluster.checks.majority import odd_ones
from llmtrain.cluster.findings import Finding, Level

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmtrain.cluster.needs import Needs
    from llmtrain.cluster.probes import Facts

MUST_MATCH = ("torch", "deepspeed", "transformers", "trl")
"""Packages that must have one version everywhere: ranks run them in step."""
MAY_DIFFER = ("accelerate", "datasets", "peft")
"""Packages whose versions should agree."""


def judge_software(items: Sequence[Facts], needs: Needs) -> list[Finding]:
    """Missing packages, versions that differ, machines that differ."""
    findings = [*_missing(items, needs.packages), *_python(items), *_nccl(items), *_platform(items)]
    for name in MUST_MATCH:
        findings += _package(items, name, "fail")
    for name in MAY_DIFFER:
        findings += _package(items, name, "warn")
    return findings


def parity(items: Sequence[Facts]) -> dict[str, dict[str, str]]:
    """Name -> host -> version of all that is compared, for a table."""
    rows: dict[str, dict[str, str]] = {"python": {item.host: item.python for item in items}}
    for name in (*MUST_MATCH, *MAY_DIFFER):
        rows[name] = {item.host: item.packages.get(name) or "-" for item in items}
    rows["torch cuda"] = {item.host: item.details.torch_cuda or "-" for item in items}
    rows["nccl"] = {item.host: item.details.nccl or "-" for item in items}
    rows["driver"] = {item.host: item.details.driver or "-" for item in items}
    rows["glibc"] = {item.host: item.glibc for item in items}
    rows["kernel"] = {item.host: item.details.kernel or "-" for item in items}
    return rows


def _missing(items: Sequence[Facts], needed: Sequence[str]) -> list[Finding]:
    findings = []
    for item in items:
        missing = [name for name in needed if item.packages.get(name) is None]
        if missing:
            findings.append(
                Finding(
                    host=item.host,
                    check="packages",
                    level="fail",
                    saw=f"{item.executable} lacks {', '.join(missing)}",
                    wanted=", ".join(needed),
                    fix=f"ssh -- {item.host} {item.executable} -m pip install {' '.join(missing)}",
                )
            )
    return findings


def _package(items: Sequence[Facts], name: str, level: Level) -> list[Finding]:
    executables = {item.host: item.executable for item in items}
    return [
        Finding(
            host=host,
            check="versions",
            level=level,
            saw=f"{name} {version}",
            wanted=f"{name} {wanted}, as on most hosts",
            fix=f"ssh -- {host} {executables[host]} -m pip install {name}=={wanted}",
        )
        for host, version, wanted in odd_ones({item.host: item.packages.get(name) for item in items})
    ]


def _python(items: Sequence[Facts]) -> list[Finding]:
    return [
        Finding(
            host=host,
            check="versions",
            level="fail" if _minor(version) != _minor(wanted) else "warn",
            saw=f"python {version}",
            wanted=f"python {wanted}, as on most hosts",
            fix=f"give {host} an environment with Python {wanted}, or name one: per_host.{host}.python",
        )
        for host, version, wanted in odd_ones({item.host: item.python for item in items})
    ]


def _nccl(items: Sequence[Facts]) -> list[Finding]:
    """Only where there are GPUs to use it."""
    values = {item.host: item.details.nccl for item in items if item.accelerators}
    executables = {item.host: item.executable for item in items}
    return [
        Finding(
            host=host,
            check="versions",
            level="fail",
            saw=f"NCCL {version}",
            wanted=f"NCCL {wanted}, as on most hosts",
            fix=f"ssh -- {host} {executables[host]} -m pip install --force-reinstall torch",
        )
        for host, version, wanted in odd_ones(values)
    ]


def _platform(items: Sequence[Facts]) -> list[Finding]:
    kernels = {item.host: _minor(item.details.kernel) if item.details.kernel else None for item in items}
    return [
        *_differing({item.host: item.machine for item in items}, "fail", "processor", "one processor architecture"),
        *_differing({item.host: item.glibc or None for item in items}, "warn", "C library", "one version"),
        *_differing(kernels, "warn", "kernel", "one version"),
        *_driver(items),
    ]


def _differing(values: Mapping[str, str | None], level: Level, what: str, wanted_text: str) -> list[Finding]:
    return [
        Finding(
            host=host,
            check="platform",
            level=level,
            saw=f"{what} {value}",
            wanted=f"{what} {wanted}, as on most hosts",
            fix=f"{wanted_text}: update {host}, or leave it out with --exclude {host}",
        )
        for host, value, wanted in odd_ones(values)
    ]


def _driver(items: Sequence[Facts]) -> list[Finding]:
    return [
        Finding(
            host=host,
            check="driver",
            level="warn",
            saw=f"NVIDIA driver {version}",
            wanted=f"driver {wanted}, as on most hosts",
            fix=f"install driver {wanted} on {host}",
        )
        for host, version, wanted in odd_ones({item.host: item.details.driver for item in items})
    ]


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
