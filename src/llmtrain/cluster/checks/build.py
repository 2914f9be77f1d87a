"""DeepSpeed's operations: built already, or can they be built when a rank first uses them. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmtrain.cluster.findings import Finding
from llmtrain.cluster.probes import ops_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmtrain.cluster.findings import Level
    from llmtrain.cluster.needs import Needs
    from llmtrain.cluster.probes import Facts


def judge_build(items: Sequence[Facts], needs: Needs) -> list[Finding]:
    """One finding per host and missing tool, where an operation still has to be compiled."""
    return [
        Finding(
            host=item.host,
            check="build",
            level=level,
            saw=f"{saw}, and {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not built yet",
            wanted="a C++ compiler, ninja, Python.h" + (" and nvcc" if needs.cuda else ""),
            fix=fix,
        )
        for item in items
        if (missing := unbuilt_ops(item, needs.ops))
        for level, saw, fix in _obstacles(item, cuda=needs.cuda)
    ]


def unbuilt_ops(item: Facts, ops: Sequence[str]) -> list[str]:
    """Operations that the first rank to need them would have to compile."""
    if not item.details.tools:
        return []
    there = {*item.details.shipped_ops, *(name.rpartition("/")[2] for name in _current(item))}
    return [op for op in ops if op not in there]


def _current(item: Facts) -> list[str]:
    folder = ops_folder(item).rpartition("/")[2]
    return [name for name in item.details.built_ops if name.rpartition("/")[0] == folder]


def _obstacles(item: Facts, *, cuda: bool) -> list[tuple[Level, str, str]]:
    tools = item.details.tools
    run = f"ssh -- {item.host}"
    found: list[tuple[Level, str, str]] = []
    if tools.get("c++") is None:
        found.append(("fail", "no C++ compiler", f"{run} apt-get install -y g++"))
    if tools.get("ninja") is None:
        found.append(("fail", "no ninja", f"{run} {item.executable} -m pip install ninja"))
    if item.details.python_header is False:
        version = ".".join(item.python.split(".")[:2])
        found.append(("fail", "no Python.h", f"{run} apt-get install -y python{version}-dev"))
    if cuda and tools.get("nvcc") is None:
        wanted = item.details.torch_cuda or "of torch's version"
        found.append(("fail", "no nvcc", f"install the CUDA toolkit {wanted} on {item.host}, or set CUDA_HOME there"))
    elif cuda and _major(item.details.nvcc) != _major(item.details.torch_cuda):
        saw = f"nvcc {item.details.nvcc} beside a torch for CUDA {item.details.torch_cuda}"
        found.append(("warn", saw, f"install the CUDA toolkit {item.details.torch_cuda} on {item.host}"))
    return found


def _major(version: str | None) -> str | None:
    return version.partition(".")[0] if version else None
