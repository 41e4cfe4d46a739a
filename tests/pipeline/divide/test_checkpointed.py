"""Checkpointed blocks that draw random numbers are divided, and train like one device."""

import jax
import pytest
from flax import nnx
from pipeline.execute.test_pipelined_loss import check, put
from program.programs import trace
from small_models import Residual, square_loss, vectors
from step.runs import filled, on_mesh, on_one_device

from meshwright.pipeline.divide.cut import cut_blocks
from meshwright.program.blocks.to_scan import roll_program
from meshwright.program.jaxpr.equations import REMATS


class Shared(nnx.Module):
    """A checkpoint holds a block and the dropout that all blocks share."""

    def __init__(self):
        rngs = nnx.Rngs(0, dropout=1)
        self.blocks = nnx.List([Residual(rngs=rngs) for _ in range(4)])
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        run = nnx.remat(lambda block, dropout, x: dropout(block(x)))
        for block in self.blocks:
            x = run(block, self.dropout, x)
        return x


class Stream(nnx.Module):
    """Blocks draw from one stream, which is passed to each checkpoint."""

    def __init__(self):
        self.blocks = nnx.List([Residual(rngs=nnx.Rngs(0)) for _ in range(4)])
        self.dropout, self.streams = nnx.Dropout(0.2), nnx.Rngs(dropout=1)

    def __call__(self, x):
        run = nnx.remat(lambda block, rngs, x: x + self.dropout(block(x), rngs=rngs))
        for block in self.blocks:
            x = run(block, self.streams, x)
        return x


class Noisy(nnx.Module):
    """A block with its own dropout."""

    def __init__(self, rngs):
        self.layer, self.dropout = Residual(rngs=rngs), nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.layer(x))


class Own(nnx.Module):
    """Each block draws from its own stream."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([Noisy(rngs) for _ in range(4)])

    def __call__(self, x):
        for block in self.blocks:
            x = nnx.remat(lambda block, x: block(x))(block, x)
        return x


class Functional(Own):
    """Blocks are split, checkpointed by JAX, and updated."""

    def __call__(self, x):
        for block in self.blocks:
            graphdef, state = nnx.split(block)

            def run(state, x, graphdef=graphdef):
                copy = nnx.merge(graphdef, state)
                return copy(x), nnx.state(copy)

            x, state = jax.checkpoint(run)(state, x)
            nnx.update(block, state)
        return x


MODELS = [Shared, Stream, Own, Functional]


@pytest.mark.parametrize("build", MODELS)
def test_checkpointed_blocks_are_found(build):
    rolled = roll_program(trace(build, square_loss, vectors())[1])
    cut = cut_blocks(rolled.traced, rolled.remarks)
    assert cut.num_blocks == 4
    assert [eqn.primitive.name in REMATS for eqn in cut.scan.body.eqns].count(True) == 1
    assert any(stack.path.endswith("up.kernel") for stack in cut.stacks)


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("mesh", [{"pipe": 2, "data": 4}, {"pipe": 4, "fsdp": 2}])
@pytest.mark.parametrize("build", MODELS)
def test_checkpointed_blocks_train_like_one_device(build, mesh, schedule):
    with jax.enable_x64(True):
        batches = [vectors(seed=1), vectors(seed=2)]
        alone = put(build, square_loss, batches[0], {}, count=2)
        expected = on_one_device(alone, filled(build), batches)
        assembled = put(build, square_loss, batches[0], mesh, schedule, count=2)
        check(on_mesh(assembled, filled(build), batches), expected)
