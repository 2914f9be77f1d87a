"""Labs for pytest; tests/conftest.py imports these names.

`lab3` is one lab for the whole session. After every test each lab is made healthy again, so a test may break what it
likes. Override `lab_options` in a conftest.py to share more or to give the hosts private copies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
from tests.lab.lab import Lab
from tests.lab.life import default_shares
from tests.lab.model import LabOptions

LabFactory = Callable[..., Lab]
_labs: list[Lab] = []


@pytest.fixture(scope="session")
def lab_options() -> LabOptions:
    """What the hosts of `lab3` are like."""
    return LabOptions(shares=default_shares())


@pytest.fixture(scope="session")
def lab_factory(lab_options: LabOptions) -> Iterator[LabFactory]:
    """`lab_factory(nodes, options)`: a lab that goes down with the session, or earlier by its own `down`."""
    with contextlib.ExitStack() as stack:

        def make(nodes: int = 3, options: LabOptions | None = None) -> Lab:
            _labs.append(stack.enter_context(Lab.create(nodes, options or lab_options)))
            return _labs[-1]

        yield make
    _labs.clear()


@pytest.fixture(scope="session")
def lab3(lab_factory: LabFactory) -> Lab:
    """A head and three nodes."""
    return lab_factory(3)


@pytest.fixture(autouse=True)
def healthy_labs() -> Iterator[None]:
    """Whatever a test broke is whole again for the next one."""
    yield
    for lab in _labs:
        if lab.state.root.exists():
            lab.reset()
