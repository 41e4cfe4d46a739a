"""Layers divided into stages that cost the same."""

import itertools

import pytest

from meshwright.errors import UserError
from meshwright.pipeline.by_hand.balance import balance

pytestmark = pytest.mark.quick


def worst(costs, groups):
    return max(sum(costs[n] for n in group) for group in groups)


@pytest.mark.parametrize("costs", [[1] * 8, [5, 1, 1, 1, 1, 5], [1, 2, 3, 4, 5, 6, 7], [9, 1, 1]])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_no_other_division_has_a_cheaper_slowest_stage(costs, stages):
    groups = balance(costs, stages)
    assert [n for group in groups for n in group] == list(range(len(costs)))
    cuts = itertools.combinations(range(1, len(costs)), stages - 1)
    divisions = (
        [range(a, b) for a, b in itertools.pairwise([0, *cut, len(costs)])] for cut in cuts
    )
    assert worst(costs, groups) == min(worst(costs, division) for division in divisions)


def test_of_equally_slow_divisions_the_most_even_is_taken():
    costs = [784 * 512, 1, 512 * 512, 1, 512 * 256, 1, 256 * 10]
    groups = balance(costs, 4)
    assert [max(costs[n] for n in group) for group in groups] == costs[::2]
    assert balance([4, 1, 1, 1, 1], 3) == [range(1), range(1, 3), range(3, 5)]


def test_more_stages_than_layers_are_refused():
    with pytest.raises(UserError, match="at most 2"):
        balance([1, 1], 3)
