from __future__ import annotations

import os
import platform
import shutil
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from tests.lab.fixtures import default_shares, healthy_labs, lab3, lab_factory, lab_options
from tests.lab.model import LabOptions
from tests.opcache import build_ops

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["healthy_labs", "lab3", "lab_factory", "lab_options"]

# DeepSpeed's launcher and config classes ask for an accelerator on import; the suite runs on the CPU.
os.environ.setdefault("DS_ACCELERATOR", "cpu")

# One slow import must not fail a property; in CI the same examples are drawn every time.
settings.register_profile("llmtrain", deadline=None, derandomize=os.environ.get("CI") == "true")
settings.load_profile("llmtrain")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test that needs the operations may have to wait until they are compiled."""
    for item in items:
        if "op_cache" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def op_cache() -> Path:
    """DeepSpeed's compiled operations; copy them where somebody may write."""
    return build_ops()


@pytest.fixture(scope="session")
def launch_lab(lab_factory, op_cache, tmp_path_factory):
    """A head and three nodes with two networks, docker0 and 127.0.1.1, ready to launch a tiny model."""
    from tests.launch.launchlab import LaunchLab, write_sums

    from llmtrain.cluster.probes import ops_name
    from llmtrain.train.tinymodel import write_tiny_model

    packages = {name: version(name) for name in ("torch", "deepspeed")}
    ops = ops_name(platform.python_version(), packages, sys.executable)
    options = LabOptions(
        shares=default_shares(),
        second_network=True,
        docker0=True,
        loopback_name=True,
        private_copies=((str(op_cache), f"/root/.llmtrain/ops/{ops}"),),
    )
    here = tmp_path_factory.mktemp("launch")
    write_tiny_model(here / "model")
    write_sums(here / "data.jsonl", 64)
    lab = lab_factory(3, options)
    shutil.copytree(here / "model", lab.state.disk("head") / "root/model")
    shutil.copy(here / "data.jsonl", lab.state.disk("head") / "root/data.jsonl")
    bench = LaunchLab(lab, here)
    yield bench
    bench.end()
