"""`tpfused.bench.measure`, what of it needs no GPU."""

import gc

import pytest

from tpfused.bench.measure import _no_collection


@pytest.mark.parametrize("was_on", [True, False])
def test_collection_is_as_it_was_afterwards(was_on):
    before = gc.isenabled()
    try:
        (gc.enable if was_on else gc.disable)()
        with _no_collection():
            assert not gc.isenabled()
        assert gc.isenabled() == was_on
        with pytest.raises(RuntimeError), _no_collection():
            raise RuntimeError
        assert gc.isenabled() == was_on
    finally:
        (gc.enable if before else gc.disable)()
