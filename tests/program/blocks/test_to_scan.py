"""Rolled blocks read, pass on and return the same values as unrolled ones."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from program.programs import trace
from program.rolling import check, scans
from small_models import WIDTH, Residual, Residuals, square_loss, vectors

from meshwright.program.blocks.to_scan import roll_program
from meshwright.program.jaxpr.equations import scan_counts


@pytest.fixture(autouse=True)
def _double_precision():
    with jax.enable_x64(True):
        yield


def carried(traced):
    """Return how many constants and carries each scan has."""
    return [scan_counts(e) for e in traced.closed.jaxpr.eqns if e.primitive.name == "scan"]


class History(nnx.Module):
    """Each block also sees the model's input, the block before the last, and its own gate."""

    def __init__(self, num_blocks=4, *, gated=True):
        rngs = nnx.Rngs(0)
        self.gates = nnx.Param(jnp.ones((num_blocks,))) if gated else None
        self.blocks = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(num_blocks)])

    def __call__(self, x):
        first = before = x
        for number, block in enumerate(self.blocks):
            gate = 0.5 if self.gates is None else self.gates[number]
            x, before = jnp.tanh(block(x + first)) + gate * before, x
        return x


def test_values_that_are_the_same_only_in_the_first_block_are_distinguished():
    traced = check(History, square_loss, vectors())
    assert scans(traced) == [4]
    # Handed on: the last two results. The same for all: the input.
    assert carried(traced) == [(1, 2)]
    assert "gates" in [leaf.path for leaf in traced.leaves]


class Streams(Residuals):
    """Each block adds noise of a key of its own, one of many made before."""

    def __call__(self, x):
        keys = jax.random.split(jax.random.key(0), len(self.blocks))
        for block, key in zip(self.blocks, keys, strict=True):
            x = block(x) + jax.random.uniform(key, x.shape, jnp.float32)
        return x


def test_each_block_takes_its_own_key_of_many():
    assert scans(check(Streams, square_loss, vectors())) == [2]


class Inner(Residuals):
    """Each block is followed by another part of its own result."""

    def __init__(self):
        super().__init__(3)

    def __call__(self, x):
        for number, block in enumerate(self.blocks):
            x = block(x)
            x = x * x[:, number : number + 1]
        return x


class Lagging(Residuals):
    """The last block reads the first one's result where the others read no block's."""

    def __init__(self):
        super().__init__(3)

    def __call__(self, x):
        factors = [jnp.cos(x), jnp.sin(x)]
        for number, block in enumerate(self.blocks):
            x = block(x) * factors[number]
            factors.append(x)
        return x


def test_blocks_that_read_other_values_are_not_rolled():
    with jax.enable_x64(False):
        _, traced = trace(Inner, square_loss, vectors())
        result = roll_program(traced)
    assert result.traced is traced
    (remark,) = result.remarks
    assert remark.startswith("`blocks.1` differs from `blocks.0`: slice has another ")


def test_a_block_that_reads_another_value_than_the_others_is_not_rolled():
    remark = (
        "in `blocks`, only `blocks.0` to `blocks.1` are equal blocks and are trained alike, "
        "not `blocks.2`"
    )
    traced = check(Lagging, square_loss, vectors(), remarks=(remark,))
    assert scans(traced) == [2]


class Noted(nnx.Module):
    """Blocks that note what they did in state which nobody in them reads."""

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.layer = Residual(rngs=rngs)
            self.penalty = nnx.Variable(jnp.zeros(()))
            self.latest = nnx.Variable(jnp.zeros((WIDTH,)))
            self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

        def __call__(self, x):
            x = self.layer(x)
            self.penalty[...] = jnp.mean(x**2)
            self.latest[...] = jax.lax.stop_gradient(x.mean(0))
            self.calls[...] = self.calls[...] + 1
            return x

    def __init__(self, num_blocks=2):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([self.Block(rngs) for _ in range(num_blocks)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def noted_loss(model, batch):
    loss = square_loss(model, batch)
    return loss + 0.1 * sum(block.penalty[...].astype(jnp.float32) for block in model.blocks)


@pytest.mark.parametrize("compute", [None, pytest.param(jnp.bfloat16, marks=pytest.mark.full)])
def test_state_that_blocks_only_write_is_stacked(compute):
    traced = check(Noted, noted_loss, vectors(), compute=compute)
    jaxpr = traced.closed.jaxpr
    (scan,) = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
    names = ("penalty", "latest", "calls")
    stacks = [n for n, leaf in enumerate(traced.leaves) if leaf.path.endswith(names)]
    assert {traced.leaves[n].path for n in stacks} == {f"blocks.*.{name}" for name in names}
    # The blocks are given each stack, and what they give back is the state afterwards.
    assert {jaxpr.invars[n] for n in stacks} <= set(scan.invars)
    assert set(jaxpr.outvars[2:]) <= set(scan.outvars)
