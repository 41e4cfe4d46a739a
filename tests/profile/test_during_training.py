"""A loop that profiles itself, once, and goes on."""

import jax
import pytest

import meshwright as mw
from meshwright.profile import NoProfiling, Profiling
from meshwright.profile.profiler import WARM_UP

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def step():
    return jax.jit(lambda x: x @ x)


def loop(profiling, step, steps: int) -> list[int]:
    """Return the steps after which a profile was there."""
    x = jax.numpy.eye(64)
    found: list[int] = []
    for number in range(1, steps + 1):
        x = step(x)
        profile = profiling.after(x, waited=0.0)
        if profile is not None:
            found.append(number)
            assert profile.steps == 3
            assert profile.shares["compute"] > 0
    profiling.close()
    return found


def test_some_steps_after_the_first_are_profiled_once(tmp_path, step):
    mesh = mw.build_mesh({"data": 1}, jax.devices()[:1])
    profiling = Profiling(tmp_path, mesh, lambda: None, steps=3)
    assert loop(profiling, step, 12) == [WARM_UP + 3]


def test_a_run_that_ends_earlier_gives_the_profile_up(tmp_path, step):
    mesh = mw.build_mesh({"data": 1}, jax.devices()[:1])
    assert loop(Profiling(tmp_path, mesh, lambda: None, steps=3), step, WARM_UP + 2) == []
    # The profiler is free again.
    assert loop(Profiling(tmp_path, mesh, lambda: None, steps=3), step, 6) == [WARM_UP + 3]


def test_nothing_happens_when_nobody_asked(step):
    assert loop(NoProfiling(), step, 3) == []
