"""Which modules are repeated blocks, and what is said about those that are not."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from program.programs import trace
from program.rolling import check, scans
from small_models import SAMPLES, WIDTH, Residual, Residuals, square_loss, vectors

from meshwright.program.blocks.block_lists import find_block_lists, pattern_of
from meshwright.program.blocks.to_scan import roll_program

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def _double_precision():
    with jax.enable_x64(True):
        yield


def lists(build):
    with jax.enable_x64(False):
        _, traced = trace(build, square_loss, vectors())
    return find_block_lists(traced.closed.jaxpr.eqns)


def remarks(build):
    with jax.enable_x64(False):
        return roll_program(trace(build, square_loss, vectors())[1]).remarks


class Backwards(Residuals):
    """The last block of the list runs first."""

    def __call__(self, x):
        for block in reversed(list(self.blocks)):
            x = block(x)
        return x


def test_blocks_are_listed_in_the_order_in_which_they_run():
    (found,) = lists(Backwards)
    assert found.elements == ("blocks.1", "blocks.0")


def test_a_list_run_backwards_is_rolled():
    traced = check(Backwards, square_loss, vectors())
    assert scans(traced) == [2]
    assert {leaf.path.split(".")[1] for leaf in traced.leaves} == {"*"}


class Twice(Residuals):
    """The whole list runs twice."""

    def __call__(self, x):
        return super().__call__(super().__call__(x))


class Same(Residuals):
    """One module is all the blocks."""

    def __init__(self):
        super().__init__(1)
        self.blocks = nnx.List([self.blocks[0]] * 3)


@pytest.mark.parametrize(
    ("build", "remark"),
    [
        (Twice, "`blocks.0` of `blocks` runs again after `blocks.1` has started"),
        (Same, "only `blocks.0` of `blocks` runs: others are the same module, or not called"),
    ],
)
def test_lists_that_are_not_blocks_are_named_with_the_reason(build, remark):
    assert lists(build) == []
    assert remarks(build) == (remark,)


class Numbered(nnx.Module):
    """Blocks in a dict or in attributes whose names end in numbers, between two such norms."""

    def __init__(self, kind):
        rngs = nnx.Rngs(0)
        self.kind = kind
        self.norm1, self.norm2 = (nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2))
        made = [Residual(rngs=rngs) for _ in range(3)]
        if kind == "attributes":
            self.block1, self.block2, self.block3 = made
        elif kind == "dict":
            self.inner = nnx.Dict({f"layer_{n}": block for n, block in enumerate(made)})
        else:
            self.inner = nnx.List(made)

    def __call__(self, x):
        x = self.norm1(x)
        if self.kind == "attributes":
            blocks = [self.block1, self.block2, self.block3]
        else:
            blocks = self.inner.values() if self.kind == "dict" else self.inner
        for block in blocks:
            x = block(x)
        return self.norm2(x)


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [("attributes", "block*"), ("dict", "inner.layer_*"), ("list", "inner.*")],
)
def test_numbered_names_are_blocks_unless_they_hide_a_longer_list(kind, pattern):
    found = lists(lambda: Numbered(kind))
    assert [(f.pattern, f.num_blocks) for f in found] == [(pattern, 3)]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["attributes", "dict"])
def test_blocks_with_numbered_names_are_rolled(kind):
    traced = check(lambda: Numbered(kind), square_loss, vectors())
    assert scans(traced) == [3]
    pattern = {"attributes": "block*", "dict": "inner.layer_*"}[kind]
    assert f"{pattern}.up.kernel" in [leaf.path for leaf in traced.leaves]


class Layers(nnx.Module):
    """Layers with numbered names that are not blocks: each has another shape."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.fc1 = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.fc2 = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.fc2(jnp.tanh(self.fc1(x)))


def test_layers_of_different_shapes_are_not_blocks():
    assert lists(Layers) == []
    assert remarks(Layers) == (
        "the results of the modules `fc*` have different shapes: "
        f"[{SAMPLES}, {2 * WIDTH}], [{SAMPLES}, {WIDTH}]",
    )


class Turns(nnx.Module):
    """Two kinds of blocks, of which the first has an operation more, take turns."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([Residual(rngs=rngs) for _ in range(4)])

    def __call__(self, x):
        for number, block in enumerate(self.blocks):
            x = block(x) if number % 2 else jnp.sin(block(x))
        return x


def test_blocks_of_two_kinds_in_turn_are_rolled_two_by_two():
    traced = check(Turns, square_loss, vectors())
    assert scans(traced) == [2]
    ups = [leaf.path for leaf in traced.leaves if leaf.path.endswith("up.kernel")]
    assert ups == ["blocks.2n.up.kernel", "blocks.2n+1.up.kernel"]


class Sine(Residual):
    """A block with one operation more."""

    def __call__(self, x):
        return jnp.sin(super().__call__(x))


class Longer(Residuals):
    """The second of three blocks does something more."""

    def __init__(self):
        super().__init__(3)
        self.blocks[1] = Sine(rngs=nnx.Rngs(0))


def test_a_longer_block_is_named_with_the_first_operation_that_differs():
    (remark,) = remarks(Longer)
    assert remark == (
        "`blocks.1` differs from `blocks.0`: it runs 7 operations, not 6; "
        "the first to differ is sin in `blocks.1` against nothing"
    )


@pytest.mark.parametrize(
    ("paths", "pattern"),
    [
        (["blocks.0.up", "blocks.1.up"], "blocks.*.up"),
        (["block1.up", "block2.up", "block3.up"], "block*.up"),
        (["blocks.1.up", "blocks.4.up"], "blocks.3n+1.up"),
        (["a.up", "b.up"], "*.up"),
    ],
)
def test_one_path_stands_for_many(paths, pattern):
    assert pattern_of(paths) == pattern
