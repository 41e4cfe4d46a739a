"""Models whose blocks are found only with some care are cut into stages all the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from program.programs import assert_close, trace
from small_models import WIDTH, Residual, square_loss, vectors
from step.runs import OPTIMIZER, filled, on_mesh, on_one_device

from meshwright.config.batch import solve_batch
from meshwright.config.schema import ShardingConfig
from meshwright.errors import UserError
from meshwright.inputs.user_model import model_source
from meshwright.pipeline.divide.cut import cut_blocks
from meshwright.plan import Plan
from meshwright.program.blocks.to_scan import roll_program
from meshwright.step.assemble import assemble


class Careful(nnx.Module):
    """Checkpointed from outside, in attributes, gated, noting what they did, with long skips."""

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.layer = Residual(rngs=rngs)
            self.latest = nnx.Variable(jnp.zeros((WIDTH,)))

        def __call__(self, x):
            x = self.layer(x)
            self.latest[...] = jax.lax.stop_gradient(x.mean(0))
            return x

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.gates = nnx.Param(jnp.ones((4,)))
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.block1, self.block2 = self.Block(rngs), self.Block(rngs)
        self.block3, self.block4 = self.Block(rngs), self.Block(rngs)

    def __call__(self, x):
        run = nnx.remat(lambda block, x: block(x))
        start = before = x = self.first(x)
        for number, block in enumerate((self.block1, self.block2, self.block3, self.block4)):
            x, before = run(block, x + start) * self.gates[number] + 0.5 * before, x
        return x


def cut(build):
    rolled = roll_program(trace(build, square_loss, vectors())[1])
    return cut_blocks(rolled.traced, rolled.remarks)


def test_blocks_are_found_and_keep_their_state():
    found = cut(Careful)
    assert found.num_blocks == 4
    paths = [stack.path for stack in found.stacks if stack.kind == "changing"]
    assert paths == ["block*.latest"]
    assert found.outer_of("changing") == []


class Old(linen.Module):
    """Linen blocks that a loop makes and runs, with statistics and a layer before them."""

    class Block(linen.Module):
        @linen.compact
        def __call__(self, x):
            h = linen.BatchNorm(use_running_average=False)(linen.Dense(2 * WIDTH)(x))
            return x + linen.Dense(WIDTH)(linen.tanh(h))

    @linen.compact
    def __call__(self, x):
        x = linen.Dense(WIDTH)(x)
        for _ in range(4):
            x = self.Block()(x)
        return x


def test_linen_blocks_in_a_loop_are_found():
    def loss(model, batch):
        return ((model(batch["x"], mutable=["batch_stats"]) - batch["y"]) ** 2).mean()

    source = model_source(Old(), loss, vectors)
    rolled = roll_program(trace(lambda: source(nnx.Rngs(0)), loss, vectors())[1])
    found = cut_blocks(rolled.traced, rolled.remarks)
    assert found.num_blocks == 4
    paths = {stack.path for stack in found.stacks}
    assert {"Block_*.Dense_0.kernel", "Block_*.BatchNorm_0.mean"} <= paths
    assert {leaf.step.leaf.path for leaf in found.outer} >= {"Dense_0.kernel"}
    assert sum(stack.kind == "changing" for stack in found.stacks) == 2


class Counted(nnx.Module):
    """Before the blocks, something is counted, and something is a mean over samples."""

    def __init__(self):
        self.calls = nnx.BatchStat(jnp.zeros((), jnp.int32))
        self.mean = nnx.BatchStat(jnp.zeros((WIDTH,)))
        self.blocks = nnx.List([Residual(rngs=nnx.Rngs(0)) for _ in range(4)])

    def __call__(self, x):
        self.calls[...] += 1
        self.mean[...] = x.mean(0)
        for block in self.blocks:
            x = block(x)
        return x


def test_only_state_that_depends_on_samples_is_named():
    with pytest.raises(UserError, match="stages: mean outside the blocks depends on the sam"):
        cut(Counted)


class Twice(Careful):
    """All blocks run twice."""

    def __call__(self, x):
        return super().__call__(super().__call__(x))


def test_a_model_without_blocks_is_refused_with_what_was_seen():
    with pytest.raises(UserError, match="`block1` of `block\\*` runs again after `block2`"):
        cut(Twice)


def put(batch, mesh):
    """Assemble a step of four microbatches."""
    plan = Plan(
        mesh=mesh,
        batch=solve_batch(
            replicas=mesh.get("data", 1), global_batch_size=16, gradient_accumulation_steps=4
        ),
        sharding=ShardingConfig(min_shard_size=0),
        schedule="1f1b" if mesh else None,
        num_microbatches=4 if mesh else 1,
    )
    with jax.enable_x64(False):
        return assemble(
            lambda rngs: Careful(),
            square_loss,
            OPTIMIZER,
            plan,
            batch,
            devices=jax.devices()[: plan.num_devices],
            wide=True,
        )


@pytest.mark.full
def test_stages_train_like_one_device():
    with jax.enable_x64(True):
        batches = [vectors(seed=1), vectors(seed=2)]
        expected = on_one_device(put(batches[0], {}), filled(Careful), batches)
        found = on_mesh(put(batches[0], {"pipe": 4}), filled(Careful), batches)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-12)
    assert_close(found.leaves, expected.leaves, 1e-12)
