"""Optimizers that look at the loss, or at the tree of parameters, train as in a plain loop."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, traverse_util

import meshwright as mw
from meshwright.errors import UserError

RNG = np.random.default_rng(0)
BATCH = {
    "x": RNG.normal(size=(16, 8)).astype("float32"),
    "y": RNG.normal(size=(16, 4)).astype("float32"),
}
STEPS = 3


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([Block(rngs), Block(rngs)])
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def walked(params):
    """Label the leaves as people do who know that parameters are nested dicts."""
    return {
        key: walked(value) if isinstance(value, dict) else ("big" if key == "kernel" else "small")
        for key, value in params.items()
    }


def first_block(params):
    """Label by the number of a block, which is an integer as in NNX."""
    flat = traverse_util.flatten_dict(params)
    labels = {path: "big" if path[:2] == ("blocks", 0) else "small" for path in flat}
    return traverse_util.unflatten_dict(labels)


def flattened(params):
    flat = traverse_util.flatten_dict(params)
    labels = {path: "big" if path[-1] == "kernel" else "small" for path in flat}
    return traverse_util.unflatten_dict(labels)


PARTS = {"big": optax.adam(0.01), "small": optax.sgd(0.01)}
FURTHER = {
    "lbfgs": lambda: optax.lbfgs(),
    "first_block": lambda: optax.multi_transform(PARTS, first_block),
    "flattened": lambda: optax.multi_transform(PARTS, flattened),
    "prefix": lambda: optax.multi_transform(PARTS, {"blocks": "big", "head": "small"}),
    "backtracking": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(max_backtracking_steps=8)
    ),
    "polyak": lambda: optax.polyak_sgd(),
    "momo": lambda: optax.contrib.momo(0.01),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(0.01), 2),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(0.01),
    "prodigy": lambda: optax.contrib.prodigy(),
}


def plain_losses(optimizer, model=None, *, extra=("value", "grad", "value_fn")):
    """Train in a plain loop on one device, with optax as its documentation says."""
    model = model or Net()
    graph, state = nnx.split(model, nnx.Param)

    def of_params(params):
        full = nnx.State(state)
        nnx.replace_by_pure_dict(full, params)
        return loss(nnx.merge(graph, full), BATCH)

    @jax.jit
    def update(params, kept):
        value, gradients = jax.value_and_grad(of_params)(params)
        known = {"value": value, "grad": gradients, "value_fn": of_params}
        arguments = {} if plain else {name: known[name] for name in extra}
        updates, kept = transformation.update(gradients, kept, params, **arguments)
        return optax.apply_updates(params, updates), kept, value

    # optax.MultiSteps is not a transformation, and takes no further arguments.
    plain = not extra or isinstance(optimizer, optax.MultiSteps)
    transformation = optimizer if plain else optax.with_extra_args_support(optimizer)
    params = nnx.to_pure_dict(state)
    kept, losses = optimizer.init(params), []
    for _ in range(STEPS):
        params, kept, value = update(params, kept)
        losses.append(float(value))
    return losses


def fit(optimizer, mesh="fsdp=4,tensor=2", model=None, **settings):
    trainer = mw.Trainer(
        model=model or Net(),
        loss=loss,
        optimizer=optimizer,
        mesh=mesh,
        log_every=1,
        sharding=mw.ShardingConfig(min_shard_size=0),
        **settings,
    )
    return list(trainer.fit([BATCH] * STEPS, steps=STEPS).losses.values())


def test_a_line_search_sees_the_loss_of_the_whole_batch():
    search = optax.scale_by_backtracking_linesearch(max_backtracking_steps=8)
    optimizer = optax.chain(optax.sgd(4.0), search)
    losses = plain_losses(optimizer, nnx.Linear(8, 4, rngs=nnx.Rngs(0)))
    assert losses[0] > losses[1] > losses[2]
    own = fit(optimizer, "data=8", nnx.Linear(8, 4, rngs=nnx.Rngs(0)))
    np.testing.assert_allclose(own, losses, rtol=1e-5)


class Normed(nnx.Module):
    """Its statistics come before its parameters, and a table before all of them."""

    def __init__(self):
        self.a_table = nnx.Variable(jnp.ones((8,)))
        self.head = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(8, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.head(self.norm(x * self.a_table))


@pytest.mark.full
def test_a_line_search_trains_a_model_with_other_leaves_than_parameters():
    search = optax.scale_by_backtracking_linesearch(max_backtracking_steps=8)
    losses = fit(optax.chain(optax.sgd(1.0), search), "fsdp=4,tensor=2", Normed())
    assert losses[0] > losses[1] > losses[2]


def test_an_optimizer_gets_the_loss_and_parameters_as_nested_dicts():
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=0.9)
    optimizer = optax.chain(optax.multi_transform(PARTS, walked), plateau)
    np.testing.assert_allclose(fit(optimizer), plain_losses(optimizer), rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("name", FURTHER)
def test_further_optimizers_train_as_in_a_plain_loop(name):
    optimizer = FURTHER[name]()
    np.testing.assert_allclose(fit(optimizer), plain_losses(optimizer), rtol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_accumulation_steps": 2},
        {"gradient_accumulation_steps": 2, "sync_gradients_every": 2, "mesh": "data=8"},
        {"mesh": "pipe=2,fsdp=4", "gradient_accumulation_steps": 2},
    ],
    ids=["accumulated", "local", "stages"],
)
def test_a_line_search_works_however_gradients_are_computed(settings):
    optimizer = optax.lbfgs()
    np.testing.assert_allclose(fit(optimizer, **settings), plain_losses(optimizer), rtol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["fsdp=4,tensor=2", "pipe=2,data=4"])
def test_a_line_search_is_proven_equal_in_float64(mesh):
    trainer = mw.Trainer(model=Net(), loss=loss, optimizer=optax.lbfgs(memory_size=2), mesh=mesh)
    certificate = trainer.verify(lambda _: BATCH, steps=3)
    assert certificate.equal, str(certificate)
    (reason,) = certificate.not_compared
    assert "the optimizer uses the loss" in reason


@pytest.mark.full
def test_sharpness_aware_minimization_gets_gradients_elsewhere():
    inner, adversary = optax.sgd(0.01), optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    opaque = optax.contrib.sam(inner, adversary, opaque_mode=True)
    # Without that mode, every second step is one of the model.
    losses = plain_losses(optax.contrib.sam(inner, adversary), extra=())
    assert fit(opaque)[:2] == pytest.approx(losses[::2], rel=1e-5)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (optax.lookahead(optax.sgd(0.1), 5, 0.5), "fast and slow"),
        (
            optax.GradientTransformationExtraArgs(
                lambda _: (), lambda u, s, _=None, *, history: (u, s)
            ),
            "history",
        ),
        (optax.contrib.differentially_private_aggregate(1.0, 0.1, 0), "batch dimension"),
    ],
    ids=["lookahead", "unknown argument", "gradients by sample"],
)
def test_an_optimizer_that_needs_more_is_refused(optimizer, message):
    with pytest.raises(UserError, match=message):
        fit(optimizer)


def test_an_exception_in_a_label_function_is_the_users_own():
    def labels(_):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine") as caught:
        fit(optax.multi_transform(PARTS, labels))
    assert "while calling the optimizer's init" in caught.value.__notes__
