"""Operations that move values between devices work inside stages, or are refused by name."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from pipeline.execute.test_pipelined_loss import CUBE, put
from quick import quick_module
from small_models import square_loss, vectors

import meshwright as mw
from meshwright.errors import UserError

__all__ = ["quick_module"]
pytestmark = pytest.mark.usefixtures("quick_module")

WIDTH = 8


class Moving(nnx.Module):
    """Blocks that move values along the dims of samples and features."""

    class Block(nnx.Module):
        def __init__(self, move, *, rngs):
            self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
            self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
            self.move = move

        def __call__(self, x):
            return x + self.down(self.move(jnp.tanh(self.up(x))))

    def __init__(self, move):
        self.move = move
        self.blocks = nnx.List([self.Block(move, rngs=nnx.Rngs(n)) for n in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def shuffled(x):
    """Turn samples and features round, cut, join, sort and add up."""
    x = x[::-1, ::-1] + jnp.roll(x, 1, 0) + jnp.pad(x[:, 2:], ((0, 0), (0, 2)))
    first, second = jnp.split(x, [5], axis=1)
    x = jnp.concatenate([second, first], axis=1)
    return 0.1 * (jnp.sort(x, axis=1) + jnp.cumsum(x, axis=1))


@jax.custom_vjp
def out_of_reach(x):
    """Move samples in a function that is differentiated as a whole."""
    return jnp.roll(x, 1, 0)


out_of_reach.defvjp(lambda x: (jnp.roll(x, 1, 0), None), lambda _, g: (jnp.roll(g, -1, 0),))


@pytest.mark.parametrize(
    "mesh", [{"pipe": 2, "tensor": 2}, pytest.param(CUBE, marks=pytest.mark.full)]
)
def test_values_are_moved_within_a_stage(mesh):
    batch = {name: np.asarray(a) for name, a in vectors(16, width=WIDTH).items()}
    model = Moving(shuffled)
    assembled = put(lambda: Moving(shuffled), square_loss, batch, mesh, "1f1b", count=4, wide=False)
    state = assembled.adopt(model)
    _, metrics = assembled.step(state, assembled.put_batch(batch))
    pieces = [{name: a[n::4] for name, a in batch.items()} for n in range(4)]
    by_piece = nnx.jit(nnx.value_and_grad(square_loss))
    losses, gradients = zip(*(by_piece(model, piece) for piece in pieces), strict=True)
    expected = np.mean(losses)
    norm = np.sqrt(
        sum((np.mean(g, 0) ** 2).sum() for g in zip(*map(jax.tree.leaves, gradients), strict=True))
    )
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-4)


def test_what_would_block_is_refused_by_name():
    batch = {name: np.asarray(a) for name, a in vectors(16, width=WIDTH).items()}
    trainer = mw.Trainer(
        model=lambda: Moving(out_of_reach),
        loss=square_loss,
        optimizer=optax.sgd(0.1),
        mesh="pipe=2,fsdp=2",
        devices=jax.devices()[:4],
    )
    with pytest.raises(UserError, match="cannot be divided into pipeline stages on this mesh"):
        trainer.fit([batch], steps=1)
