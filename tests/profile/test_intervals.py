"""Sets of time against sets of integers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.profile.events import clip, length, merge, subtract

pytestmark = pytest.mark.quick

spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)


def points(intervals) -> set[int]:
    return {n for start, end in intervals for n in range(int(start), int(end))}


@given(spans, spans)
def test_they_behave_as_sets(first, second):
    a, b = merge(first), merge(second)
    assert points(a) == points(first)
    assert length(a) == len(points(first))
    assert points(subtract(a, b)) == points(first) - points(second)
    assert length(subtract(a, b)) == len(points(first) - points(second))
    assert points(clip(first, (5, 20))) == points(first) & set(range(5, 20))
