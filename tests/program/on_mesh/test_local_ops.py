"""What XLA would gather stays on the devices, and the results are those of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshwright as mw

WIDTH, LENGTH, SAMPLES = 16, 8, 8


class Fourier(nnx.Module):
    def __init__(self, rngs):
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.out(jnp.fft.fft2(x.astype(jnp.complex64), axes=(1, 2)).real)


class Depthwise(nnx.Module):
    """Its fused projection cannot be divided over tensor, so its channels are not."""

    def __init__(self, rngs):
        self.both = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.mix = nnx.Conv(
            WIDTH, WIDTH, kernel_size=(3,), feature_group_count=WIDTH, padding="CAUSAL", rngs=rngs
        )

    def __call__(self, x):
        value, gate = jnp.split(self.both(x), 2, axis=-1)
        return self.mix(value) * nnx.sigmoid(gate)


class Routed(nnx.Module):
    def __init__(self, rngs, experts=4):
        self.router = nnx.Linear(WIDTH, experts, use_bias=False, rngs=rngs)
        shape = (experts, WIDTH, WIDTH)
        self.kernels = nnx.Param(0.3 * jax.random.normal(rngs.params(), shape))

    def __call__(self, x):
        scores, chosen = jax.lax.top_k(nnx.softmax(self.router(x)), 2)
        gates = jnp.sum(jax.nn.one_hot(chosen, 4) * scores[..., None], axis=-2)
        return jnp.einsum("blef,ble->blf", jnp.einsum("bld,edf->blef", x, self.kernels[...]), gates)


class Attention(nnx.Module):
    def __init__(self, rngs):
        query, key, value, out = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4))
        self.query, self.key, self.value, self.out = query, key, value, out

    def __call__(self, x):
        heads = (part(x).reshape(*x.shape[:2], 4, 4) for part in (self.query, self.key, self.value))
        return self.out(nnx.dot_product_attention(*heads).reshape(x.shape))


class Residual(nnx.Module):
    """Mixers on a residual stream without norms, and an MLP that tensor divides."""

    def __init__(self, mixers, rngs):
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.mixers = nnx.List(mixer(rngs) for mixer in mixers)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        for mixer in self.mixers:
            x = x + mixer(x)
        return x + self.down(nnx.gelu(self.up(x)))


def loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def trainer_of(*mixers, mesh="data=2,tensor=2"):
    return mw.Trainer(
        model=lambda rngs: Residual(mixers, rngs),
        loss=loss,
        optimizer=optax.sgd(0.1),
        mesh=mesh,
        devices=jax.devices()[:4],
    )


def batch_of():
    random = np.random.default_rng(0)
    shape = (SAMPLES, LENGTH, WIDTH)
    return {name: random.normal(size=shape).astype(np.float32) for name in ("x", "y")}


def test_no_activations_are_gathered():
    ledger = mw.ledger(trainer_of(Fourier, Depthwise, Routed, Attention), batch_of())
    assert ledger.suspicious == [], str(ledger)
    over_data = {line.kind for line in ledger.lines if line.axes == ["data"]}
    assert over_data == {"all-reduce"}


@pytest.mark.full
@pytest.mark.parametrize("mixer", [Fourier, Depthwise, Routed, Attention])
def test_the_result_is_that_of_one_device(mixer):
    certificate = trainer_of(mixer).verify([batch_of()] * 2, steps=1)
    assert certificate.equal, str(certificate)
