"""How often Python looks for garbage."""

import gc

import pytest

from meshwright.runtime.garbage import OBJECTS, few_collections


@pytest.fixture
def nothing_frozen():
    """A process of its own, so to speak: the tests' own has frozen what it imported."""
    gc.unfreeze()
    before = gc.get_threshold()
    gc.set_threshold(700, *before[1:])
    yield
    gc.set_threshold(*before)
    gc.freeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_python_looks_for_garbage_as_before_afterwards():
    before = gc.get_threshold()
    with few_collections():
        assert gc.get_threshold() == (OBJECTS, *before[1:])
        assert gc.get_freeze_count() > 0
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("nothing_frozen")
def test_what_a_program_has_frozen_stays_frozen():
    _many = [[number] for number in range(OBJECTS)]
    gc.freeze()
    frozen = gc.get_freeze_count()
    with few_collections():
        assert gc.get_freeze_count() <= frozen
    assert 0 < gc.get_freeze_count() <= frozen
