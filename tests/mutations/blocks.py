"""Rolled blocks: their order, their leaves, and how often they run."""

import jax.numpy as jnp
from mutations.mutation import Mutation
from mutations.proofs_of import SCAN
from mutations.sabotage import replace

from meshwright.program.on_mesh import layer_scans
from meshwright.program.trace.layout import StepLeaf


def _backwards(right):
    def scan(eqn, operands, body):
        params = {**eqn.params, "reverse": not eqn.params["reverse"]}
        return right(eqn.replace(params=params), operands, body)

    return scan


def _first_twice(right):
    """Run the first block again in place of the last."""

    def scan(eqn, operands, body):
        stacks = sum(layer_scans.scan_counts(eqn))
        xs = [jnp.concatenate([x[:1], x[:-1]]) for x in operands[stacks:]]
        return right(eqn, [*operands[:stacks], *xs], body)

    return scan


def _one_leaf_rolled(patch):
    """Stack one leaf of the blocks in another order than the others."""
    name = "blocks.*.up.kernel"
    join, split = StepLeaf.join, StepLeaf.split

    def joined(self, values):
        return join(self, values[::-1] if self.leaf.path == name else values)

    def divided(self, value):
        parts = split(self, value)
        return parts[::-1] if self.leaf.path == name else parts

    patch.setattr(StepLeaf, "join", joined)
    patch.setattr(StepLeaf, "split", divided)


def _mutation(does, break_it):
    caught = ("float64 loss", "float64 gradients", "own_precision gradients")
    return Mutation(does, break_it, SCAN, caught, names="step 1")


MUTATIONS = (
    _mutation("rolled blocks run in reverse order", replace(layer_scans, "run_scan", _backwards)),
    _mutation(
        "the first block runs twice and the last never",
        replace(layer_scans, "run_scan", _first_twice),
    ),
    _mutation("one leaf of the blocks is stacked from the wrong block", _one_leaf_rolled),
)
