"""Any optax transformation runs on flat, stacked and divided leaves as it does on its own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from program.programs import assert_close, quick, trace
from small_models import WIDTH, fill, numbers, square_loss, vectors

from meshwright.config.schema import ShardingConfig
from meshwright.program.evaluate.widen import widened
from meshwright.sharding.decide import decide
from meshwright.step.optimizer import FlatOptimizer

STEPS = 3


def by_rank(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


def by_path(params):
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "matrix" if path[-1].key == "kernel" else "vector", params
    )


def by_block(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: path[1].key == 0, params)


def warmup(count):
    return 0.01 * (count + 1)


ELEMENTWISE = {
    "adamw": lambda: optax.adamw(0.01),
    "lion": lambda: optax.lion(0.01),
    "sgd": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "schedule": lambda: optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(warmup)),
    "clipped": lambda: optax.chain(optax.clip(0.1), optax.rmsprop(0.01)),
    "masked": lambda: optax.adamw(0.01, weight_decay=0.1, mask=lambda p: jax.tree.map(bool_, p)),
    "multi_transform": lambda: optax.multi_transform(
        {"matrix": optax.sgd(0.1), "vector": optax.adam(0.1)}, by_path
    ),
    "injected": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=0.01),
}
OTHERS = {
    "adafactor": lambda: optax.adafactor(0.01, min_dim_size_to_factor=8),
    "muon": lambda: optax.contrib.muon(0.01),
    "lamb": lambda: optax.lamb(0.01),
    "global_clip": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.01)),
    "decay_by_rank": lambda: optax.adamw(0.01, weight_decay=0.1, mask=by_rank),
    "by_block": lambda: optax.masked(optax.sgd(0.1), by_block),
    "multi_steps": lambda: optax.MultiSteps(optax.adamw(0.01), 2).gradient_transformation(),
}
ALL = ELEMENTWISE | OTHERS


def bool_(_):
    return True


@pytest.fixture(autouse=True)
def _double_precision():
    with jax.enable_x64(True):
        yield


class Layers(nnx.Module):
    """Few leaves, most of them in blocks."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return self.head(x)


@functools.cache
def program(rolled):
    with jax.enable_x64(False):
        return trace(Layers, square_loss, vectors(), rolled=rolled)


@functools.cache
def values():
    with jax.enable_x64(False):
        model_leaves, _ = program(rolled=False)
        start = model_leaves.values(fill(Layers))
    gradients = [
        [np.float64(numbers(*p.shape, seed=97 * u + n)) for n, p in enumerate(start)]
        for u in range(STEPS)
    ]
    return [np.float64(p) for p in start], gradients


def flat(name, *, rolled, sizes=None, compared="all"):
    _, traced = program(rolled)
    sizes = sizes or {}
    found = decide(traced, sizes, ShardingConfig(min_shard_size=0))
    layout, placed = traced.layout, found.optimizer
    return traced, FlatOptimizer(ALL[name](), layout, placed, sizes, compared=compared)


def nested(paths, leaves):
    tree = {}
    for path, leaf in zip(paths, leaves, strict=True):
        place = tree
        # As in NNX, the numbers of lists are integers.
        *folders, last = (int(part) if part.isdecimal() else part for part in path.split("."))
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = leaf
    return tree


@functools.cache
def expected(name):
    """Return the parameters after some steps, by optax alone."""
    model_leaves, _ = program(rolled=False)
    paths = [leaf.path for leaf in model_leaves.leaves]
    start, gradients = values()
    transformation = ALL[name]()

    @quick
    def update(params, state, gradient):
        updates, state = transformation.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    params = nested(paths, start)
    state = quick(transformation.init)(params)
    for gradient in gradients:
        params, state = update(params, state, nested(paths, gradient))
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {jax.tree_util.keystr(p, simple=True, separator="."): x for p, x in leaves}


EVERYDAY = {"adafactor", "muon"}


@pytest.mark.parametrize(
    "name", [n if n in EVERYDAY else pytest.param(n, marks=pytest.mark.full) for n in sorted(ALL)]
)
def test_rolled_blocks_are_updated_as_optax_updates_single_ones(name):
    traced, optimizer = flat(name, rolled=True)
    start, gradients = values()
    into, out = traced.layout.from_canonical, traced.layout.to_canonical

    update = quick(optimizer.update)
    params = into(start)
    leaves = quick(optimizer.init)(params)
    for gradient in gradients:
        params, leaves = update(into(gradient), leaves, params)
    assert [x.shape for x in leaves] == [x.shape for x in optimizer.leaves]
    paths = [leaf.path for leaf in traced.layout.leaves]
    assert_close(dict(zip(paths, out(params), strict=True)), expected(name), 1e-12)


@pytest.mark.parametrize("compared", ["all", "ends"])
@pytest.mark.parametrize("name", sorted(ALL))
def test_stacks_are_kept_where_every_element_is_treated_alike(name, compared):
    _, optimizer = flat(name, rolled=True, compared=compared)
    owned = [leaf for leaf in optimizer.leaves if leaf.param is not None]
    stacked = any("*" in leaf.path for leaf in owned)
    assert stacked is (name in ELEMENTWISE and bool(owned))


@pytest.mark.parametrize("rolled", [False, True])
@pytest.mark.parametrize("name", sorted(ALL))
def test_state_lies_where_its_parameter_lies(name, rolled):
    traced, optimizer = flat(name, rolled=rolled, sizes={"fsdp": 4, "tensor": 2})
    found = decide(traced, {"fsdp": 4, "tensor": 2}, ShardingConfig(min_shard_size=0))
    for leaf in optimizer.leaves:
        if leaf.param is None:
            assert leaf.placement.axes() == set()
            continue
        step, like = traced.layout.step_leaves[leaf.param], found.optimizer[leaf.param]
        if leaf.shape == step.leaf.shape:
            assert leaf.placement.dims == like.dims
        elif step.stacked and leaf.shape == step.leaf.shape[1:]:
            assert leaf.placement.dims == like.dims[1:]
        else:
            # Adafactor's rows and columns; its placeholders have one element.
            assert len(leaf.placement.dims) == len(leaf.shape)


def test_moments_of_matrices_are_divided():
    _, optimizer = flat("adamw", rolled=True, sizes={"fsdp": 4, "tensor": 2})
    moments = {leaf.path: leaf.placement for leaf in optimizer.leaves}
    assert moments["0.mu.blocks.*.kernel"].axes() == {"fsdp"}
    assert moments["0.mu.blocks.*.kernel"].reason == "like blocks.*.kernel"
    assert moments["0.count"].reason == "the same on every device"


def test_gradients_in_another_format_do_not_change_the_parameters_format():
    traced, optimizer = flat("adamw", rolled=False)
    start, gradients = values()
    params = [jnp.asarray(p, jnp.float32) for p in start]
    leaves = jax.eval_shape(optimizer.init, params)
    params, _ = jax.eval_shape(optimizer.update, gradients[0], leaves, params)
    assert {p.dtype for p in params} == {jnp.dtype("float32")}
    assert len(params) == len(traced.leaves)


def test_schedules_are_computed_in_float64_for_proofs():
    # Constants are traced in float32.
    rate, warmup_steps = float(np.float32(0.002)), 40
    schedule = optax.linear_schedule(0.0, rate, warmup_steps)
    with jax.enable_x64(True):
        start = jnp.zeros(3, jnp.float64)
        update = widened(lambda g, s: optax.sgd(schedule).update(g, s))
        state, off = optax.sgd(schedule).init(start), [0.0]
        for count in range(12):
            gradients, exact = jnp.full(3, 1 / 3), -rate * count / warmup_steps / 3
            plain, _ = optax.sgd(schedule).update(gradients, state)
            updates, state = update(gradients, state)
            np.testing.assert_allclose(updates, exact, rtol=1e-13)
            off.append(abs(float(plain[0]) - exact) / rate)
    assert max(off) > 1e-9
