"""Timing devices: the fit against rates made up by its own formula, and timings against a clock."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.planner.devices.device_speed import DeviceTimer, Timed, fit_products


def made_up(rate, half, sizes):
    return [Timed(n, 2 * n**3 / rate * (1 + half / n) ** 3) for n in sizes]


@pytest.mark.parametrize(("rate", "half"), [(800e12, 32), (3e9, 0), (200e12, 250)])
def test_the_fit_finds_the_rate_and_the_size_of_half(rate, half):
    found_rate, found_half = fit_products(made_up(rate, half, (256, 1024, 4096)))
    assert found_rate == pytest.approx(rate, rel=0.05)
    assert found_half == pytest.approx(half, rel=0.05, abs=1)


def test_the_fit_never_promises_less_than_was_timed():
    # A product of 128 that is slower than one of 64 fits no curve of this kind.
    timed = [Timed(64, 2 * 64**3 / 5e9), Timed(128, 2 * 128**3 / 4e9)]
    assert fit_products(timed) == (pytest.approx(5e9), 0)


def test_timings_are_about_what_a_clock_says():
    devices = jax.devices()[:1]
    product = jax.jit(lambda x: x @ x)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(256, 256)), jnp.float32)
    jax.block_until_ready(product(x))
    began = time.perf_counter()
    jax.block_until_ready([product(x) for _ in range(10)])
    clocked = (time.perf_counter() - began) / 10
    # Other programs run on the same cores.
    timed = DeviceTimer(devices, seconds=0.05).product("float32", 256, launch=0.0).seconds
    assert clocked / 20 < timed < clocked * 20


def test_sizes_grow_as_far_as_time_allows():
    timer = DeviceTimer(jax.devices()[:1], seconds=1e-9)
    assert [timed.size for timed in timer.products("float32", 0.0)] == [64]
