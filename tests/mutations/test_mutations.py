"""Nothing wrong passes: every sabotage is caught by the check, and in the comparison, it names."""

import functools

import pytest
from mutations.registry import KINDS, MUTATIONS
from mutations.table import table, written
from quick import quick_compilation

__all__ = ["quick_compilation"]


@functools.cache
def failures_without(check):
    """Return what fails in a configuration that nothing has been done to."""
    return check.failures(everything=False)


def _parameters():
    for kind, module in KINDS.items():
        for mutation in module.MUTATIONS:
            marks = () if mutation.everyday else pytest.mark.full
            yield pytest.param(mutation, id=f"{kind}: {mutation.does}", marks=marks)


@pytest.mark.parametrize("mutation", list(_parameters()))
def test_a_sabotage_is_caught(mutation, quick_compilation):
    assert not failures_without(mutation.check)
    with pytest.MonkeyPatch.context() as patch:
        mutation.break_it(patch)
        found = mutation.check.failures(everything=mutation.everywhere)
    assert set(mutation.caught) <= set(found), found
    if mutation.only:
        assert set(found) == set(mutation.caught)
    if mutation.names:
        assert found[mutation.caught[0]] == mutation.names


def test_each_mutation_has_a_name_of_its_own():
    assert len({mutation.does for mutation in MUTATIONS}) == len(MUTATIONS)


def test_the_documentation_lists_them_all():
    assert written() == table(), "run `python -m mutations.table` in tests/"
