"""The loss scale follows its schedule on the device."""

import jax
import jax.numpy as jnp
import pytest

from meshwright.step.state import (
    GROWTH_INTERVAL,
    INITIAL_SCALE,
    LARGEST_SCALE,
    SMALLEST_SCALE,
    LossScale,
    all_finite,
)

pytestmark = pytest.mark.quick


def schedule(finite):
    """Return (scale, skipped) after a sequence of steps, written out in Python."""
    scale, good, skipped = INITIAL_SCALE, 0, 0
    for ok in finite:
        if not ok:
            scale, good, skipped = max(scale / 2, SMALLEST_SCALE), 0, skipped + 1
        elif good + 1 == GROWTH_INTERVAL:
            scale, good = min(scale * 2, LARGEST_SCALE), 0
        else:
            good += 1
    return scale, good, skipped


CASES = {
    "growing": [True] * (2 * GROWTH_INTERVAL + 3),
    "one bad step restarts the count": [True] * (GROWTH_INTERVAL - 1) + [False] + [True] * 1999,
    "falling to the smallest": [False] * 20,
    "mixed": ([True] * 700 + [False]) * 4 + [True] * 2500,
    "rising to the largest": [True] * (11 * GROWTH_INTERVAL),
}


@jax.jit
def run(finite):
    return jax.lax.scan(lambda s, ok: (s.after(ok), None), LossScale.initial(), finite)[0]


@pytest.mark.parametrize("case", sorted(CASES))
def test_the_scale_follows_its_schedule(case):
    found = run(jnp.asarray(CASES[case]))
    scale, good, skipped = schedule(CASES[case])
    assert (float(found.scale), int(found.good_steps), int(found.skipped)) == (scale, good, skipped)


def test_the_schedule_has_the_documented_numbers():
    assert (INITIAL_SCALE, GROWTH_INTERVAL) == (32768, 2000)
    assert (SMALLEST_SCALE, LARGEST_SCALE) == (1, 2**24)


@pytest.mark.parametrize("bad", [jnp.inf, -jnp.inf, jnp.nan])
def test_one_bad_element_of_one_leaf_is_found(bad):
    good = {"a": jnp.ones((3, 4)), "b": [jnp.zeros(2, jnp.float16), jnp.arange(3)]}
    assert all_finite(good)
    assert not all_finite({**good, "c": jnp.ones(5).at[3].set(bad)})


def test_nothing_to_check_is_finite():
    assert all_finite({"counts": jnp.arange(3)})
