"""The fixtures of the test suite, for faults that take too long to wait for in it; and a table of what happened."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests.conftest import healthy_labs, lab3, lab_factory, lab_options, launch_lab, op_cache

__all__ = ["healthy_labs", "lab3", "lab_factory", "lab_options", "launch_lab", "op_cache"]


@pytest.fixture(scope="session")
def table():
    """Takes one row for each fault; appended to the file that FAULT_TABLE names."""

    def add(**row):
        path = os.environ.get("FAULT_TABLE")
        if path:
            with Path(path).open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(row) + "\n")

    return add
