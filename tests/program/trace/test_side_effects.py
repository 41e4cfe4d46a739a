"""What a model or loss does in Python while it is traced is refused or named."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import device_count

import meshwright as mw

BATCH = {"x": np.ones((8, 4), "float32")}


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(4, 4, rngs=rngs)
        self.calls, self.size, self.seen = 0, None, nnx.static([])

    def __call__(self, x):
        return self.layer(x)


class Counting(Net):
    def __call__(self, x):
        self.calls += 1
        return self.layer(x) * self.calls


class CountingUnused(Net):
    def __call__(self, x):
        self.calls += 1
        return self.layer(x)


class Remembering(Net):
    def __call__(self, x):
        self.size = x.shape[1]
        return self.layer(x)


class Appending(Net):
    def __call__(self, x):
        self.seen.append(x.shape)
        return self.layer(x) * len(self.seen)


class Caching(Net):
    def __call__(self, x):
        self.hidden = self.layer(x)
        return self.hidden


class Writing(Net):
    def __call__(self, x):
        self.layer.kernel[...] = self.layer.kernel / 2
        return self.layer(x)


def loss(model, batch):
    return jnp.mean(model(batch["x"]) ** 2)


def assemble(model, its_loss=loss):
    trainer = mw.Trainer(model=model, loss=its_loss, optimizer=optax.sgd(0.1), mesh="data=8")
    return trainer.assemble(BATCH)


def plain_values(model):
    """The loss of three calls under `nnx.jit`."""
    call = nnx.jit(loss)
    return [float(call(model, BATCH)) for _ in range(3)]


def test_a_counter_that_the_model_computes_with_is_refused():
    values = plain_values(Counting(nnx.Rngs(0)))
    np.testing.assert_allclose(values, np.square([1, 2, 3]) * values[0], rtol=1e-5)
    with pytest.raises(mw.UserError, match="changes `calls` in its call, and then") as caught:
        assemble(Counting)
    assert "self.calls = nnx.Variable" in caught.value.fix


def test_a_counter_without_effect_is_warned_about_and_a_size_is_not():
    assert [r for r in assemble(CountingUnused).remarks if "`calls`" in r]
    assert assemble(Remembering).remarks == assemble(Net).remarks == ()


@pytest.mark.parametrize("form", ["class", "instance"])
def test_a_list_that_grows_is_as_under_nnx_jit_and_warned_about(form):
    values = plain_values(Appending(nnx.Rngs(0)))
    assert values[0] == values[1] == values[2]
    model = Appending if form == "class" else Appending(nnx.Rngs(0))
    first, second = assemble(model), assemble(model)
    assert "`seen`" in first.remarks[0]
    assert str(first.traced.closed) == str(second.traced.closed)
    assert form == "class" or model.seen == []


def test_an_array_kept_on_the_model_is_refused_as_nnx_jit_does():
    with pytest.raises(ValueError, match="metadata"):
        plain_values(Caching(nnx.Rngs(0)))
    with pytest.raises(mw.UserError, match="keeps an array of its call in `hidden`"):
        assemble(Caching)


def test_a_trained_parameter_that_the_model_writes_to_gets_a_new_value():
    assembled = assemble(Writing)
    assert assembled.traced.kept_paths[-1] == "layer.kernel"
    assert not assembled.remarks


def by_name(model, batch):
    return loss(model, batch) / device_count()


def by_attribute(model, batch):
    return loss(model, batch) / len(jax.devices())


class PerProcess(Net):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.number = jax.process_index()


@pytest.mark.parametrize(
    ("model", "its_loss", "name"),
    [
        (Net, by_name, "device_count"),
        (Net, by_attribute, "devices"),
        (PerProcess, loss, "process_index"),
        (lambda rngs: PerProcess(rngs), loss, "process_index"),
    ],
)
def test_reading_devices_is_named_with_its_line(model, its_loss, name):
    before = jax.devices, jax.device_count, device_count
    (remark,) = assemble(model, its_loss).remarks
    assert f"calls jax.{name}()" in remark
    assert "test_side_effects.py:" in remark
    assert before == (jax.devices, jax.device_count, device_count)


def test_verify_and_fit_name_it():
    trainer = mw.Trainer(model=Net, loss=by_attribute, optimizer=optax.sgd(0.1), mesh="data=8")
    with pytest.warns(UserWarning, match=r"calls jax\.devices\(\)") as warned:
        trainer.fit([BATCH], steps=1)
    assert len(warned) == 1
    certificate = trainer.verify([BATCH], steps=1)
    assert "calls jax.devices()" in str(certificate)


@pytest.mark.parametrize("call", ["pmean", "axis_index", "all_gather", "BatchNorm"])
def test_axis_names_say_that_the_loss_sees_the_global_batch(call):
    class Normed(Net):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.norm = nnx.BatchNorm(4, axis_name="batch", rngs=rngs)

    def with_axis(model, batch):
        value = loss(model, batch)
        if call == "BatchNorm":
            return model.norm(batch["x"]).mean() + value
        if call == "axis_index":
            return value + jax.lax.axis_index("batch")
        return getattr(jax.lax, call)(value, "batch").mean()

    with pytest.raises(mw.UserError, match="axis name `batch`") as caught:
        assemble(Normed, with_axis)
    assert "global batch" in caught.value.why
    assert "axis_name=" in caught.value.fix
