"""What a host says beyond its facts, see :mod:`hostdetails`; None or empty means unknown, and is never judged."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llmtrain.cluster.nvidia import Gpu, parse_nvcc, parse_smi, smi_error

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True)
class Details:
    """A host's limits, tools and drivers."""

    kernel: str | None = None
    """Kernel release."""
    user: str | None = None
    """Login name there."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """``nofile``, ``memlock`` (bytes), ``nproc``: soft limits of the SSH session; -1 for none."""
    shm_total_bytes: int | None = None
    """Size of /dev/shm."""
    shm_free_bytes: int | None = None
    """Free space there."""
    node_mount: tuple[str, str] = ("", "")
    """Type and options of the file system of the working folder."""
    home_mount: tuple[str, str] = ("", "")
    """The same for the home."""
    tools: Mapping[str, str | None] = field(default_factory=dict)
    """Program -> path, None where it is missing."""
    nvcc: str | None = None
    """Version of the CUDA compiler."""
    python_header: bool | None = None
    """Whether Python.h is there, which every extension includes."""
    torch_cuda: str | None = None
    """CUDA version torch was built for."""
    nccl: str | None = None
    """Version of the NCCL package."""
    built_ops: tuple[str, ...] = ()
    """``VERSIONS/OP`` compiled in the working folder."""
    shipped_ops: tuple[str, ...] = ()
    """Operations compiled when DeepSpeed was installed."""
    driver: str | None = None
    """Version of the NVIDIA driver."""
    driver_error: str | None = None
    """What nvidia-smi says where it fails."""
    driver_loaded: bool = False
    """Whether the kernel module is there."""
    gpus: tuple[Gpu, ...] = ()
    """NVIDIA GPUs."""
    owners: Mapping[int, tuple[str | None, str | None]] = field(default_factory=dict)
    """Process id -> user and llmtrain run, for the processes on GPUs that are visible there."""
    xids: tuple[str, ...] = ()
    """The driver's lines in the kernel log."""
    infiniband: tuple[Mapping[str, str], ...] = ()
    """Ports of host channel adapters: device, port, state, phys_state, rate, link_layer."""
    peermem: bool = False
    """Whether adapters can read GPU memory."""
    nvswitch: bool = False
    """Whether there is an NVSwitch."""
    fabricmanager: bool = False
    """Whether its manager runs."""


_PLAIN = (
    "kernel",
    "user",
    "limits",
    "shm_total_bytes",
    "shm_free_bytes",
    "tools",
    "python_header",
    "driver_loaded",
    "peermem",
    "nvswitch",
    "fabricmanager",
)


def parse_details(answer: Mapping[str, Any]) -> Details:
    """Details from the decoded answer of a host; an empty one gives all unknown."""
    if not answer:
        return Details()
    driver, gpus, error = _gpus(answer["smi"])
    torch = answer["torch"]
    return Details(
        **{key: answer[key] for key in _PLAIN},
        node_mount=(answer["node_mount"]["type"], answer["node_mount"]["options"]),
        home_mount=(answer["home_mount"]["type"], answer["home_mount"]["options"]),
        nvcc=parse_nvcc(answer["nvcc"]["stdout"]) if answer["nvcc"] else None,
        torch_cuda=torch["cuda"],
        nccl=torch["nccl"],
        built_ops=tuple(answer["built_ops"]),
        shipped_ops=tuple(answer["shipped_ops"]),
        driver=driver,
        driver_error=error,
        gpus=gpus,
        owners={int(pid): (one["user"], one["run"]) for pid, one in answer["owners"].items()},
        xids=tuple(answer["xids"]),
        infiniband=tuple(answer["infiniband"]),
    )


def _gpus(answer: Mapping[str, Any] | None) -> tuple[str | None, tuple[Gpu, ...], str | None]:
    """Driver, GPUs and error; all unknown without an nvidia-smi."""
    if answer is None:
        return None, (), None
    if answer["code"] != 0:
        return None, (), smi_error(answer)
    try:
        driver, gpus = parse_smi(answer["stdout"])
    except ValueError:
        return None, (), None
    return driver, gpus, None
