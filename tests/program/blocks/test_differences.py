"""Messages about blocks that cannot be rolled or split into stages name the value in the way."""

import optax
import pytest
from flax import nnx
from odd_models import WIDTH, batch, linear, loss

import meshwright as mw


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = linear(rngs), linear(rngs)

    def __call__(self, x, skip=0.0):
        return x + self.down(nnx.tanh(self.up(x) + skip))


class Jumping(nnx.Module):
    """Each block reads the output of the one before it, and of another one in no order."""

    def __init__(self, rngs):
        self.blocks = nnx.List(Block(rngs) for _ in range(5))

    def __call__(self, x):
        outputs = [x]
        for block, other in zip(self.blocks, (0, 1, 0, 3, 1), strict=True):
            outputs.append(block(outputs[-1], outputs[other]))
        return outputs[-1]


class Borrowing(nnx.Module):
    """A weight of the blocks is read again after them."""

    def __init__(self, rngs):
        self.blocks = nnx.List(Block(rngs) for _ in range(4))

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x @ self.blocks[0].up.kernel


class Widening(nnx.Module):
    """Each block is twice as wide as the one before it."""

    def __init__(self, rngs):
        sizes = [(WIDTH * 2**n, WIDTH * 2 ** (n + 1)) for n in range(3)]
        self.blocks = nnx.List(nnx.Linear(*size, rngs=rngs) for size in sizes)
        self.last = nnx.Linear(8 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = nnx.tanh(block(x))
        return self.last(x)


def assemble(model, mesh, **options):
    trainer = mw.Trainer(model=model, loss=loss, optimizer=optax.sgd(0.1), mesh=mesh, **options)
    return trainer.assemble(batch())


def divide(model):
    return assemble(model, "data=4,pipe=2", gradient_accumulation_steps=2)


def test_a_value_that_jumps_between_blocks_is_named_with_both_ends():
    (remark,) = assemble(Jumping, "data=8", sharding=mw.ShardingConfig(blocks="scan")).remarks
    assert "the blocks of `blocks` use each other's results out of order: `blocks." in remark
    assert "(add in `blocks." in remark
    assert "reads a value of shape [16, 8], made by add in `blocks." in remark


def test_a_weight_that_is_read_after_the_blocks_is_named_with_its_reader():
    with pytest.raises(mw.UserError) as caught:
        divide(Borrowing)
    assert "`blocks.*.up.kernel` [4, 8, 8] is also read outside the blocks" in caught.value.what
    assert "by dot_general in `model`" in caught.value.what


def test_blocks_of_other_shapes_are_named_with_their_operands():
    with pytest.raises(mw.UserError) as caught:
        divide(Widening)
    assert (
        "dot_general in `blocks.1` reads float32 [8, 16] and float32 [16, 32], but dot_general in "
        "`blocks.0` reads float32 [8, 8] and float32 [8, 16]"
    ) in caught.value.why
