"""Workers for the tests of overlapped operations."""

import pytest


@pytest.fixture
def ranks(workers):
    """The module's workers, of which there are at least two."""
    if workers.world < 2:
        pytest.skip("needs two ranks")
    return workers
