"""Copies of modules, as transforms make them, are named after the modules they stand for."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from program.programs import modules_by_primitive, trace
from program.rolling import check, scans
from small_models import WIDTH, Residual, Residuals, square_loss, vectors

from meshwright.program.blocks.to_scan import roll_program


@pytest.fixture(autouse=True)
def _single_precision():
    with jax.enable_x64(False):
        yield


def merged(block, x):
    graphdef, state = nnx.split(block)
    return jax.checkpoint(lambda state, x: nnx.merge(graphdef, state)(x))(state, x)


ONCE = {name: f(lambda b, x: b(x)) for name, f in (("remat", nnx.remat), ("jit", nnx.jit))}
WAYS = {
    "remat": lambda block, x: nnx.remat(lambda b, x: b(x))(block, x),
    "one remat": ONCE["remat"],
    "jit": lambda block, x: nnx.jit(lambda b, x: b(x))(block, x),
    "one jit": ONCE["jit"],
    "remat of jit": lambda block, x: nnx.remat(lambda b, x: ONCE["jit"](b, x))(block, x),
    "merge": lambda block, x: nnx.merge(*nnx.split(block))(x),
    "checkpointed merge": merged,
    "checkpointed closure": lambda block, x: jax.checkpoint(lambda x: block(x))(x),
    "vmap": lambda block, x: nnx.vmap(lambda b, x: b(x), in_axes=(None, 0))(block, x),
}


class Copied(Residuals):
    """Every block runs as a copy of itself."""

    def __init__(self, way, num_blocks=3):
        super().__init__(num_blocks)
        self.way = way

    def __call__(self, x):
        for block in self.blocks:
            x = WAYS[self.way](block, x)
        return x


@pytest.mark.parametrize("compute", [pytest.param(None, marks=pytest.mark.full), jnp.bfloat16])
@pytest.mark.parametrize("way", WAYS)
def test_every_copy_has_the_name_of_its_block(way, compute):
    _, traced = trace(lambda: Copied(way), square_loss, vectors(), compute)
    found = modules_by_primitive(traced.closed)
    assert found["tanh"] == [f"blocks.{n}" for n in range(3)]
    layers = [f"blocks.{n}.{name}" for n in range(3) for name in ("up", "down")]
    assert found["dot_general"] == layers
    rolled = roll_program(traced)
    assert rolled.remarks == ()
    assert scans(rolled.traced) == [3]


@pytest.mark.parametrize("way", ["one remat", pytest.param("one jit", marks=pytest.mark.full)])
def test_copies_are_rolled(way):
    with jax.enable_x64(True):
        traced = check(lambda: Copied(way, 2), square_loss, vectors())
    assert [leaf.path.split(".")[:2] for leaf in traced.leaves] == [["blocks", "*"]] * 3


class Pair(nnx.Module):
    """Two layers of one class in one checkpoint, called in the other order."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first, self.second = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        run = nnx.remat(lambda a, b, x: b(jnp.sin(a(x))))
        return run(self.second, self.first, x)


def test_copies_of_one_class_in_one_call_are_told_apart():
    _, traced = trace(Pair, square_loss, vectors())
    assert modules_by_primitive(traced.closed)["dot_general"] == ["second", "first"]


class Sharing(nnx.Module):
    """Checkpointed blocks of which each has a layer of its own and one that all share."""

    class Block(nnx.Module):
        def __init__(self, shared, rngs):
            self.own = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.shared = shared

        def __call__(self, x):
            return self.shared(jnp.tanh(self.own(x)))

    def __init__(self):
        rngs = nnx.Rngs(0)
        shared = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([self.Block(shared, rngs) for _ in range(3)])

    def __call__(self, x):
        for block in self.blocks:
            x = ONCE["remat"](block, x)
        return x


def test_a_shared_layer_does_not_hide_whose_copy_it_is():
    _, traced = trace(Sharing, square_loss, vectors())
    assert modules_by_primitive(traced.closed)["tanh"] == [f"blocks.{n}" for n in range(3)]
    rolled = roll_program(traced).traced
    (scan,) = [e for e in rolled.closed.jaxpr.eqns if e.primitive.name == "scan"]
    # What the checkpoint only hands through, such as the shared weights, is not handed on.
    assert scan.params.get("num_carry", 1) == 1


def test_a_copy_that_reads_no_leaf_works_for_its_caller():
    class Quiet(nnx.Module):
        def __call__(self, x):
            return jnp.sin(x)

    class Model(nnx.Module):
        def __init__(self):
            self.layer = Residual(rngs=nnx.Rngs(0))
            self.first, self.second = Quiet(), Quiet()

        def __call__(self, x):
            return nnx.remat(lambda q, x: q(x))(self.second, self.layer(x))

    _, traced = trace(Model, square_loss, vectors())
    assert modules_by_primitive(traced.closed)["sin"] == ["model"]
