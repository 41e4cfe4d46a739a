"""Weights that are read many times: their gradients are added on each device and reduced once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from quick import quick_module, quick_options

import meshwright as mw
from meshwright.models.lstm import LSTM

__all__ = ["quick_module"]
pytestmark = pytest.mark.usefixtures("quick_module")

VOCABULARY, WIDTH, LENGTH, SAMPLES = 64, 32, 12, 16
MESHES = ("data=8", "fsdp=8", "fsdp=4,tensor=2")


def own(rngs):
    return LSTM(vocab_size=VOCABULARY, embed_size=WIDTH, hidden_size=WIDTH, rngs=rngs)


class Between(nnx.Module):
    """An embedding and a head around something."""

    def __init__(self, inside, rngs, repeats=1):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.inside = inside(rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)
        self.repeats = repeats

    def __call__(self, tokens):
        x = self.embed(tokens)
        for _ in range(self.repeats):
            x = self.inside(x)
        return self.head(x)


def library(cell):
    return lambda rngs: nnx.RNN(cell(WIDTH, WIDTH, rngs=rngs), rngs=rngs)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Universal(nnx.Module):
    """One block in a loop."""

    def __init__(self, rngs):
        self.block = Block(rngs)

    def __call__(self, x):
        return jax.lax.scan(lambda x, _: (self.block(x), None), x, length=4)[0]


class Layers(nnx.Module):
    """Recurrent layers in blocks, whose weights are gathered again for the backward pass."""

    def __init__(self, rngs):
        self.blocks = nnx.List([library(nnx.OptimizedLSTMCell)(rngs) for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


class Unusual(nnx.Module):
    """A loop that reads weights in branches, checkpoints and loops, and computes others."""

    def __init__(self, rngs):
        self.scale = nnx.Param(1 + 0.1 * rngs.params.normal((WIDTH,)))
        self.table = nnx.Param(0.3 * rngs.params.normal((VOCABULARY, WIDTH)))
        self.first, self.second, self.third = (
            nnx.Param(rngs.params.normal((WIDTH, WIDTH)) / WIDTH) for _ in range(3)
        )
        self.kernel = nnx.Param(rngs.params.normal((3, WIDTH, WIDTH)) / WIDTH)

    def __call__(self, x):
        scale, table, kernel = self.scale[...], self.table[...], self.kernel[...]
        first, second, third = self.first[...], self.second[...], self.third[...]

        def iterate(carry, i):
            x, _ = carry
            y = jax.lax.conv_general_dilated(
                x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
            )
            y = (y - y.mean(-1, keepdims=True)) * scale
            y = y + table[jnp.argmax(x, -1) + i]
            unit = scale * first / jnp.sqrt(1 + (first**2).sum(0, keepdims=True))
            y = jax.checkpoint(lambda y: jnp.tanh(y @ unit))(y)
            y = jax.lax.cond(i > 0, lambda y: y @ second, lambda y: y * jnp.exp(scale), y)
            y, _ = jax.lax.scan(lambda y, _: (jnp.tanh(y @ third.T), None), y, length=2)
            # A value that has the samples in one dim, and only weights in it.
            every = jnp.broadcast_to(scale, x.shape)
            return (x + y * every, every), None

        return jax.lax.scan(iterate, (x, jnp.zeros_like(x)), jnp.arange(2))[0][0]


MODELS = {
    "own LSTM": own,
    "LSTM": lambda rngs: Between(library(nnx.OptimizedLSTMCell), rngs),
    "GRU": lambda rngs: Between(library(nnx.GRUCell), rngs),
    "block twice": lambda rngs: Between(Block, rngs, repeats=2),
    "universal": lambda rngs: Between(Block, rngs, repeats=4),
    "universal in a loop": lambda rngs: Between(Universal, rngs),
    "layers": lambda rngs: Between(Layers, rngs),
    "unusual": lambda rngs: Between(Unusual, rngs),
}


def loss(model, tokens):
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def tokens(length=LENGTH):
    random = np.random.default_rng(0)
    return random.integers(VOCABULARY, size=(SAMPLES, length + 1)).astype(np.int32)


def trainer(name, mesh, precision="no"):
    return mw.Trainer(
        model=MODELS[name],
        loss=loss,
        optimizer=optax.sgd(0.1),
        mesh=mesh,
        precision=precision,
        sharding=mw.ShardingConfig(min_shard_size=64),
    )


def check_minimum(ledger):
    for axis, sent in ledger.axes.items():
        assert 0.98 <= sent.ratio <= 1.05, (axis, sent.ratio, sent.excess)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param("own LSTM", "data=8", marks=pytest.mark.full),
        ("LSTM", "fsdp=4,tensor=2"),
        pytest.param("block twice", "data=8", marks=pytest.mark.full),
    ],
)
def test_gradients_of_weights_read_many_times_are_reduced_once(name, mesh):
    check_minimum(trainer(name, mesh).ledger(tokens()))


@pytest.mark.full
def test_the_length_of_a_sequence_does_not_change_what_is_sent():
    sent = [
        trainer("own LSTM", "data=8").ledger(tokens(length)).axes["data"].sent_bytes
        for length in (4, 64)
    ]
    assert sent[0] == sent[1]


def test_weights_of_loops_in_blocks_are_gathered_again_for_the_backward_pass():
    ledger = trainer("layers", "fsdp=8").ledger(tokens())
    check_minimum(ledger)
    gathers = [line for line in ledger.lines if line.kind == "all-gather"]
    assert {line.phase for line in gathers if "blocks" in line.module} >= {"forward", "backward"}


@pytest.mark.full
def test_one_update_with_unusual_reads_is_that_of_plain_flax():
    assembled = trainer("unusual", "fsdp=4,tensor=2").assemble(tokens())
    state = assembled.init(0, quickly=True)
    graph, before = nnx.split(jax.device_get(assembled.model(state)))
    after = nnx.state(assembled.model(assembled.step(state, assembled.put_batch(tokens()))[0]))

    @functools.partial(jax.jit, compiler_options=quick_options())
    def update(values):
        gradients = jax.grad(lambda values: loss(nnx.merge(graph, values), tokens()))(values)
        return jax.tree.map(lambda value, gradient: value - 0.1 * gradient, values, gradients)

    same = functools.partial(np.testing.assert_allclose, atol=1e-6)
    jax.tree.map(same, after, update(before))


@pytest.mark.full
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_models_that_read_weights_many_times_train_like_on_one_device(name, mesh, precision):
    training = trainer(name, mesh, precision)
    certificate = training.verify(lambda _: tokens(), steps=2)
    assert certificate.equal, [failure.sentence() for failure in certificate.failures()]
    check_minimum(training.ledger(tokens()))
