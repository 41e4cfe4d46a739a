"""Small models with unusual parts, each with ``Net(rngs)`` and an input of 8 features."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

WIDTH = 8


def linear(rngs, **options):
    return nnx.Linear(WIDTH, WIDTH, rngs=rngs, **options)


class Table(nnx.Module):
    """Arrays in plain attributes, a closure and a static NumPy-derived number."""

    def __init__(self, rngs):
        self.layer = linear(rngs)
        self.table = jnp.linspace(0.5, 1.5, WIDTH)
        self.mask = np.arange(WIDTH) % 3 > 0
        self.drawn = jax.random.normal(rngs.params(), (WIDTH,))
        phases = jnp.arange(WIDTH) * 0.1
        self.turn = lambda x: x * jnp.cos(phases)
        self.scale = float(jnp.sqrt(4.0))

    def __call__(self, x):
        return self.turn(self.layer(x)) * self.table * self.drawn / self.scale + self.mask


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.WeightNorm(linear(rngs), rngs=rngs)

    def __call__(self, x):
        return self.layer(x)


class Written(nnx.Module):
    """Parameters that a call writes to: normalized ones, and one that follows the samples."""

    def __init__(self, rngs):
        self.up = nnx.WeightNorm(nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), rngs=rngs)
        self.down = nnx.WeightNorm(nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs), rngs=rngs)
        self.center = nnx.Param(jnp.zeros(WIDTH))

    def __call__(self, x):
        self.center[...] = 0.9 * self.center[...] + 0.1 * x.mean(0)
        return self.down(nnx.relu(self.up(x - self.center)))


class NormedBlocks(nnx.Module):
    """Repeated blocks that write to their kernels, with nothing that mixes samples."""

    def __init__(self, rngs):
        self.blocks = nnx.List(Normed(rngs) for _ in range(4))

    def __call__(self, x):
        for block in self.blocks:
            x = x + nnx.tanh(block(x))
        return x


class Block(nnx.Module):
    """A block with a table of its own."""

    def __init__(self, rngs):
        self.up, self.down = linear(rngs), linear(rngs)
        self.table = jnp.linspace(0.5, 1.5, WIDTH)

    def __call__(self, x):
        return x + self.down(nnx.tanh(self.up(x)) * self.table)


class Blocks(nnx.Module):
    """Repeated blocks with tables, which can be rolled and divided into stages."""

    def __init__(self, rngs):
        self.first = linear(rngs)
        self.table = jnp.linspace(-0.5, 0.5, WIDTH)
        self.blocks = nnx.List(Block(rngs) for _ in range(4))
        self.last = linear(rngs)

    def __call__(self, x):
        x = self.first(x) + self.table
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Containers(nnx.Module):
    """Keys that look alike: dots, slashes, spaces, numbers, unicode and nothing."""

    def __init__(self, rngs):
        self.layers = nnx.Dict(
            {
                "a.b": linear(rngs),
                "a": nnx.Dict({"b": linear(rngs)}),
                "a/b": linear(rngs),
                "a b": linear(rngs),
                "a_b": linear(rngs),
                "ä%2E": linear(rngs),
                "0": linear(rngs),
                "*": linear(rngs),
                "": linear(rngs),
            }
        )

    def __call__(self, x):
        layers = self.layers
        for key in sorted(layers):  # a copy made by nnx.jit has another order
            x = x + nnx.tanh((layers[key]["b"] if key == "a" else layers[key])(x))
        return x


class Shared(nnx.Module):
    def __init__(self, rngs):
        self.first = linear(rngs)
        self.again = nnx.List([self.first, linear(rngs), self.first])

    def __call__(self, x):
        for layer in self.again:
            x = nnx.tanh(layer(x))
        return self.first(x)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pair:
    left: nnx.Module
    right: nnx.Module


class InDataclass(nnx.Module):
    def __init__(self, rngs):
        self.pair = nnx.data(Pair(linear(rngs), linear(rngs)))

    def __call__(self, x):
        return self.pair.right(nnx.tanh(self.pair.left(x)))


@dataclasses.dataclass
class AsDataclass(nnx.Module):
    rngs: dataclasses.InitVar[nnx.Rngs]
    width: int = WIDTH

    def __post_init__(self, rngs):
        self.layer = nnx.Linear(self.width, self.width, rngs=rngs)

    def __call__(self, x):
        return self.layer(x)


class Partial(nnx.Module):
    def __init__(self, rngs):
        self.layer = linear(rngs)
        self.activation = functools.partial(jax.nn.leaky_relu, negative_slope=0.3)
        self.shift = functools.partial(jnp.add, jnp.arange(WIDTH) * 0.1)

    def __call__(self, x):
        return self.shift(self.activation(self.layer(x)))


class OwnRngs(nnx.Module):
    """Holds its random streams, and draws from them in each call."""

    def __init__(self, rngs):
        self.layer, self.rngs = linear(rngs), rngs

    def __call__(self, x):
        return self.layer(x) + 0.1 * jax.random.normal(self.rngs.noise(), x.shape)


class Stacked(nnx.Module):
    """Layers stacked by `nnx.vmap`, run by `nnx.scan` with `nnx.remat`."""

    def __init__(self, rngs):
        make = nnx.vmap(linear, in_axes=0, out_axes=0)
        self.layers = make(rngs.fork(split=3))

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def run(x, layer):
            return x + nnx.tanh(layer(x))

        return run(x, self.layers)


class Scale(nnx.Variable):
    pass


class Variables(nnx.Module):
    """Variables of other types, dtypes and sizes, and a module with nothing in it."""

    def __init__(self, rngs):
        self.layer = linear(rngs, param_dtype=jnp.float16)
        self.gain = nnx.Param(jnp.float32(1.5))
        self.order = nnx.Param(jnp.arange(WIDTH)[::-1])
        self.scale = Scale(jnp.float32(0.5))
        self.calls = nnx.Cache(jnp.zeros((), jnp.int32))
        self.nothing = nnx.Sequential()
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)

    def __call__(self, x):
        self.calls[...] += 1
        y = self.norm(self.layer(x)[:, self.order[...]].astype(jnp.float32))
        self.sow(nnx.Intermediate, "seen", y)
        return self.drop(y) * self.gain * self.scale


class InSequence(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.Sequential(linear(rngs), nnx.relu, nnx.LayerNorm(WIDTH, rngs=rngs))

    def __call__(self, x):
        return self.layers(x)


MODELS = {
    model.__name__: model
    for model in (
        Table,
        Normed,
        Written,
        NormedBlocks,
        Blocks,
        Containers,
        Shared,
        InDataclass,
        AsDataclass,
        Partial,
        OwnRngs,
        Stacked,
        Variables,
        InSequence,
    )
}


def loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def batch(size=16):
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=(size, WIDTH)).astype("float32") for name in "xy"}


def plain_losses(model, optimizer, steps, trainable=nnx.Param):
    """The losses of the loop in Flax's documentation."""
    state = nnx.Optimizer(model, optimizer, wrt=nnx.All(trainable, has_gradient))

    @nnx.jit
    def update(model, state, batch):
        argnums = nnx.DiffState(0, nnx.All(trainable, has_gradient))
        value, gradients = nnx.value_and_grad(loss, argnums=argnums)(model, batch)
        state.update(model, gradients)
        return value

    values = []
    for _ in range(steps):
        values.append(float(update(model, state, batch())))
        nnx.pop(model, nnx.Intermediate)
    return values


def has_gradient(_, value):
    return isinstance(value, nnx.Variable) and jnp.issubdtype(value.dtype, jnp.inexact)
