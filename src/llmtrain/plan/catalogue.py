"""Accelerators, links and hosts by name: the shipped catalogue, with a user's assumptions laid over it."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.errors import UsageError
from llmtrain.spec.yamlfile import parse_yaml

if TYPE_CHECKING:
    from collections.abc import Sequence

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
ASSUMPTIONS = {
    "host.ram": "memory of a host, as in 1TiB",
    "host.nvme": "room on its NVMe drives, as in 4TB",
    "host.pcie": "host to accelerator, GB/s each",
    "host.adam": "seconds of CPU Adam per billion parameters on a host",
    "link.inter": "all network cards of a host together, as in 100Gbit",
    "link.intra": "ring inside a host, GB/s",
    "gpu": "accelerator of the hosts, by its catalogue name",
    "gpu.memory": "memory of an accelerator, as in 80GiB",
    "gpu.tflops": "matmul rate",
    "software": "measured over predicted speed, as in 0.8",
    "loss": "logits, if a program of yours holds all of them; fused, with Liger; the built-in one makes them in tiles",
    "lora.rank": "rank of adapters, if only these are trained",
    "load": "whole, if every rank loads the whole model",
}
"""Keys of ``--assume`` and what they mean."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One kind of host and what connects several of them."""

    accelerator: str
    """Its name in the catalogue."""
    memory_bytes: int
    """Usable memory of one accelerator."""
    gemm: float
    """Matmul rate, FLOP/s."""
    attention: float
    """Attention rate, FLOP/s, counting the causal half only."""
    elementwise: float
    """Seconds per token, layer and unit of hidden size."""
    launch: float
    """Seconds per layer and pass."""
    intra: float
    """Bytes/s of a ring inside a host."""
    inter: float
    """Bytes/s that leave and enter a host, all cards together."""
    latency: float
    """Seconds of one step of a collective between hosts."""
    ram_bytes: int
    """Memory of a host."""
    nvme_bytes: int
    """Room on its NVMe drives."""
    pcie: float
    """Bytes/s between host and one accelerator."""
    pcie_shared: float
    """The same, all accelerators of a host together."""
    adam: float
    """Seconds of CPU Adam per parameter on a host."""
    nvme_read: float
    """Bytes/s."""
    nvme_write: float
    """Bytes/s."""
    software: float | None = None
    """Measured over predicted speed; by the attention kernel if not given."""


def parse_size(text: str) -> int:
    """``80GiB``, ``1.5TB`` or ``1e9`` as bytes.

    Raises:
        UsageError: not a size.
    """
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([KMGT]?i?)B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise UsageError(f"{text!r} is not a size", where="--assume", fix="write it as in 80GiB or 1.5TB")
    return int(float(match[1]) * UNITS[match[2].upper()])


def parse_rate(text: str) -> float:
    """``100Gbit`` or ``12GB`` (a second) as bytes/s; a bare number is GB/s.

    Raises:
        UsageError: not a rate.
    """
    cleaned = text.strip().removesuffix("/s").removesuffix("ps")
    match = re.fullmatch(r"([0-9.]+)\s*(?:([KMGT])?(bit|b|B)?)", cleaned)
    if match is None:
        raise UsageError(f"{text!r} is not a rate", where="--assume", fix="write it as in 100Gbit or 12GB")
    unit = UNITS[match[2].upper()] if match[2] else (10**9 if match[3] is None else 1)
    return float(match[1]) * unit / (8 if match[3] in ("bit", "b") else 1)


@cache
def read_catalogue() -> dict[str, Any]:
    """The shipped catalogue."""
    path = Path(__file__).parent / "catalogue.yaml"
    found: dict[str, Any] = parse_yaml(path.read_text(encoding="utf-8"), name=str(path))[0]
    return found


def find_accelerator(name: str) -> str:
    """The catalogue's name for what a user or ``nvidia-smi`` calls an accelerator.

    Raises:
        UsageError: nothing like it, with what there is.
    """
    known = read_catalogue()["accelerators"]
    plain = _plain(name)
    if exact := [key for key in known if _plain(key) == plain]:
        return str(exact[0])
    # "A10" must not find an A100, nor "NVIDIA A100-SXM4-80GB" an A10.
    words = re.split(r"[^a-z0-9]+", name.lower())
    same = [key for key in known if _plain(key.split("-")[0]) in (*words, "".join(words[-2:]), "".join(words[1:3]))]
    sized = [key for key in same if key.split("-")[1].lower() in plain]
    if found := sized or same:
        return str(found[0])
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.3) or list(known)
    raise UsageError(f"no accelerator is called {name!r}", where="--cluster", fix=f"one of: {', '.join(near)}")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def plan_hardware(name: str, assumptions: Sequence[str] = ()) -> Hardware:
    """A kind of host by its accelerator's name, a user's assumptions laid over it.

    Raises:
        UsageError: an unknown accelerator, or an assumption that cannot be read.
    """
    book = read_catalogue()
    key = find_accelerator(name)
    entry, host, network = book["accelerators"][key], book["host"], book["network"]
    base = Hardware(
        accelerator=key,
        memory_bytes=parse_size(entry["memory"]),
        gemm=entry["gemm_tflops"] * 1e12,
        attention=entry["attention_tflops"] * 1e12,
        elementwise=float(entry["elementwise_s"]),
        launch=float(entry["launch_s"]),
        intra=book["links"][entry["intra"]]["gb_s"] * 1e9,
        inter=network["wire_gbit"] * 1e9 / 8 * network["efficiency"],
        latency=float(network["latency_s"]),
        ram_bytes=parse_size(host["ram"]),
        nvme_bytes=parse_size(host["nvme"]),
        pcie=host["pcie_gb_s"] * 1e9,
        pcie_shared=host["pcie_shared_gb_s"] * 1e9,
        adam=host["adam_s_per_billion"] / 1e9,
        nvme_read=host["nvme_read_gb_s"] * 1e9,
        nvme_write=host["nvme_write_gb_s"] * 1e9,
    )
    return _assume(base, assumptions, float(network["efficiency"]))


def parse_count(key: str, text: str) -> int:
    """A whole number above zero.

    Raises:
        UsageError: it is not.
    """
    if not text.isdigit() or not int(text):
        raise UsageError(f"--assume {key}={text} is not a number", where="--assume", fix=ASSUMPTIONS[key])
    return int(text)


def parse_assumptions(texts: Sequence[str]) -> dict[str, str]:
    """``KEY=VALUE`` texts as a mapping.

    Raises:
        UsageError: no equals sign, or an unknown key.
    """
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or key not in ASSUMPTIONS:
            near = difflib.get_close_matches(key, ASSUMPTIONS, n=1)
            fix = f"did you mean {near[0]}?" if near else "; ".join(f"{k}: {v}" for k, v in ASSUMPTIONS.items())
            raise UsageError(f"--assume {text} cannot be read", where="--assume", fix=fix)
        found[key] = value
    return found


def _assume(base: Hardware, texts: Sequence[str], efficiency: float) -> Hardware:
    given = parse_assumptions(texts)
    changes: dict[str, Any] = {}
    for key, field in (("host.ram", "ram_bytes"), ("host.nvme", "nvme_bytes"), ("gpu.memory", "memory_bytes")):
        if key in given:
            changes[field] = parse_size(given[key])
    for key, field in (("host.pcie", "pcie"), ("link.intra", "intra")):
        if key in given:
            changes[field] = parse_rate(given[key])
    if "link.inter" in given:
        changes["inter"] = parse_rate(given["link.inter"]) * efficiency
    for key, field, unit in (("gpu.tflops", "gemm", 1e12), ("host.adam", "adam", 1e-9), ("software", "software", 1.0)):
        if key in given:
            changes[field] = _number(key, given[key]) * unit
    return replace(base, **changes)


def _number(key: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"--assume {key}={text} is not a number", where="--assume", fix=ASSUMPTIONS[key]) from None
