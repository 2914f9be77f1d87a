"""Runs on every host for ``check --links``: torch.distributed, brought up stage by stage by all ranks.

Given to the ranks' interpreter as text, with torch and the standard library only. Every rank tells each stage it has
passed, so that a stall names the stage and the hosts that are behind.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from datetime import timedelta
from typing import Any

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 23)
"""Bytes of the buffers in the sweep."""
REPEATS = 3
LONG_S = 0.2


def bring_up(request: dict[str, Any]) -> None:
    """Fork one process per rank of this host, collect what they tell, end those that are late, and answer."""
    children = {rank: _fork(request, rank, local) for local, rank in enumerate(request["ranks"])}
    deadline = time.monotonic() + request["limit_s"]
    told = {rank: _collect(pid, pipe, deadline) for rank, (pid, pipe) in children.items()}
    sys.stdout.write("\n" + json.dumps({"ranks": told}) + "\n")


def _fork(request: dict[str, Any], rank: int, local: int) -> tuple[int, int]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    os.close(reader)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def tell(stage: str, **more: Any) -> None:
        os.write(writer, (json.dumps({"stage": stage, **more}) + "\n").encode())

    try:
        _rank(request, rank, local, tell)
    except BaseException as error:  # noqa: BLE001  whatever it is, it is the answer
        tell("error", error=f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300] if str(error) else ''}")
    os._exit(0)


def _collect(pid: int, pipe: int, deadline: float) -> list[dict[str, Any]]:
    """What a rank has told until it ended, or was ended when time was up."""
    import select
    import signal

    text = b""
    while (left := deadline - time.monotonic()) > 0 and select.select([pipe], [], [], left)[0]:
        data = os.read(pipe, 65536)
        if not data:
            break
        text += data
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return [json.loads(line) for line in text.decode().splitlines() if line.endswith("}")]


def _rank(request: dict[str, Any], rank: int, local: int, tell: Any) -> None:
    os.environ.update(request["env"])
    log = tempfile.mkstemp(prefix="llmtrain-nccl-")[1]
    os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_FILE=log)
    import torch
    import torch.distributed as dist

    limit = timedelta(seconds=request["stage_s"])
    world = request["world_size"]
    tell("import")
    store = dist.TCPStore(request["address"], request["port"], world, is_master=rank == 0, timeout=limit)
    tell("rendezvous")
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    dist.barrier()
    tell("gloo")
    group, device = None, torch.device("cpu")
    if request["cuda"]:
        device = torch.device("cuda", request["slots"][local])
        torch.cuda.set_device(device)
        inner = [dist.new_group(ranks, backend="nccl", timeout=limit) for ranks in request["hosts"]]
        mine = next(item for item, ranks in zip(inner, request["hosts"], strict=True) if rank in ranks)
        dist.all_reduce(torch.ones(1, device=device), group=mine)
        torch.cuda.synchronize()
        tell("nccl-host")
        group = dist.new_group(list(range(world)), backend="nccl", timeout=limit)
        dist.all_reduce(torch.ones(1, device=device), group=group)
        torch.cuda.synchronize()
        tell("nccl", log=[line for line in open(log, errors="replace") if "network" in line or "NET/" in line][:50])
    os.unlink(log)
    tell("sweep", sweep=[one for op in ("all_reduce", "all_gather") for one in _sweep(op, world, device, group)])


def _sweep(op: str, world: int, device: Any, group: Any) -> list[dict[str, Any]]:
    """Growing buffers, until one takes long: all ranks stop at the same size."""
    import torch
    import torch.distributed as dist

    found = []
    for size in SIZES:
        found.append(_time(op, size, world, device, group))
        slowest = torch.tensor([found[-1]["seconds"]])
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        if slowest.item() > LONG_S:
            break
    return found


def _time(op: str, size: int, world: int, device: Any, group: Any) -> dict[str, Any]:
    """Seconds of one collective, and its bandwidths as nccl-tests count them, in GB/s."""
    import torch
    import torch.distributed as dist

    count = max(1, size // 4 // world) * world
    whole = torch.zeros(count, device=device)
    parts = list(torch.zeros(count, device=device).chunk(world))

    def once() -> None:
        if op == "all_reduce":
            dist.all_reduce(whole, group=group)
        else:
            dist.all_gather(parts, parts[0].clone(), group=group)
        if device.type == "cuda":
            torch.cuda.synchronize()

    once()
    begun = time.monotonic()
    for _ in range(REPEATS):
        once()
    seconds = (time.monotonic() - begun) / REPEATS
    rate = count * 4 / seconds / 1e9
    factor = (2 if op == "all_reduce" else 1) * (world - 1) / world
    return {"op": op, "bytes": count * 4, "seconds": seconds, "algbw": rate, "busbw": rate * factor}
