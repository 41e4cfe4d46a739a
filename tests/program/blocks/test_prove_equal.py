"""Rolled blocks are the unrolled program: loss, gradients and new state, or a stated reason."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from program.programs import trace
from program.rolling import check, scans
from small_models import (
    WIDTH,
    Residual,
    Residuals,
    builder,
    fill,
    square_loss,
    task_batch,
    vectors,
)

from meshwright import Weighted
from meshwright.program.blocks.differences import longest_run
from meshwright.program.blocks.to_scan import roll_program


@pytest.fixture(autouse=True)
def _double_precision():
    with jax.enable_x64(True):
        yield


@pytest.mark.full
def test_gpt_is_rolled_with_its_dropout():
    loss, batch = task_batch("gpt", samples=4)
    traced = check(builder("gpt", dropout=0.1), loss, batch)
    assert scans(traced) == [2]
    assert not any(".0." in leaf.path for leaf in traced.leaves)


@pytest.mark.full
def test_gpt_is_rolled_in_bf16():
    loss, batch = task_batch("gpt", samples=4)
    traced = check(builder("gpt", qkv="fused"), loss, batch, compute=jnp.bfloat16)
    assert scans(traced) == [2]


def test_layouts_translate_both_ways():
    with jax.enable_x64(False):
        model_leaves, traced = trace(Residuals, square_loss, vectors(), rolled=True)
        values = model_leaves.values(fill(Residuals))
        there = traced.layout.from_canonical(values)
        back = traced.layout.to_canonical(there)
    assert [x.shape for x in there] == [leaf.shape for leaf in traced.leaves]
    assert all(np.array_equal(a, b) for a, b in zip(back, values, strict=True))


class Shared(nnx.Module):
    """Blocks that draw from one random stream, one after another."""

    def __init__(self):
        rngs = nnx.Rngs(0, dropout=1)
        self.rngs = rngs
        self.blocks = nnx.List([Residual(rngs=rngs) for _ in range(2)])
        self.dropout = nnx.Dropout(0.5)

    def __call__(self, x):
        for block in self.blocks:
            x = self.dropout(block(x), rngs=self.rngs)
        return x


def test_a_random_stream_is_carried_from_block_to_block():
    traced = check(Shared, square_loss, vectors())
    assert scans(traced) == [2]
    assert "rngs.dropout.count" in [leaf.path for leaf in traced.leaves]


class Collecting(Residuals):
    """Every block's output is looked at, and the parent adds the residual."""

    def __call__(self, x):
        hidden, aux = [], jnp.zeros(())
        for block in self.blocks:
            y = block(x)
            aux = aux + jnp.mean(y**2)
            x = x + 0.5 * y
            hidden.append(x)
        return x, hidden, aux


def collecting_loss(model, batch):
    x, hidden, aux = model(batch["x"])
    contrast = sum(jnp.mean(jnp.abs(h)) * (i + 1) for i, h in enumerate(hidden))
    return jnp.mean((x - batch["y"]) ** 2) + 0.1 * aux, {"contrast": Weighted(contrast, 2.0)}


def test_outputs_of_every_block_are_collected():
    traced = check(Collecting, collecting_loss, vectors())
    assert scans(traced) == [2]


class TwoLists(nnx.Module):
    """An encoder and a decoder; the decoder's blocks all read the encoder's result."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.encoder = nnx.List([Residual(rngs=rngs) for _ in range(2)])
        self.decoder = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        for block in self.encoder:
            x = block(x)
        y = jnp.zeros_like(x)
        for layer in self.decoder:
            y = jnp.tanh(layer(y) + x)
        return y


def test_two_lists_become_two_scans():
    traced = check(TwoLists, square_loss, vectors())
    assert scans(traced) == [2, 2]


class Before(Residuals):
    """The parent works before each block, not after it."""

    def __call__(self, x):
        for block in self.blocks:
            x = block(jnp.sin(x) * 2)
        return x


def test_what_the_parent_does_before_each_block_is_rolled_too():
    traced = check(Before, square_loss, vectors())
    assert scans(traced) == [2]
    assert sum(e.primitive.name == "sin" for e in traced.closed.jaxpr.eqns) == 0


class Zipped(nnx.Module):
    """Two lists whose elements take turns."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = jnp.tanh(layer(norm(x)))
        return x


def test_lists_that_take_turns_are_rolled_together():
    traced = check(Zipped, square_loss, vectors())
    assert scans(traced) == [2]
    assert {leaf.path for leaf in traced.leaves} == {
        "norms.*.scale",
        "norms.*.bias",
        "layers.*.kernel",
        "layers.*.bias",
    }


class Normed(nnx.Module):
    """A layer with batch statistics."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.norm(self.linear(x))


class BatchNormed(nnx.Module):
    """Blocks with batch statistics of their own."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([Normed(rngs) for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_batch_statistics_of_every_block_are_kept():
    traced = check(BatchNormed, square_loss, vectors())
    assert "blocks.*.norm.mean" in [leaf.path for leaf in traced.leaves]


def penalised(model, batch):
    weights = jax.tree.leaves(nnx.state(model, nnx.Param))
    return square_loss(model, batch) + 1e-3 * sum(jnp.sum(w**2) for w in weights)


def test_weights_read_outside_their_block_are_still_there():
    check(Residuals, penalised, vectors(), compute=jnp.bfloat16)


class Paired(nnx.Module):
    """Four blocks, of which two at a time share their layers."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        first, second = Residual(rngs=rngs), Residual(rngs=rngs)
        self.blocks = nnx.List([Wrapped(first), Wrapped(first), Wrapped(second), Wrapped(second)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Wrapped(nnx.Module):
    """A block around a module that may be shared."""

    def __init__(self, inner):
        self.inner = inner
        self.scale = nnx.Param(jnp.ones(()))

    def __call__(self, x):
        return self.inner(x) * self.scale[...]


def test_blocks_that_share_weights_by_pairs_are_one_block():
    traced = check(Paired, square_loss, vectors())
    paths = [leaf.path for leaf in traced.leaves]
    assert scans(traced) == [2]
    assert {"blocks.2n.inner.up.kernel", "blocks.2n.scale", "blocks.2n+1.scale"} <= set(paths)
    assert not any("2n+1.inner" in path for path in paths)


def test_blocks_of_which_some_are_frozen_are_not_stacked_together():
    last = nnx.All(nnx.Param, nnx.PathContains(1))
    remark = (
        "the weights of `blocks` are not stacked: "
        "`blocks.1.up.kernel` is trained, `blocks.0.up.kernel` is not (freeze the same part of "
        "every block, or consecutive blocks)"
    )
    traced = check(
        Residuals, square_loss, vectors(), stacked=False, trainable=last, remarks=(remark,)
    )
    assert {leaf.path for leaf in traced.leaves if leaf.role == "param"} == {
        f"blocks.1.{name}" for name in ("up.kernel", "up.bias", "down.kernel")
    }


class Neighbours(nnx.Module):
    """Each block also reads the next block's weights."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4)])

    def __call__(self, x):
        for number, block in enumerate(self.blocks):
            x = jnp.tanh(block(x)) * self.blocks[(number + 1) % 4].bias[...]
        return x


def test_overlapping_groups_of_weights_stay_correct():
    check(Neighbours, square_loss, vectors())


def scaled_gradient(factor):
    """Return the identity whose gradient is multiplied by a factor."""

    @jax.custom_vjp
    def identity(x):
        return x

    identity.defvjp(lambda x: (x, None), lambda _, g: (g * factor,))
    return identity


class Scaled(nnx.Module):
    """Blocks that differ, if at all, in their backward pass only."""

    def __init__(self, factors):
        rngs = nnx.Rngs(0)
        self.factors = factors
        self.blocks = nnx.List([Residual(rngs=rngs) for _ in factors])

    def __call__(self, x):
        for block, factor in zip(self.blocks, self.factors, strict=True):
            x = scaled_gradient(factor)(block(x))
        return x


def test_blocks_with_equal_backward_rules_are_rolled():
    check(lambda: Scaled((0.5, 0.5)), square_loss, vectors())


def test_blocks_that_differ_in_their_backward_rule_are_not_rolled():
    _, traced = trace(lambda: Scaled((0.5, 0.25)), square_loss, vectors())
    result = roll_program(traced)
    assert result.traced is traced
    assert result.remarks == (
        "`blocks.1` differs from `blocks.0`: custom_vjp_call has another derivative",
    )


class Different(nnx.Module):
    """Blocks that are not the same program."""

    def __init__(self, how):
        self.how = how
        rngs = nnx.Rngs(0)
        widths = (8, 24) if how == "shape" else (8, 8)
        self.blocks = nnx.List([nnx.Linear(WIDTH, w, rngs=rngs) for w in widths])
        self.back = nnx.List([nnx.Linear(w, WIDTH, rngs=rngs) for w in widths])

    def __call__(self, x):
        for index, (up, down) in enumerate(zip(self.blocks, self.back, strict=True)):
            y = up(x)
            if self.how == "constant":
                y = y * (0.1 + index)
            if self.how == "operation":
                y = jnp.sin(y) if index else jnp.cos(y)
            if self.how == "length" and index:
                y = jnp.sin(y)
            if self.how == "table":
                y = jnp.where(np.arange(8) < index, 0.0, y)
            x = down(y)
        return x


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("shape", "dot_general in `blocks."),
        ("operation", "sin against cos|cos against sin"),
        ("length", "`blocks.1` differs from `blocks.0`"),
    ],
)
def test_blocks_that_differ_are_left_alone_with_the_reason(how, reason):
    _, traced = trace(lambda: Different(how), square_loss, vectors())
    result = roll_program(traced)
    assert result.traced is traced
    (remark,) = result.remarks
    assert any(part in remark for part in reason.split("|"))


class OddEnds(nnx.Module):
    """Equal blocks between a wider one and one that does something else."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        widths = (24, 16, 16, 16, 16)
        self.blocks = nnx.List([Wide(width, rngs=rngs) for width in widths])

    def __call__(self, x):
        for block in list(self.blocks)[:-1]:
            x = block(x)
        return jnp.sin(self.blocks[-1](x))


class Wide(nnx.Module):
    def __init__(self, width, *, rngs):
        self.up = nnx.Linear(WIDTH, width, rngs=rngs)
        self.down = nnx.Linear(width, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


def test_of_blocks_that_are_not_all_alike_the_longest_run_is_rolled():
    remark = (
        "in `blocks`, only `blocks.1` to `blocks.4` are equal blocks and are trained alike, "
        "not `blocks.0`"
    )
    traced = check(OddEnds, square_loss, vectors(), remarks=(remark,))
    assert scans(traced) == [4]
    assert "blocks.0.up.kernel" in [leaf.path for leaf in traced.leaves]


class Turns(nnx.Module):
    """Blocks of two kinds that take turns; the parent works before each."""

    def __init__(self, kinds):
        rngs = nnx.Rngs(0)
        self.kinds = kinds
        self.blocks = nnx.List([Wide(16, rngs=rngs) for _ in kinds])

    def __call__(self, x):
        for kind, block in zip(self.kinds, self.blocks, strict=True):
            x = block(jnp.cos(x)) if kind == "a" else jnp.sin(block(jnp.cos(x)))
        return x


@pytest.mark.parametrize(
    ("kinds", "said", "length"),
    [
        ("aabaaba", "`blocks.0` to `blocks.5` repeat every 3 blocks|`blocks.6`", 2),
        # What the parent does after the last block is none of the block's.
        pytest.param(
            *("baab", "`blocks.1` to `blocks.3` are equal blocks|`blocks.0`", 3),
            marks=pytest.mark.full,
        ),
    ],
)
def test_of_blocks_that_take_turns_what_is_left_over_stays_outside(kinds, said, length):
    run, others = said.split("|")
    remark = f"in `blocks`, only {run} and are trained alike, not {others}"
    traced = check(lambda: Turns(kinds), square_loss, vectors(), remarks=(remark,))
    assert scans(traced) == [length]


class Perceptron(nnx.Module):
    """Activations between layers, none after the last."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(5)])

    def __call__(self, x):
        for number, layer in enumerate(self.layers):
            x = layer(x) if number == 4 else jnp.tanh(layer(x))
        return x


def test_layers_with_something_between_them_are_rolled_but_for_the_last():
    remark = (
        "in `layers`, only `layers.0` to `layers.3` are equal blocks and are trained alike, not"
    )
    traced = check(Perceptron, square_loss, vectors(), remarks=(f"{remark} `layers.4`",))
    assert scans(traced) == [4]


@pytest.mark.parametrize(
    ("kinds", "period", "run"),
    [
        ("aaaa", 1, (0, 4)),
        ("baaa", 1, (1, 3)),
        ("aabaabaa", 3, (0, 6)),
        ("xababay", 2, (1, 4)),
        ("xabababy", 2, (1, 6)),
        ("aaba", 2, (0, 2)),
        ("abcd", 1, (0, 1)),
    ],
)
def test_the_longest_run_has_whole_periods(kinds, period, run):
    assert longest_run([*map(ord, kinds)], [0] * len(kinds), period) == run


def test_the_longest_run_is_interrupted_by_what_happens_between_blocks():
    assert longest_run([0] * 6, [0, 1, 0, 0, 0], 1) == (2, 4)


def test_of_blocks_that_are_partly_frozen_the_longest_run_is_rolled():
    later = nnx.All(nnx.Param, nnx.Not(nnx.PathContains(0)))
    remark = (
        "in `blocks`, only `blocks.1` to `blocks.3` are equal blocks and are trained alike, "
        "not `blocks.0`"
    )
    build = lambda: Residuals(4)  # noqa: E731
    traced = check(build, square_loss, vectors(), trainable=later, remarks=(remark,))
    assert scans(traced) == [3]


@pytest.mark.parametrize("how", ["constant", "table"])
def test_constants_that_differ_are_stacked(how):
    traced = check(lambda: Different(how), square_loss, vectors())
    assert scans(traced) == [2]


class Branching(nnx.Module):
    """Blocks with a loop, a branch and a checkpoint inside, and dropped samples."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([Residual(rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            y = jax.checkpoint(lambda x, block=block: jnp.sin(x) * block.up.bias[:WIDTH])(x)
            y, _ = jax.lax.scan(lambda c, _: (jnp.cos(c), None), y, length=2)
            x = jax.lax.cond(y.sum() > 0, lambda y: y * 2, lambda y: y, y) + block(x)
        return x


def test_loops_branches_and_checkpoints_inside_blocks_are_compared():
    traced = check(Branching, square_loss, vectors())
    assert scans(traced) == [2]
