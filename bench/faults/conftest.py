"""The fixtures of the test suite, for faults that take too long to wait for in it."""

from tests.conftest import healthy_labs, lab3, lab_factory, lab_options, launch_lab, op_cache

__all__ = ["healthy_labs", "lab3", "lab_factory", "lab_options", "launch_lab", "op_cache"]
