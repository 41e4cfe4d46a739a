"""Convolutions of few channels as convolutions of cells, against JAX's own in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from meshwright.program.on_mesh.cells import in_cells
from meshwright.program.on_mesh.products import use_weight_by_rows

LAYOUTS = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}
CASES = {
    "stem of a ResNet": ((2, 9, 11, 3), (7, 7, 3, 5), (2, 2), ((3, 3), (3, 3))),
    "an even input": ((2, 8, 8, 3), (3, 3, 3, 4), (2, 2), "SAME"),
    "patches": ((2, 32, 32, 3), (16, 16, 3, 4), (16, 16), "VALID"),
    "sound": ((2, 17, 1), (10, 1, 3), (5,), "VALID"),
    "three dims": ((2, 9, 8, 7, 2), (3, 2, 5, 2, 3), (2, 3, 2), "SAME"),
    "pixels that no window reads": ((2, 9, 9, 3), (2, 2, 3, 4), (3, 3), ((1, 0), (0, 2))),
}
OTHERS = {
    "many channels": ((2, 8, 8, 5), (3, 3, 5, 4), (2, 2), {}),
    "no stride": ((2, 8, 8, 3), (3, 3, 3, 4), (2, 1), {}),
    "groups": ((2, 8, 8, 4), (3, 3, 2, 4), (2, 2), {"feature_group_count": 2}),
    "dilated": ((2, 8, 8, 3), (3, 3, 3, 4), (2, 2), {"rhs_dilation": (2, 2)}),
    "channels first": ((2, 3, 8, 8), (3, 3, 3, 4), (2, 2), {"layout": ("NCHW", "HWIO", "NCHW")}),
}


def convolution(shape, kernel, strides, padding, dtype=jnp.float64, **options):
    layout = options.pop("layout", LAYOUTS[len(strides)])

    def run(x, w):
        return lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=layout, **options)

    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.normal(size=s), dtype) for s in (shape, kernel)]
    (eqn,) = jax.make_jaxpr(run)(*args).jaxpr.eqns
    return run, eqn, args


@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_are_those_of_the_convolution(case):
    with jax.enable_x64(True):
        run, eqn, args = convolution(*CASES[case])
        _, (cells, kernel) = in_cells(eqn, *args)
        assert cells.shape[-1] == kernel.shape[-2]
        assert cells.shape[-1] % 8 == 0

        def by_cells(x, w):
            return use_weight_by_rows(eqn, [x, w], 1, platform="gpu")[0]

        expected, found = (value_and_gradients(each, *args) for each in (run, by_cells))
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            # Gradients of kernels that are plain products are summed in float32.
            tolerance = 1e-6 if number == 2 else 1e-12
            np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


@partial(jax.jit, static_argnums=0)
def value_and_gradients(function, x, w):
    result, pull = jax.vjp(function, x, w)
    return result, *pull(jnp.cos(jnp.arange(result.size, dtype=x.dtype)).reshape(result.shape))


@pytest.mark.parametrize("case", OTHERS)
def test_other_convolutions_stay_as_they_are(case):
    shape, kernel, strides, options = OTHERS[case]
    _, eqn, args = convolution(shape, kernel, strides, "VALID", jnp.float32, **options)
    assert in_cells(eqn, *args) is None
