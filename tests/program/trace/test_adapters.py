"""Adapters as a pass: a program with adapters computes what the merged weights compute."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxpr_as_fun
from program.programs import evaluate, quick

from meshwright import LoRA, UserError, reference
from meshwright.program.trace.build_model import describe_model
from meshwright.program.trace.choose_adapters import adapt_model, describe_adapters
from meshwright.program.trace.traced_loss import trace_loss
from meshwright.program.trace.trained_leaves import trained_by

pytestmark = pytest.mark.quick


class Layers(nnx.Module):
    """Every kind of linear layer of Flax, and one whose kernel is reshaped and sliced."""

    def __init__(self, rngs: nnx.Rngs):
        self.general = nnx.LinearGeneral(6, (2, 3), rngs=rngs)
        self.back = nnx.LinearGeneral((2, 3), 6, axis=(-2, -1), rngs=rngs)
        self.experts = nnx.LinearGeneral(6, 4, batch_axis={0: 5}, rngs=rngs)
        self.einsum = nnx.Einsum("bi,oi->bo", (6, 4), (6,), rngs=rngs)
        self.fused = nnx.Param(jax.random.normal(rngs(), (6, 12)))

    def __call__(self, x):
        x = self.einsum(self.experts(self.back(self.general(x))))
        first, second = jnp.split(self.fused[...], 2, axis=1)
        return x @ first + x @ second.T.reshape(2, 3, 6).reshape(6, 6)


class Conv(nnx.Module):
    """A network of convolutions, strided, dilated and transposed, and one by channel."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Conv(3, 4, (3, 3), strides=2, rngs=rngs)
        self.depthwise = nnx.Conv(4, 4, (3, 3), feature_group_count=4, rngs=rngs)
        self.up = nnx.ConvTranspose(4, 5, (3, 3), strides=(2, 2), transpose_kernel=True, rngs=rngs)
        self.head = nnx.Linear(5, 2, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.first(x.reshape(-1, 4, 4, 3)))
        return self.head(self.up(nnx.relu(self.depthwise(x))).mean((1, 2)))


class Tied(nnx.Module):
    """A table that is looked up and is the head, and layers of a stack in a checkpointed scan."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(7, 6, rngs=rngs)

        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def layers(rngs):
            return nnx.Linear(6, 6, rngs=rngs)

        self.layers = layers(rngs)

    def __call__(self, x):
        tokens = jnp.abs(x * 3).astype(jnp.int32) % 7

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def run(x, layer):
            return jnp.tanh(layer(x))

        return self.embed.attend(run(self.embed(tokens), self.layers))


class Recurrent(nnx.Module):
    """A recurrence like Mamba's: projections, a causal convolution, a scan over time, a gate."""

    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(6, 8, rngs=rngs)
        self.conv = nnx.Conv(4, 4, (3,), padding="CAUSAL", feature_group_count=4, rngs=rngs)
        self.step = nnx.Linear(4, 4, rngs=rngs)
        self.decay = nnx.Param(jnp.ones((4,)))
        self.out = nnx.Linear(4, 6, rngs=rngs)

    def __call__(self, x):
        x, gate = jnp.split(self.inner(x.reshape(x.shape[0], -1, 6)), 2, axis=-1)
        x = nnx.silu(self.conv(x))

        def advance(state, now):
            state = state * jnp.exp(-nnx.softplus(self.decay[...])) + self.step(now)
            return state, jax.lax.cond(now.sum() > 0, self.step, lambda y: y, state)

        _, x = jax.lax.scan(advance, jnp.zeros((x.shape[0], 4)), x.swapaxes(0, 1))
        return self.out(x.swapaxes(0, 1) * nnx.silu(gate))


CASES = {
    Layers: ((5, 6), {"general", "back", "experts", "einsum", "fused"}),
    Conv: ((2, 48), {"first", "up", "head"}),
    Tied: ((4, 6), {"embed", "layers"}),
    Recurrent: ((2, 18), {"inner", "step", "out"}),
}


def loss(model, batch):
    out = model(batch["x"])
    return (out**2).mean(), {"size": jnp.abs(out).sum()}


def adapted(build, shape, loss=loss, **settings):
    """Return the leaves of a model with adapters, its traced loss, and random values of all."""
    trained = trained_by(nnx.Param, LoRA(rank=2, alpha=3, **settings))
    batch = {"x": jax.ShapeDtypeStruct(shape, jnp.float32)}
    leaves = adapt_model(describe_model(build, trained), loss, batch)
    rng = np.random.default_rng(0)
    others = {"RngKey": jax.random.key(1), "RngCount": jnp.uint32(0)}
    values = [
        others.get(leaf.variable, 0.5 * rng.normal(size=leaf.shape).astype("float32"))
        for leaf in leaves.leaves
    ]
    return leaves, trace_loss(loss, leaves, batch), values


@pytest.mark.parametrize("build", CASES)
def test_a_program_with_adapters_computes_what_merged_weights_compute(build):
    shape, targets = CASES[build]
    patterns = ("**",) if "embed" in targets else None
    leaves, traced, values = adapted(build, shape, targets=patterns)
    named = {adapter.path.split(".")[0] for adapter in leaves.adapters.values()}
    assert named == targets
    x = np.random.default_rng(3).normal(size=shape).astype("float32")
    found = evaluate(traced, values, {"x": x})
    expected, metrics = quick(lambda *values: loss(leaves.merge(values), {"x": x}))(*values)
    np.testing.assert_allclose(found.objective.total, expected, rtol=2e-5)
    np.testing.assert_allclose(found.metrics["size"].total, metrics["size"], rtol=2e-5)


class Classes(nnx.Module):
    """A table of positions, layers of its shape, and one that makes logits over another table."""

    def __init__(self, rngs: nnx.Rngs):
        self.tokens, self.places = nnx.Embed(7, 6, rngs=rngs), nnx.Embed(8, 6, rngs=rngs)
        self.up, self.down = nnx.Linear(6, 8, rngs=rngs), nnx.Linear(8, 6, rngs=rngs)
        self.head = nnx.Linear(6, 7, rngs=rngs)

    def __call__(self, x):
        tokens = jnp.abs(x * 3).astype(jnp.int32) % 7
        x = self.tokens(tokens) + self.places(jnp.arange(x.shape[1]))
        return self.head(nnx.remat(lambda model, x: model.down(nnx.gelu(model.up(x))))(self, x))


@pytest.mark.parametrize("softmax", [True, False])
def test_targets_follow_from_uses_and_not_from_shapes(softmax):
    def of_logits(model, batch):
        logits = model(batch["x"])
        return (nnx.log_softmax(logits) if softmax else logits).mean()

    leaves, *_ = adapted(Classes, (4, 6), of_logits)
    assert {a.path for a in leaves.adapters.values()} - {"head.kernel"} == {
        "up.kernel", "down.kernel",
    }  # fmt: skip
    left_out = "head.kernel, " * softmax + "places.embedding, tokens.embedding"
    assert describe_adapters(leaves).endswith(f"up.kernel; left out: {left_out}")


def test_the_last_layer_before_a_tied_head_is_adapted():
    class Last(Classes):
        def __call__(self, x):
            x = self.tokens(jnp.abs(x).astype(jnp.int32) % 7) + self.places(jnp.arange(6) % 6)
            return self.tokens.attend(self.back(self.down(self.up(x))))

        def __init__(self, rngs: nnx.Rngs):
            super().__init__(rngs)
            self.places, self.back = nnx.Embed(6, 6, rngs=rngs), nnx.Linear(6, 6, rngs=rngs)

    leaves, *_ = adapted(Last, (4, 6), lambda m, b: nnx.log_softmax(m(b["x"])).mean())
    assert {a.path[:-7] for a in leaves.adapters.values()} == {"up", "down", "back"}


def test_switching_off_gives_the_base_exactly():
    def both(model, batch):
        return loss(model, batch)[0], {"base": reference(loss, model, batch)[0]}

    _, traced, values = adapted(Tied, (4, 6), both)
    x = np.random.default_rng(3).normal(size=(4, 6)).astype("float32")
    plain = trace_loss(loss, describe_model(Tied), {"x": x})
    expected = evaluate(plain, values[: len(plain.leaves)], {"x": x}).objective.total
    found = evaluate(traced, values, {"x": x})
    assert found.metrics["base"].total == expected
    assert found.objective.total != expected
    run = jaxpr_as_fun(traced.closed)
    assert not any(map(np.any, quick(jax.grad(lambda v: run(*v, x)[2], allow_int=True))(values)))


def test_a_reference_without_adapters_is_refused():
    def both(model, batch):
        return (model(batch["x"]) - reference(model, batch["x"])).mean()

    batch = {"x": jax.ShapeDtypeStruct((5, 6), jnp.float32)}
    with pytest.raises(UserError, match=r"uses mw\.reference, and the model has no adapters"):
        trace_loss(both, describe_model(Layers), batch)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("furst.**",), r"`furst\.\*\*` of lora=mw\.LoRA\(targets=…\) matches.*\n.*`first\.\*\*`"),
        (("depthwise.kernel",), r"cannot have an adapter\nit is used by `conv_general_dilated`"),
        (("first.bias",), r"it is used by `(reshape|broadcast_in_dim|add)` in `first`"),
    ],
)
def test_targets_that_cannot_be_adapted_are_refused(targets, message):
    with pytest.raises(UserError, match=message):
        adapted(Conv, (2, 48), targets=targets)


@pytest.mark.full
def test_dropout_draws_anew_in_every_step_and_not_in_evaluations():
    leaves, traced, values = adapted(Recurrent, (2, 18), dropout=0.5)
    x = np.random.default_rng(3).normal(size=(2, 18)).astype("float32")
    found = evaluate(traced, values, {"x": x})
    states = [n for n, leaf in enumerate(leaves.leaves) if leaf.role == "state"]
    after = list(values)
    for number, new in zip(states, found.state, strict=True):
        after[number] = new
    again = evaluate(traced, values, {"x": x}).objective.total
    assert found.objective.total == again != evaluate(traced, after, {"x": x}).objective.total
    batch = {"x": jax.ShapeDtypeStruct(x.shape, x.dtype)}
    without = trace_loss(loss, replace(leaves, evaluated=True), batch)
    expected, _ = quick(lambda *values: loss(leaves.merge(values), {"x": x}))(*values)
    np.testing.assert_allclose(
        evaluate(without, values, {"x": x}).objective.total, expected, rtol=2e-5
    )
