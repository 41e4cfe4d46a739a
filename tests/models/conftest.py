"""Models with numpy weights: compiling an initializer would take longer than most tests."""

import jax
import numpy as np
import pytest
from flax import nnx


@pytest.fixture(scope="session")
def fill():
    """Return a function that builds a model and fills it with random weights, uncompiled."""

    def fill_model(build, *, scale=0.3, seed=0):
        random = np.random.default_rng(seed)

        def fill_leaf(path, leaf):
            if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                # The generator that compiles fastest on CPU.
                words = random.integers(2**32, size=(*leaf.shape, 4), dtype=np.uint32)
                return jax.random.wrap_key_data(words, impl="rbg")
            if not np.issubdtype(leaf.dtype, np.floating):
                return jax.device_put(np.zeros(leaf.shape, leaf.dtype))
            values = scale * random.normal(size=leaf.shape)
            # Scales and variances of norms stay positive, as trained ones do.
            if any(name in jax.tree_util.keystr(path) for name in ("'scale'", "'var'")):
                values = np.exp(values)
            return jax.device_put(values.astype(leaf.dtype))

        graphdef, state = nnx.split(nnx.eval_shape(build))
        return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(fill_leaf, state))

    return fill_model
