from __future__ import annotations

import os

from llmtrain.train.guardian import remove_buffers


def test_only_the_buffers_of_this_run_are_removed(tmp_path):
    """Shared memory of the ranks that met at this address and port goes; another run's and another user's stays."""
    mine = [f"deepspeed_allreduce_buffer_{os.getuid()}_10.0.0.1_20001_{rank}" for rank in range(2)]
    others = [
        f"deepspeed_allreduce_buffer_{os.getuid()}_10.0.0.1_20002_0",
        f"deepspeed_allreduce_buffer_{os.getuid() + 1}_10.0.0.1_20001_0",
        "sem.mp-abc",
    ]
    for name in (*mine, *others):
        (tmp_path / name).write_bytes(b"x")
    remove_buffers("10.0.0.1_20001", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)
