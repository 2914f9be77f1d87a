from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from tests.cluster.hosts import gpu
from tests.launch.jobs import write_job

from llmtrain.errors import DoesNotFitError
from llmtrain.launch.fit import judge_unfit, refuse_unfit
from llmtrain.launch.job import Selection
from llmtrain.launch.prepare import plan_launch

SMI = """\
#!/bin/sh
case "$*" in *index,name,uuid,memory.total*) ;; *) exit 9 ;; esac
echo "0, NVIDIA A100-SXM4-80GB, GPU-1, {mib}, 0, 8.0, 550.54"
"""


def with_gpus(folder, mib, **options):
    """A job on two hosts with two GPUs of that size each, its facts and configuration."""
    rows = tuple({**gpu(), "index": str(index), "memory.total": mib} for index in range(2))
    hosts = {name: {"accelerators": rows} for name in ("gpu004", "gpu006")}
    job, contact = write_job(folder, hosts="gpu004 slots=2\ngpu006 slots=2\n", **options, **hosts)
    return job, contact.facts, plan_launch(job, contact, "run-1", {}).deepspeed.config


def test_run_that_cannot_fit_is_refused_with_what_would_fit(tmp_path):
    """Tensors beyond the smallest GPU there is stop the launch, with its size and a way out."""
    job, facts, config = with_gpus(tmp_path, "1")
    with pytest.raises(DoesNotFitError) as refused:
        refuse_unfit(job, facts, config, cuda=True)
    assert refused.value.exit_code == 5
    assert refused.value.fix
    (finding,) = judge_unfit(job, facts, config, cuda=True)
    assert (finding.check, finding.level, finding.host) == ("memory", "fail", "gpu004")


@pytest.mark.parametrize(
    ("mib", "cuda", "skip"),
    [("81920", True, ()), ("[N/A]", True, ()), ("1", False, ()), ("1", True, ("memory",))],
    ids=["fits", "size unknown", "on processors", "the user takes it upon himself"],
)
def test_only_what_is_certain_is_refused(tmp_path, mib, cuda, skip):
    """A run that fits, whose GPUs do not say their size, that uses none, or that is wanted anyway, goes through."""
    job, facts, config = with_gpus(tmp_path, mib, selection=Selection(skip_checks=frozenset(skip)))
    refuse_unfit(job, facts, config, cuda=cuda)
    assert judge_unfit(job, facts, config, cuda=cuda) == []


def test_launch_ends_with_5_before_anything_is_written(tmp_path):
    """The command itself asks: exit code 5 on a machine whose GPU is too small, and no run folder."""
    write_job(tmp_path, hosts="localhost slots=1\n")
    smi = tmp_path / "bin/nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(SMI.format(mib=1))
    smi.chmod(0o755)
    files = ("--model", "model", "--data", "data.jsonl", "--hosts", "hostfile")
    done = subprocess.run(
        [sys.executable, "-m", "llmtrain.cli", "launch", *files, "--config", "zero3", "--json"],
        env={**os.environ, "PATH": f"{smi.parent}:{os.environ['PATH']}", "XDG_STATE_HOME": str(tmp_path / "state")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 5, done.stderr
    assert json.loads(done.stdout)["exit_code"] == 5
    assert not (tmp_path / "runs").exists()
