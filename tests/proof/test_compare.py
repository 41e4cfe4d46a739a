"""Comparisons in closed form: what counts as equal, what is named, and by how much it differs."""

import math

import ml_dtypes
import numpy as np
import pytest

from meshwright.proof.compare import (
    NULL_GRADIENT,
    exact_gaps,
    global_norm,
    judge,
    loss_gaps,
    metric_gaps,
    null_leaves,
    rough_gaps,
    where_defined,
)

NOT_NUMBERS = (math.nan, math.inf, -math.inf)


def compare_exactly(what, expected, found, tolerance, nulls=()):
    return judge(what, exact_gaps(expected, found, nulls=nulls), tolerance)


def compare_roughly(what, expected, found, tolerance, nulls=()):
    return judge(what, rough_gaps(expected, found, nulls=nulls), tolerance)


def compare_losses(expected, found, tolerance):
    return judge("loss", loss_gaps(expected, found), tolerance)


def leaves(**values):
    return {path: np.asarray(value, np.float64) for path, value in values.items()}


def test_the_global_norm_is_that_of_all_elements_together():
    assert global_norm(leaves(a=[[3.0, 0.0], [0.0, 0.0]], b=[-4.0], c=[])) == 5.0


def test_null_leaves_are_those_below_a_share_of_the_global_norm():
    gradients = leaves(large=[1.0], noise=[NULL_GRADIENT / 2], small=[NULL_GRADIENT * 2], none=[0])
    assert null_leaves(gradients) == ["noise", "none"]


def test_leaves_are_compared_with_their_own_largest_value():
    expected = leaves(a=[100.0, 1.0], b=[1e-3, -2e-3])
    found = leaves(a=[100.0, 1.5], b=[1e-3, -2e-3 - 4e-6])
    comparison = compare_exactly("gradients", expected, found, tolerance=0.01)
    assert comparison.equal
    assert comparison.worst == "a"
    assert comparison.difference == pytest.approx(0.005)
    assert (comparison.first_different, comparison.first_difference) == (None, None)


def test_the_first_leaf_that_differs_is_named_with_its_difference():
    expected = leaves(a=[1.0], b=[2.0], c=[4.0])
    found = leaves(a=[1.0], b=[2.5], c=[0.0])
    comparison = compare_exactly("parameters", expected, found, tolerance=1e-10)
    assert not comparison.equal
    assert (comparison.first_different, comparison.first_difference) == ("b", 0.25)
    assert (comparison.worst, comparison.difference) == ("c", 1.0)
    assert comparison.sentence() == "parameters: `b` differs by 2.50e-01, more than 1.0e-10"


def test_null_leaves_are_compared_with_the_global_norm():
    expected, found = leaves(a=[3.0, 4.0], key=[1e-15]), leaves(a=[3.0, 4.0], key=[-1e-15])
    assert not compare_exactly("gradients", expected, found, 1e-10).equal
    comparison = compare_exactly("gradients", expected, found, 1e-10, nulls=["key"])
    assert comparison.equal
    assert comparison.difference == pytest.approx(2e-15 / 5)
    found = leaves(a=[3.0, 4.0], key=[1e-8])
    assert not compare_exactly("gradients", expected, found, 1e-10, nulls=["key"]).equal


def test_a_leaf_of_zeros_is_compared_as_it_is():
    expected = leaves(a=[0.0, 0.0])
    assert compare_exactly("parameters", expected, leaves(a=[0.0, 1e-11]), 1e-10).equal
    assert not compare_exactly("parameters", expected, leaves(a=[0.0, 1e-9]), 1e-10).equal


@pytest.mark.parametrize("dtype", [np.uint32, np.int32, bool])
def test_whole_numbers_must_be_the_same(dtype):
    expected = {"count": np.asarray([1, 1], dtype), "key": np.asarray(2**32 - 1, np.uint32)}
    assert compare_exactly("state", expected, dict(expected), 1e-10).equal
    other = expected | {"count": np.asarray([1, 0], dtype)}
    comparison = compare_exactly("state", expected, other, 1e-10)
    assert (comparison.first_different, comparison.first_difference) == ("count", 1.0)
    other = expected | {"key": np.asarray(2**32 - 2, np.uint32)}
    assert compare_exactly("state", expected, other, 1e-10).first_different == "key"


@pytest.mark.parametrize("compare", [compare_exactly, compare_roughly])
@pytest.mark.parametrize("bad", NOT_NUMBERS)
def test_what_is_not_finite_equals_nothing_not_even_itself(compare, bad):
    fine, broken = leaves(a=[1.0], b=[1.0, 2.0]), leaves(a=[1.0], b=[1.0, bad])
    for expected, found in ((fine, broken), (broken, fine), (broken, broken)):
        comparison = compare("gradients", expected, found, 1e300)
        assert not comparison.equal
        assert (comparison.first_different, comparison.first_difference) == ("b", None)
        assert (comparison.worst, comparison.difference) == ("b", None)
        assert "`b` differs by a number that is not finite" in comparison.sentence()


@pytest.mark.parametrize("bad", NOT_NUMBERS)
def test_a_loss_that_is_not_finite_equals_nothing(bad):
    for expected, found in ((1.0, bad), (bad, 1.0), (bad, bad)):
        comparison = compare_losses([2.0, expected], [2.0, found], 1e300)
        assert not comparison.equal
        assert comparison.first_different == "step 2"


def test_losses_are_compared_step_by_step():
    comparison = compare_losses([4.0, 2.0, 1.0], [4.0, 2.0 + 1e-9, 1.0 + 1e-9], 1e-10)
    assert not comparison.equal
    assert comparison.what == "loss"
    assert (comparison.first_different, comparison.worst) == ("step 2", "step 3")
    assert comparison.first_difference == pytest.approx(5e-10)
    assert compare_losses([-4.0], [-4.0], 1e-10).equal


def test_metrics_are_compared_with_their_largest_value_of_any_step():
    expected = [{"accuracy": 0.0, "norm": 4.0}, {"accuracy": 0.5, "norm": 2.0}]
    found = [{"accuracy": 0.05, "norm": 4.0, "skipped": 1.0}, {"accuracy": 0.5, "norm": 2.0}]
    assert metric_gaps(expected, found) == {"accuracy": pytest.approx(0.1), "norm": 0.0}
    assert metric_gaps([], []) == {}


@pytest.mark.parametrize("bad", NOT_NUMBERS)
def test_a_metric_may_be_undefined_but_only_on_both_sides(bad):
    fine, undefined = [{"a": 1.0}, {"a": 2.0}], [{"a": 1.0}, {"a": bad}]
    assert judge("metrics", metric_gaps(undefined, undefined), 1e-10).equal
    for expected, found in ((fine, undefined), (undefined, fine)):
        assert not judge("metrics", metric_gaps(expected, found), 1e-10).equal


def test_rough_comparison_adds_a_leaf_norm_and_its_share_of_the_global_norm():
    # Norms 3 and 4 of 1 and 3 elements: global norm 5, shares √(1/4) and √(3/4).
    expected = leaves(a=[3.0], b=[[4.0, 0.0, 0.0]])
    found = leaves(a=[3.0 + 0.55], b=[[4.0, 0.0, -0.1]])
    comparison = compare_roughly("gradients", expected, found, tolerance=0.2)
    assert comparison.equal
    assert comparison.worst == "a"
    assert comparison.difference == pytest.approx(0.55 / (3 + 5 * 0.5))
    null = compare_roughly("gradients", expected, found, 0.2, nulls=["a"])
    assert null.difference == pytest.approx(0.55 / (3 + 5))


def test_a_leaf_that_nearly_cancels_may_have_errors_like_its_neighbours():
    expected, found = (
        leaves(a=np.ones(100), b=np.zeros(100)),
        leaves(a=np.ones(100), b=np.ones(100)),
    )
    assert compare_roughly("gradients", expected, found, 2.0).difference == pytest.approx(2**0.5)
    alone = compare_roughly("gradients", leaves(b=[0.0]), leaves(b=[0.5]), 0.1)
    assert (alone.equal, alone.difference) == (False, 0.5)


def test_formats_numpy_does_not_know_are_compared_as_numbers():
    expected = {"a": np.asarray([1.0, 256.0], ml_dtypes.bfloat16)}
    found = {"a": np.asarray([2.0, 256.0], ml_dtypes.bfloat16)}
    assert compare_exactly("gradients", expected, found, 0.1).difference == 1 / 256
    assert global_norm({"a": np.asarray([3j, 4.0])}) == 5.0


@pytest.mark.parametrize("compare", [compare_exactly, compare_roughly])
def test_other_leaves_or_shapes_are_a_mistake_of_the_proof_itself(compare):
    with pytest.raises(AssertionError, match="shapes"):
        compare("gradients", leaves(a=[1.0, 1.0]), leaves(a=[1.0]), 1.0)
    with pytest.raises(AssertionError, match="the leaves differ"):
        compare("gradients", leaves(a=[1.0]), leaves(a=[1.0], b=[1.0]), 1.0)
    with pytest.raises(AssertionError, match="gradients: "):
        compare("gradients", {}, {}, 1.0)


def test_a_tolerance_is_measured_only_if_a_gap_is_beyond_the_usual_one():
    gaps = {"a": 1e-7, "b": 3e-6}
    assert not judge("gradients", gaps, 1e-6).equal
    measured = judge("gradients", gaps, 1e-6, allowed=lambda: {"a": 0.0, "b": 5e-6})
    assert (measured.equal, measured.measured, measured.worst) == (True, True, "b")
    assert measured.sentence().endswith("(b), tolerance 5.0e-06, as measured")
    still = judge("gradients", gaps, 1e-6, allowed=lambda: {"a": 1.0, "b": 2e-6})
    assert (still.equal, still.first_different, still.tolerance) == (False, "b", 2e-6)

    def never():
        raise AssertionError

    assert judge("gradients", gaps, 1e-5, allowed=never).equal


def test_what_rounding_alone_changes_is_not_judged_and_named():
    chaotic = judge("gradients", {"a": 1e-7, "b": 0.5}, 1e-6, allowed=lambda: {"a": 0, "b": 0.3})
    assert (chaotic.equal, chaotic.not_judged, chaotic.worst) == (True, ["b"], "a")
    assert chaotic.sentence().endswith(
        "not judged, because rounding alone changes it by a tenth or more: b"
    )
    broken = judge("gradients", {"b": math.nan}, 1e-6, allowed=lambda: {"b": 0.3})
    assert (broken.equal, broken.first_different) == (False, "b")


def test_a_state_may_hold_the_same_infinities():
    expected = leaves(best=[math.inf, 2.0], seen=[math.nan, 1.0])
    assert not compare_exactly("state", expected, expected, 1e300).equal
    assert compare_exactly("state", *where_defined(expected, expected), 0.0).equal
    for other in (
        leaves(best=[-math.inf, 2.0], seen=[math.nan, 1.0]),
        leaves(best=[math.inf, 2.1], seen=[math.nan, 1.0]),
    ):
        assert not compare_exactly("state", *where_defined(expected, other), 1e-3).equal
