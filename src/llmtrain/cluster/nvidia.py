"""Read what NVIDIA's tools print. Pure; fields that a card or driver does not know are None, whatever they print."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

if TYPE_CHECKING:
    from collections.abc import Mapping

_NOTHING = re.compile(
    r"^\[?(n/a|not supported|unknown error|insufficient permissions|requested functionality.*)\]?$", re.IGNORECASE
)
_THROTTLES = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")


@dataclass(frozen=True, kw_only=True)
class GpuProcess:
    """A process that computes on a GPU."""

    pid: int
    """Its id, as the driver sees it; in a container this may be another one than inside."""
    name: str
    """Program."""
    memory_mib: int | None
    """Memory it holds there."""
    kind: str
    """``C`` computes, ``G`` draws, ``C+G`` both."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU as ``nvidia-smi -q -x`` describes it."""

    name: str
    """Product name."""
    uuid: str | None
    """Its id."""
    total_mib: int | None
    """Memory; None where it shares the host's."""
    used_mib: int | None
    """Memory in use."""
    mig: bool | None
    """Whether it is split."""
    persistence: bool | None
    """Whether the driver keeps it awake."""
    uncorrectable: int | None
    """Memory errors since the driver was loaded that could not be repaired."""
    remap_pending: bool | None
    """A broken row waits for a reset."""
    remap_failed: bool | None
    """A broken row could not be replaced."""
    recovery: str | None
    """What the driver asks for, ``None`` printed as None."""
    throttles: tuple[str, ...]
    """Reasons that hold its clocks down now, for which no load is to blame."""
    link_width: tuple[int, int] | None
    """PCIe lanes in use, and possible."""
    fabric: str | None
    """NVSwitch registration: ``Completed``, ``In Progress``; None where there is no switch."""
    processes: tuple[GpuProcess, ...]
    """What runs there."""


def parse_smi(text: str) -> tuple[str | None, tuple[Gpu, ...]]:
    """Driver version and GPUs from ``nvidia-smi -q -x``.

    Raises:
        ValueError: this is not such an output.
    """
    if "<!ENTITY" in text:
        raise ValueError("entities in the answer of nvidia-smi")
    try:
        root = ET.fromstring(text[text.index("<") :])  # noqa: S314  without entities it is harmless
    except (ET.ParseError, ValueError) as error:
        raise ValueError(f"no answer of nvidia-smi: {error}") from None
    return _text(root, "driver_version"), tuple(_gpu(node) for node in root.findall("gpu"))


def _gpu(node: ET.Element) -> Gpu:
    return Gpu(
        name=_text(node, "product_name") or "unknown GPU",
        uuid=_text(node, "uuid"),
        total_mib=_number(node, "fb_memory_usage/total"),
        used_mib=_number(node, "fb_memory_usage/used"),
        mig=_flag(node, "mig_mode/current_mig"),
        persistence=_flag(node, "persistence_mode"),
        uncorrectable=_uncorrectable(node),
        remap_pending=_flag(node, "remapped_rows/remapped_row_pending"),
        remap_failed=_flag(node, "remapped_rows/remapped_row_failure"),
        recovery=None if (action := _text(node, "gpu_recovery_action")) in {None, "None"} else action,
        throttles=_throttles(node),
        link_width=_width(node),
        fabric=_text(node, "fabric/state"),
        processes=tuple(_process(one) for one in node.findall("processes/process_info")),
    )


def _text(node: ET.Element, path: str) -> str | None:
    value = (node.findtext(path) or "").strip()
    return None if not value or _NOTHING.match(value) else value


def _number(node: ET.Element, path: str) -> int | None:
    match = re.match(r"\d+", _text(node, path) or "")
    return int(match[0]) if match else None


def _flag(node: ET.Element, path: str) -> bool | None:
    value = (_text(node, path) or "").lower()
    return {"enabled": True, "yes": True, "disabled": False, "no": False}.get(value)


def _uncorrectable(node: ET.Element) -> int | None:
    """The newer form counts by kind of memory, the older one by width of error."""
    volatile = node.find("ecc_errors/volatile")
    if volatile is None:
        return None
    paths = ("sram_uncorrectable", "sram_uncorrectable_parity", "sram_uncorrectable_secded", "dram_uncorrectable")
    counts = [_number(volatile, path) for path in (*paths, "double_bit/total")]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _throttles(node: ET.Element) -> tuple[str, ...]:
    """The element was renamed from ``throttle`` to ``event`` with driver 535."""
    return tuple(
        name
        for word in ("event", "throttle")
        for name in _THROTTLES
        if _text(node, f"clocks_{word}_reasons/clocks_{word}_reason_{name}") == "Active"
    )


def _width(node: ET.Element) -> tuple[int, int] | None:
    now = _number(node, "pci/pci_gpu_link_info/link_widths/current_link_width")
    most = _number(node, "pci/pci_gpu_link_info/link_widths/max_link_width")
    return (now, most) if now and most else None


def _process(node: ET.Element) -> GpuProcess:
    return GpuProcess(
        pid=_number(node, "pid") or 0,
        name=_text(node, "process_name") or "?",
        memory_mib=_number(node, "used_memory"),
        kind=_text(node, "type") or "C",
    )


def parse_topology(text: str) -> dict[tuple[str, str], str]:
    """Pairs of GPUs -> link, from ``nvidia-smi topo -m``: ``NV4`` is four NVLinks, ``SYS`` crosses sockets."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in text.splitlines()]
    header = next((line.split() for line in lines if line.split()[:1] == ["GPU0"]), [])
    columns = [name for name in header if re.fullmatch(r"GPU\d+", name)]
    links = {}
    for line in lines:
        row = line.split()
        if row and row[0] in columns and len(row) > len(columns) and row[1 + columns.index(row[0])] == "X":
            links.update({(row[0], other): row[1 + i] for i, other in enumerate(columns) if other != row[0]})
    return links


def parse_nvcc(text: str) -> str | None:
    """``12.4`` from ``nvcc --version``."""
    match = re.search(r"release (\d+\.\d+)", text)
    return match[1] if match else None


def parse_xids(lines: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    """(PCI address, XID) of the driver's lines in a kernel log."""
    found = (re.search(r"NVRM: Xid \(([^)]*)\): (\d+)", line) for line in lines)
    return tuple((match[1], int(match[2])) for match in found if match)


def parse_transport(text: str) -> str | None:
    """``IB``, ``Socket`` or a plugin's name, from a log under ``NCCL_DEBUG=INFO``.

    Versions before 2.5 say only which devices they use.
    """
    match = re.search(r"NCCL INFO Using network (.+)", text)
    if match:
        return match[1].strip()
    if re.search(r"NCCL INFO NET/IB : Using ", text):
        return "IB"
    return "Socket" if re.search(r"NCCL INFO NET/Socket : Using ", text) else None


def smi_error(answer: Mapping[str, object]) -> str:
    """The first line an nvidia-smi that failed has printed, on whichever stream."""
    text = str(answer.get("stdout") or answer.get("stderr") or "").strip()
    return text.splitlines()[0].strip() if text else f"exit code {answer.get('code')}"
