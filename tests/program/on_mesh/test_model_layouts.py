"""Sharding constraints in a model's own code: followed on the mesh, or named as ignored."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.lax import with_sharding_constraint as constrain
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from small_models import fill, square_loss, vectors
from step.runs import by_hand, on_mesh, put_together

import meshwright as mw

WIDTH = 16
BOTH = {"data": 2, "fsdp": 2, "tensor": 2}


def own_mesh(*names):
    return Mesh(np.array(jax.devices()).reshape(2, 4), names)


class Net(nnx.Module):
    """Two layers; ``inner`` and ``outer`` are what it constrains their results to."""

    def __init__(self, inner=None, outer=None, width=2 * WIDTH, *, rngs):
        self.up = nnx.Linear(WIDTH, width, rngs=rngs)
        self.down = nnx.Linear(width, WIDTH, rngs=rngs)
        self.inner, self.outer = inner, outer

    def __call__(self, x):
        x = nnx.relu(self.up(x))
        if self.inner is not None:
            x = constrain(x, self.inner)
        x = self.down(x)
        return x if self.outer is None else jax.lax.with_sharding_constraint(x, self.outer)


def assembled(mesh, *specs, wide=False, **options):
    build = lambda: Net(*specs, rngs=nnx.Rngs(0), **options)  # noqa: E731
    return put_together(build, square_loss, vectors(), mesh, wide=wide)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (P("data", "model"), P(("data", "fsdp"), "tensor")),
        (P("dp", "tp"), P(("data", "fsdp"), "tensor")),
        (P("data", "fsdp"), P("data", "fsdp")),
        (P("model", None), P("tensor", None)),
        (P(None, ("tensor", "data")), P(None, ("tensor", "data"))),
        (P(P.UNCONSTRAINED, "fsdp"), P(P.UNCONSTRAINED, "fsdp")),
        (P(), P(None, None)),
    ],
)
def test_constraints_are_followed_under_the_names_of_the_mesh(spec, expected):
    step = assembled(BOTH, spec)
    assert expected in step.decision.activations.values()
    assert not step.decision.ignored


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (P("data", "expert"), "P('data', 'expert'): there is no mesh axis `expert`"),
        (P("pipe", None), "`pipe` divides the blocks of a model"),
    ],
)
def test_a_constraint_that_cannot_be_followed_is_named_once(spec, said):
    (remark,) = assembled(BOTH, spec).remarks
    assert remark.startswith("a sharding constraint in `model` is ignored: ")
    assert said in remark


def test_a_dim_that_does_not_divide_is_named_with_its_size():
    (remark,) = assembled(BOTH, P("data", "model"), width=5).remarks
    assert "dim 1 has size 5, which is not divisible by tensor=2" in remark


def test_other_kinds_of_sharding_are_named():
    (remark,) = assembled(BOTH, SingleDeviceSharding(jax.devices()[0])).remarks
    assert "SingleDeviceSharding: only sharding over mesh axes" in remark


def test_many_modules_share_a_line():
    class Twice(nnx.Module):
        def __init__(self, rngs):
            self.first, self.second = (Net(P("x", "y"), rngs=rngs) for _ in range(2))

        def __call__(self, x):
            return self.second(self.first(x))

    step = put_together(lambda: Twice(nnx.Rngs(0)), square_loss, vectors(), BOTH, wide=False)
    (remark,) = step.remarks
    assert "in `first` (and 1 more module) is ignored" in remark


@pytest.mark.parametrize("mesh", [BOTH, {"data": 1}], ids=["eight devices", "one device"])
def test_training_with_constraints_equals_the_model_without_them(mesh):
    of_the_author = NamedSharding(own_mesh("data", "model"), P("data", "model"))
    step = assembled(mesh, P("data", "model"), of_the_author, wide=True)
    assert not step.remarks
    model = fill(lambda: Net(rngs=nnx.Rngs(0)))
    batches = [vectors(seed=seed) for seed in range(2)]
    with jax.enable_x64(True):
        found = on_mesh(step, model, batches)
        expected = by_hand(model, square_loss, batches)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-12)
    for path, value in expected.leaves.items():
        np.testing.assert_allclose(found.leaves[path], value, rtol=1e-10, atol=1e-13)


def test_a_jitted_part_that_was_called_before_is_followed_too():
    sharding = NamedSharding(own_mesh("data", "model"), P("data", "model"))
    part = jax.jit(lambda x: constrain(x, sharding))
    shape = jax.ShapeDtypeStruct((16, WIDTH), np.float32)
    before = jax.make_jaxpr(part)(shape)
    assert "sharding_constraint" in str(before)

    class Jitted(Net):
        def __call__(self, x):
            return self.down(nnx.relu(self.up(part(x))))

    build = lambda: Jitted(rngs=nnx.Rngs(0))  # noqa: E731
    step = put_together(build, square_loss, vectors(), BOTH, wide=False)
    assert "sharding_constraint" not in str(step.traced.closed)
    assert P(("data", "fsdp"), "tensor") in step.decision.activations.values()


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["fsdp=2,tensor=2,data=2", "pipe=2,data=2,tensor=2"])
def test_a_trainer_proves_such_a_model_equal_to_one_device(mesh):
    class Stack(nnx.Module):
        def __init__(self, rngs):
            layouts = (P("data", "model"), P("data"))
            self.blocks = nnx.List([Net(*layouts, rngs=rngs) for _ in range(4)])

        def __call__(self, x):
            for block in self.blocks:
                x = x + block(x)
            return x

    trainer = mw.Trainer(model=Stack, loss=square_loss, optimizer=optax.sgd(0.1), mesh=mesh)
    assert trainer.verify(lambda _: vectors(), steps=2).equal
