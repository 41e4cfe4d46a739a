"""StackedGPT: a GPT whose blocks are stacked along a leading dim and run in a scan."""

from collections.abc import Callable
from typing import Any

from flax import nnx
from jax import Array

from meshwright.models.gpt import GPT


class StackedGPT(GPT):
    """The model of `meshwright.models.gpt.GPT`, compiled once for all blocks.

    Every variable below ``blocks`` has the block as its leading dim; the arguments are GPT's.
    """

    def make_blocks(self, block: Callable[..., nnx.Module], num_blocks: int, rngs: nnx.Rngs) -> Any:
        """Return one block whose variables hold those of all."""

        @nnx.split_rngs(splits=num_blocks)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs: nnx.Rngs) -> nnx.Module:
            return block(rngs=rngs)

        return make(rngs)

    def run_blocks(self, x: Array, mask: Array) -> Array:
        """Pass the residual stream x [B, T, D] through all blocks."""

        @nnx.scan(in_axes=(nnx.Carry, 0, None), out_axes=nnx.Carry)
        def run(x: Array, block: Any, mask: Array) -> Array:
            return block(x, mask)

        return run(x, self.blocks, mask)
