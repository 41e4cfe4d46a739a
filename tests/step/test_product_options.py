"""Compiler options for products: cuBLAS alone, unless batched products are left to the compiler."""

import jax
import jax.numpy as jnp

from meshwright.compiled.compile_program import known_options
from meshwright.program.kernels.find_kernels import NO_KERNELS, Kernels
from meshwright.step.compiler_options import evaluation_options, product_options

BY_CUBLAS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 1}
X, W = jnp.ones((2, 4, 8)), jnp.ones((8, 8))


def scores(x):
    return jnp.einsum("btd,bsd->bts", x, x)


def test_products_with_weights_go_to_cublas():
    jaxpr = jax.make_jaxpr(lambda x, w: jnp.tanh(x @ w) @ w)(X, W).jaxpr
    assert product_options(jaxpr, NO_KERNELS) == BY_CUBLAS


def test_batched_products_are_left_to_the_compiler():
    assert product_options(jax.make_jaxpr(scores)(X).jaxpr, NO_KERNELS) == {}


def test_batched_products_inside_loops_count():
    def looped(x):
        return jax.lax.scan(lambda carry, _: (carry, scores(carry)), x, length=3)

    assert product_options(jax.make_jaxpr(looped)(X).jaxpr, NO_KERNELS) == {}


def test_products_that_a_kernel_evaluates_do_not_count():
    jaxpr = jax.make_jaxpr(scores)(X).jaxpr
    results = frozenset(variable for eqn in jaxpr.eqns for variable in eqn.outvars)
    assert product_options(jaxpr, Kernels(skipped=results)) == BY_CUBLAS


def test_evaluations_measure_no_algorithms():
    options = evaluation_options(jax.make_jaxpr(scores)(X).jaxpr)
    assert options == {"xla_gpu_autotune_level": 0, **BY_CUBLAS}
    assert known_options(options) == options


def test_evaluations_measure_convolutions_also_inside_loops():
    def looped(x):
        return jax.lax.scan(lambda c, _: (jnp.convolve(c, X[0, 0], "same"), None), x, length=3)

    assert evaluation_options(jax.make_jaxpr(looped)(X[0, 0]).jaxpr) == {}
