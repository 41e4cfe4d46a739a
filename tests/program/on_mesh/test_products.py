"""Kernel gradients of convolutions as GPUs compute them, against JAX's own in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from meshwright.program.on_mesh.products import product_gradient, use_weight

CASES = {
    "pointwise": ((2, 6, 6, 3), (1, 1, 3, 5), {}),
    "strided": ((2, 7, 6, 3), (1, 1, 3, 5), {"window_strides": (2, 3)}),
    "outputs first": ((2, 6, 6, 3), (5, 3, 1, 1), {"kernel": "OIHW"}),
    "one dim": ((2, 9, 3), (1, 3, 4), {"window_strides": (2,), "layout": "NWC", "kernel": "WIO"}),
}
OTHERS = {
    "window": ((2, 6, 6, 3), (3, 3, 3, 5), {"padding": "SAME"}),
    "padded": ((2, 6, 6, 3), (1, 1, 3, 5), {"padding": ((1, 1), (0, 0))}),
    "grouped": ((2, 6, 6, 4), (1, 1, 2, 6), {"feature_group_count": 2}),
    "dilated": ((2, 6, 6, 3), (1, 1, 3, 5), {"lhs_dilation": (2, 2), "padding": ((0, 0), (0, 0))}),
    "channels first": ((2, 3, 6, 6), (1, 1, 3, 5), {"layout": "NCHW"}),
}


EVERYDAY = ("one dim", "strided", "padded", "grouped")


def convolution(shape, kernel_shape, options, dtype):
    """Return a convolution, its equation and arguments."""
    options = {"window_strides": (1,) * (len(shape) - 2), "padding": "VALID", **options}
    layout, kernel = options.pop("layout", "NHWC"), options.pop("kernel", "HWIO")

    def run(x, w):
        return lax.conv_general_dilated(x, w, dimension_numbers=(layout, kernel, layout), **options)

    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.normal(size=s), dtype) for s in (shape, kernel_shape)]
    (eqn,) = jax.make_jaxpr(run)(*args).jaxpr.eqns
    return run, eqn, args


def gradients(run, args):
    out, pull = jax.vjp(run, *args)
    cotangent = jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)
    return pull(cotangent)[1], cotangent


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_of_a_product_is_that_of_the_convolution(case):
    with jax.enable_x64(True):
        run, eqn, args = convolution(*CASES[case], jnp.float64)
        expected, cotangent = gradients(run, args)
        wide = [x.astype(jnp.float32) for x in (args[0], cotangent)]
        found = product_gradient(eqn, *wide)
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "case",
    [n if n in EVERYDAY else pytest.param(n, marks=pytest.mark.full) for n in OTHERS],
)
def test_other_convolutions_are_no_products(case):
    run, eqn, args = convolution(*OTHERS[case], jnp.float32)
    _, cotangent = gradients(run, args)
    assert product_gradient(eqn, args[0], cotangent) is None


@pytest.mark.parametrize(
    "case",
    [n if n in EVERYDAY else pytest.param(n, marks=pytest.mark.full) for n in (*CASES, *OTHERS)],
)
def test_gpus_read_half_precision_and_round_at_most_once(case):
    shape, kernel, options = {**CASES, **OTHERS}[case]
    _, eqn, args = convolution(shape, kernel, options, jnp.bfloat16)
    wide_run, _, _ = convolution(shape, kernel, options, jnp.float32)
    expected, cotangent = gradients(wide_run, [x.astype(jnp.float32) for x in args])
    weight = args[1].astype(jnp.float32)

    def use(w, platform="gpu"):
        return use_weight(eqn, [args[0], w], 1, platform=platform)[0]

    pull = jax.make_jaxpr(lambda c: jax.vjp(use, weight)[1](c)[0])(cotangent.astype(jnp.bfloat16))
    (found,) = jax.core.eval_jaxpr(pull.jaxpr, pull.consts, cotangent.astype(jnp.bfloat16))
    assert found.dtype == jnp.float32
    # Of the cotangent, and of the result unless it is a product.
    np.testing.assert_allclose(found, expected, rtol=2e-2, atol=1e-2 * np.abs(expected).max())
    products = [
        e for e in pull.jaxpr.eqns if e.primitive.name in ("dot_general", eqn.primitive.name)
    ]
    assert products
    assert {x.aval.dtype for e in products for x in e.invars} == {jnp.dtype(jnp.bfloat16)}
