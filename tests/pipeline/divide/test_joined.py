"""Blocks joined by skips and averages over depth are divided, and train like one device."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from pipeline.execute.test_pipelined_loss import check, put
from program.programs import assert_close, trace
from program.rolling import results
from small_models import WIDTH, Residual, square_loss, vectors
from step.runs import filled, on_mesh, on_one_device

from meshwright.pipeline.divide.cut import cut_blocks
from meshwright.program.blocks.to_scan import roll_program


class Skips(nnx.Module):
    """The output of block i is added to the input of block n-i, as in a U-Net."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Residual(rngs=rngs) for _ in range(4)])

    def __call__(self, x):
        x, skips = self.first(x), []
        for number, block in enumerate(self.blocks):
            x = block(x + skips.pop() if number > 1 else x)
            if number < 2:
                skips.append(x)
        return x


class Merging(nnx.Module):
    """Blocks of the second half concatenate a skip, and have a layer for it."""

    class Block(nnx.Module):
        def __init__(self, merges, rngs):
            self.merge = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs) if merges else None
            self.layer = Residual(rngs=rngs)
            self.dropout = nnx.Dropout(0.2, rngs=rngs)

        def __call__(self, x, skip=None):
            if skip is not None:
                x = self.merge(jnp.concatenate([x, skip], axis=-1))
            return self.dropout(self.layer(x))

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([self.Block(number > 1, rngs) for number in range(4)])

    def __call__(self, x):
        skips = []
        for block in self.blocks:
            x = block(x, skips.pop()) if block.merge else block(x)
            if not block.merge:
                skips.append(x)
        return x


class Averages(nnx.Module):
    """Each block reads a weighted average of all outputs so far, as in DenseFormer."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Residual(rngs=rngs) for _ in range(4)])
        self.weights = nnx.List([nnx.Param(jnp.ones((n + 1,))) for n in range(5)])

    def __call__(self, x):
        outputs = [self.first(x)]
        average = lambda n: jnp.einsum("n,n...->...", self.weights[n], jnp.stack(outputs))  # noqa: E731
        for number, block in enumerate(self.blocks):
            outputs.append(block(average(number)))
        return average(4)


MODELS = {"skips": Skips, "merging": Merging, "averages": Averages}


@pytest.mark.parametrize(
    "name",
    ["skips", *(pytest.param(name, marks=pytest.mark.full) for name in ("merging", "averages"))],
)
def test_every_block_is_in_the_scan_and_nothing_changes(name):
    build, batch = MODELS[name], vectors()
    model_leaves, unrolled = trace(build, square_loss, batch)
    rolled = roll_program(unrolled, even_connections=True)
    cut = cut_blocks(rolled.traced, rolled.remarks)
    assert (cut.num_blocks, rolled.remarks) == (4, ())
    # No stage computes what comes before the blocks but the first one.
    assert not any("dot_general" in eqn.primitive.name for eqn in cut.shared.eqns)
    with jax.enable_x64(True):
        values = model_leaves.values(filled(build))
        expected = results(unrolled, values, batch)
        assert_close(results(rolled.traced, values, batch), expected, 1e-12)


CASES = [
    (name, mesh, schedule)
    for name in MODELS
    for mesh in ({"pipe": 2, "data": 4}, {"pipe": 4, "fsdp": 2})
    for schedule in ("gpipe", "1f1b", "zb_h1")
]
EVERYDAY = [("merging", {"pipe": 4, "fsdp": 2}, "zb_h1")]


def compare(name, mesh, schedule):
    build = MODELS[name]
    with jax.enable_x64(True):
        batches = [vectors(seed=1), vectors(seed=2)]
        alone = put(build, square_loss, batches[0], {}, count=2)
        expected = on_one_device(alone, filled(build), batches)
        assembled = put(build, square_loss, batches[0], mesh, schedule, count=2)
        check(on_mesh(assembled, filled(build), batches), expected)
    return assembled


@pytest.mark.full
def test_stages_pass_skips_on():
    assembled = compare(*EVERYDAY[0])
    assert [stage.blocks for stage in assembled.pipeline_report.stages] == [(0,), (1,), (2,), (3,)]


@pytest.mark.full
@pytest.mark.parametrize(("name", "mesh", "schedule"), [c for c in CASES if c not in EVERYDAY])
def test_joined_blocks_train_like_one_device(name, mesh, schedule):
    compare(name, mesh, schedule)
