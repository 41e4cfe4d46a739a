"""How often Python looks for garbage."""

import gc

from meshwright.runtime.garbage import OBJECTS, few_collections


def test_python_looks_for_garbage_as_before_afterwards():
    before = gc.get_threshold()
    with few_collections():
        assert gc.get_threshold() == (OBJECTS, *before[1:])
        assert gc.get_freeze_count() > 0
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
