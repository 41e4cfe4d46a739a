"""What a block keeps for its backward pass."""

import jax
import pytest

from meshwright.config.schema import ShardingConfig
from meshwright.program.on_mesh.remat import choose_remat


@pytest.mark.parametrize("kind", ["dots_saveable", "nothing_saveable", "everything_saveable"])
def test_a_policy_of_jax_is_taken_by_its_name(kind):
    remat = choose_remat(kind, keep_gathered=False)
    assert remat.policy is getattr(jax.checkpoint_policies, kind)
    assert remat.gather_per_block
    assert ShardingConfig(remat=kind).remat == kind
