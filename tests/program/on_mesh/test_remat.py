"""What a block keeps for its backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.config.schema import ShardingConfig
from meshwright.program.on_mesh.remat import choose_remat


@pytest.mark.parametrize("kind", ["dots_saveable", "nothing_saveable", "everything_saveable"])
def test_a_policy_of_jax_is_taken_by_its_name(kind):
    remat = choose_remat(kind, keep_gathered=False)
    by_jax = getattr(jax.checkpoint_policies, kind)
    for primitive in (jax.lax.dot_general_p, jax.lax.exp_p):
        real = jax.ShapeDtypeStruct((2, 2), "float32")
        assert remat.policy(primitive, real) == by_jax(primitive, real)
    assert remat.gather_per_block
    assert ShardingConfig(remat=kind).remat == kind


@pytest.mark.parametrize("kind", ["none", "dots", "full", "dots_saveable", "everything_saveable"])
def test_complex_numbers_are_recomputed(kind):
    """JAX itself fails to save them."""
    policy = choose_remat(kind, keep_gathered=False).policy
    weight = jnp.linspace(0.1, 1, 8)

    def block(x):
        spectrum = jnp.fft.rfft(x)
        mixed = (spectrum[:, None] * spectrum) @ spectrum
        return jnp.abs(mixed).sum() + (jax.lax.complex(x, x) ** 2).real.sum()

    found = jax.grad(jax.checkpoint(block, policy=policy))(weight)
    np.testing.assert_allclose(found, jax.grad(block)(weight), rtol=1e-5)
