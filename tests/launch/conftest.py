from __future__ import annotations

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    """What a failed test has left running on the lab must not fail the tests after it."""
    report = yield
    bench = getattr(item, "funcargs", {}).get("launch_lab")
    if report.failed and bench is not None:
        bench.end()
    return report
