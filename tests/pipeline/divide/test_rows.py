"""A Python loop over the rows of stacked weights is divided like a list of modules."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from pipeline.execute.test_pipelined_loss import check, put
from program import rolling
from program.programs import trace
from small_models import WIDTH, square_loss, vectors
from step.runs import by_hand, filled, on_mesh

from meshwright.errors import UserError
from meshwright.pipeline.divide.cut import cut_blocks
from meshwright.program.blocks.to_scan import roll_program


class Indexed(nnx.Module):
    """Weights are taken by number; each block begins with a norm that has none."""

    def __init__(self):
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        self.w = nnx.Param(jnp.zeros((4, WIDTH, WIDTH)))
        self.b = nnx.Param(jnp.zeros((4, WIDTH)))

    def block(self, x, w, b):
        return x + jnp.tanh((x / (1 + (x**2).mean(-1, keepdims=True))) @ w + b)

    def __call__(self, x):
        x = self.first(x)
        for number in range(4):
            x = self.block(x, self.w[number], self.b[number])
        return x


class Unstacked(Indexed):
    """All rows are taken before the loop."""

    def __call__(self, x):
        x = self.first(x)
        for w, b in zip(jnp.unstack(self.w[...]), jnp.unstack(self.b[...]), strict=True):
            x = self.block(x, w, b)
        return x


class Reused(Indexed):
    """A row is read after the loop, too."""

    def __call__(self, x):
        return super().__call__(x) @ self.w[1]


def cut(build, compute=None):
    rolled = roll_program(trace(build, square_loss, vectors(), compute)[1])
    return cut_blocks(rolled.traced, rolled.remarks)


@pytest.mark.parametrize("compute", [None, jnp.bfloat16])
@pytest.mark.parametrize("build", [Indexed, Unstacked])
def test_rows_are_blocks(build, compute):
    found = cut(build, compute)
    assert (found.num_blocks, [stack.path for stack in found.stacks]) == (4, ["b", "w"])
    assert found.shared.eqns == ()


def test_rows_read_outside_of_the_loop_are_named():
    with pytest.raises(UserError) as caught:
        cut(Reused)
    assert caught.value.why == "row 1 of `w` is used again after row 2"


def test_a_scan_over_rows_changes_nothing():
    with jax.enable_x64(True):
        rolled = rolling.check(Indexed, square_loss, vectors(), stacked=False)
    assert rolling.scans(rolled) == [4]


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("mesh", [{"pipe": 2, "data": 4}, {"pipe": 4, "fsdp": 2}])
@pytest.mark.parametrize("build", [Indexed, Unstacked])
def test_rows_train_like_one_device(build, mesh, schedule):
    with jax.enable_x64(True):
        batches = [vectors(seed=1), vectors(seed=2)]
        expected = by_hand(filled(build), square_loss, batches, accumulation=2)
        assembled = put(build, square_loss, batches[0], mesh, schedule, count=2)
        check(on_mesh(assembled, filled(build), batches), expected)
