"""Dims split into factors until they match, and stay merged."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.program.dims.factors import Factors, factors_of

pytestmark = pytest.mark.quick


def ids(dim):
    return [factor.id for factor in factors_of(dim)]


def sizes(dim):
    return [factor.size for factor in factors_of(dim)]


def test_a_dim_takes_the_factors_of_the_dims_it_is_merged_with():
    factors = Factors()
    flat, heads, size = factors.dim(128), factors.dim(8), factors.dim(16)
    assert not factors.unify(flat, heads + size)
    assert sizes(flat) == [8, 16]
    assert ids(flat) == ids(heads) + ids(size)


def test_a_later_split_reaches_every_dim_of_the_class():
    factors = Factors()
    first, second = factors.dim(24), factors.dim(24)
    factors.unify(first, second)
    factors.unify(second, factors.dim(2) + factors.dim(12))
    factors.unify(first, factors.dim(6) + factors.dim(4))
    assert sizes(first) == sizes(second) == [2, 3, 4]
    assert ids(first) == ids(second)


def test_a_dim_that_holds_one_class_twice_splits_in_both_places():
    factors = Factors()
    length = factors.dim(6)
    factors.unify(length + length, factors.dim(2) + factors.dim(18))
    assert sizes(length + length) == [2, 3, 2, 3]
    assert ids(length + length) == ids(length) * 2


def test_factors_that_do_not_nest_are_returned_and_the_major_ones_stay_merged():
    factors = Factors()
    batch, four, six = factors.dim(8), factors.dim(4), factors.dim(9)
    target = factors.dims((8, 9, 4))
    misfit = factors.unify(batch + four + six, target[0] + target[1] + target[2])
    assert ids(batch) == ids(target[0])
    assert math.prod(factor.size for factor in misfit) == 36
    assert not set(ids(four) + ids(six)) & set(ids(target[1]) + ids(target[2]))


def test_dims_of_size_one_and_zero_are_harmless():
    factors = Factors()
    assert factors.dim(1) == ()
    assert factors.unify(factors.dim(0), factors.dim(4))
    assert not factors.unify(factors.dim(0), factors.dim(0))


@given(
    st.lists(st.integers(2, 6), min_size=1, max_size=5),
    st.lists(st.integers(2, 6), min_size=1, max_size=5),
)
def test_aligned_factors_name_the_same_digits_of_an_index(left_sizes, right_sizes):
    """Wherever two factorings share a boundary, both sides must name the same classes."""
    factors = Factors()
    scale = math.lcm(math.prod(left_sizes), math.prod(right_sizes))
    left_sizes = [*left_sizes, scale // math.prod(left_sizes)]
    right_sizes = [*right_sizes, scale // math.prod(right_sizes)]
    left = sum(factors.dims(left_sizes), ())
    right = sum(factors.dims(right_sizes), ())
    misfit = factors.unify(left, right)

    assert math.prod(sizes(left)) == math.prod(sizes(right)) == scale
    merged = len(factors_of(left)) - len(factors_of(misfit))
    assert ids(left)[:merged] == ids(right)[:merged]
    if not misfit:
        assert ids(left) == ids(right)
