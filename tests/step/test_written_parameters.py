"""Parameters that a model writes to in its call are updated as by `nnx.jit` and `nnx.Optimizer`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from odd_models import Normed, NormedBlocks, Stacked, Written, batch, loss

import meshwright as mw

STEPS = 5
OPTIMIZER = optax.adamw(1e-2)
SCAN = mw.ShardingConfig(blocks="scan", min_shard_size=1)


def plain(build, microbatches=1):
    """Losses and parameters of Flax's own loop; microbatches one after another, as one would."""
    model = build(nnx.Rngs(jax.random.key(0)))
    optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)

    @nnx.jit
    def update(model, optimizer, batch):
        values, total = [], None
        for number in range(microbatches):
            micro = jax.tree.map(lambda leaf, n=number: leaf[n::microbatches], batch)
            value, gradients = nnx.value_and_grad(loss)(model, micro)
            values.append(value)
            total = gradients if total is None else jax.tree.map(jnp.add, total, gradients)
        optimizer.update(model, jax.tree.map(lambda g: g / microbatches, total))
        return sum(values) / microbatches

    return [float(update(model, optimizer, batch())) for _ in range(STEPS)], params(model)


def params(model):
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {path: np.asarray(value[...]) for path, value in state}


def trainer(build, mesh="data=1", **options):
    devices = {"data=1": jax.devices()[:1], "data=4": jax.devices()[:4]}.get(mesh)
    return mw.Trainer(
        model=build, loss=loss, optimizer=OPTIMIZER, mesh=mesh, devices=devices, **options
    )


def assert_equal(build, mesh, microbatches=1, **options):
    if microbatches > 1:
        options["gradient_accumulation_steps"] = microbatches
    result = trainer(build, mesh, log_every=1, **options).fit([batch()] * STEPS, steps=STEPS)
    losses, parameters = plain(build, microbatches)
    np.testing.assert_allclose([result.losses[n + 1] for n in range(STEPS)], losses, rtol=1e-6)
    for path, value in params(result.model).items():
        np.testing.assert_allclose(value, parameters[path], atol=1e-6)


@pytest.mark.parametrize(
    "mesh", [pytest.param("data=1", marks=pytest.mark.full), "fsdp=4,tensor=2"]
)
def test_the_optimizer_updates_the_written_value(mesh):
    assert_equal(Written, mesh)


@pytest.mark.full
@pytest.mark.parametrize(
    ("build", "mesh", "options"),
    [
        (Written, "fsdp=4,tensor=2", {"microbatches": 2}),
        (NormedBlocks, "data=4", {"microbatches": 4, "sync_gradients_every": 2}),
        (NormedBlocks, "fsdp=8", {"sharding": SCAN, "microbatches": 2}),
    ],
)
def test_microbatches_and_rolled_blocks_write_one_after_another(build, mesh, options):
    assert_equal(build, mesh, **options)


@pytest.mark.full
def test_written_parameters_are_proven():
    certificate = trainer(Written, "fsdp=4,tensor=2").verify([batch()] * 2, steps=2)
    assert certificate.equal
    assert not certificate.warnings
    assert certificate.verdict() == "equal to one device"


@pytest.mark.full
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_written_parameters_are_proven_in_half_precision(precision):
    assert trainer(Written, "fsdp=8", precision=precision).verify([batch()] * 2, steps=2).equal


def test_written_parameters_are_refused_in_stages_by_name():
    with pytest.raises(mw.UserError, match=r"writes to the parameter `blocks\.0\.layer") as caught:
        trainer(NormedBlocks, "data=2,pipe=4", gradient_accumulation_steps=4).assemble(batch())
    assert 'leave out mesh="pipe=4"' in caught.value.fix


@pytest.mark.filterwarnings("ignore:The 'split' argument of 'fork':DeprecationWarning")
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_variables_that_transforms_return_unchanged_are_not_written(precision):
    def written(model):
        return trainer(model, "data=8", precision=precision).assemble(batch()).traced.written

    assert written(Stacked) == ()
    assert len(written(Normed)) == 1


def test_a_parameter_that_changes_its_shape_is_refused():
    class Growing(Normed):
        def __call__(self, x):
            self.layer.layer_instance.bias.set_value(jnp.zeros((1, 8)))
            return self.layer(x)

    with pytest.raises(mw.UserError, match=r"changes the shape of `layer\.layer_instance"):
        trainer(Growing).assemble(batch())
